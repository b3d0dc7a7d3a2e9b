"""The uses of JAX's private parts that see how it compiles and dispatches programs.

=======================================  ==============================================================
``jax._src.dispatch.RuntimeTokenSet``    two of its methods are wrapped, to see each dispatch of a program with our
                                         effect; the object is emptied when programs have failed
``compiler.compile_or_get_cached``       wrapped, to disable a pass of XLA, to read programs of global arrays, and to
                                         keep programs out of JAX's cache
``MeshExecutable.create_cpp_call``       wrapped: without it the second call of a program that was compiled ahead, by
                                         ``jax.jit(f).lower(x).compile()``, passes no token and so fails
``xla_disable_hlo_passes``               an option of XLA's, which JAX hands on
=======================================  ==============================================================

If JAX lacks one of the first three, the import of this file fails with a message.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pycollective.jax_support.jax_internals import OrderedEffect, unsupported

try:
    from jax._src import compiler
    from jax._src.dispatch import RuntimeTokenSet, runtime_tokens
    from jax._src.interpreters.pxla import MeshExecutable

    for _method, _expected in (("get_token_input", ["eff", "devices"]), ("set_token_result", ["eff", "token"])):
        if list(inspect.signature(getattr(RuntimeTokenSet, _method)).parameters) != ["self", *_expected]:
            raise ImportError(f"RuntimeTokenSet.{_method} has other parameters than {_expected}")
    _EXPECTED = ["backend", "computation", "devices", "compile_options"]
    if list(inspect.signature(compiler.compile_or_get_cached).parameters)[:4] != _EXPECTED:
        raise ImportError("compile_or_get_cached has other parameters")
    _create_cpp_call = MeshExecutable.create_cpp_call
except (ImportError, AttributeError) as error:
    raise unsupported(error) from error


def call_programs_compiled_ahead_with_tokens() -> None:
    """Lets a program that was compiled ahead take JAX's Python path if it has ordered effects.

    Its C++ path has no tokens. JAX leaves it out for programs with callbacks, as all those with JAX's own ordered
    effects are.
    """

    @functools.wraps(_create_cpp_call)
    def create_cpp_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        ordered = getattr(self.unsafe_call, "ordered_effects", ())
        return None if ordered else _create_cpp_call(self, *args, **kwargs)

    MeshExecutable.create_cpp_call = create_cpp_call


def see_each_dispatch(
    effect: OrderedEffect, before: Callable[[Sequence[jax.Device]], None], after: Callable[[Any], None]
) -> None:
    """Calls functions around each program with ``effect`` that JAX itself dispatches.

    Such a program takes and returns a token, which orders it after the last program with the same effect. JAX waits for
    that program, and copies a new token to the device, which takes 0.5 ms on a GPU. Here a program on one device takes
    the last token as it is, so XLA orders the two.

    If the earlier program has failed, which an accelerator tells only now, JAX raises its error in the place of this
    program, and would do so for every later one. Here the first raises it, and the next begins with a new token.

    Args:
        effect: the effect.
        before: called with the devices of a program before its dispatch.
        after: called with the token that the program returns after its dispatch.
    """
    token_input, token_result = RuntimeTokenSet.get_token_input, RuntimeTokenSet.set_token_result

    @functools.wraps(token_input)
    def get_token_input(self: Any, eff: Any, devices: Any) -> Any:
        if eff != effect:
            return token_input(self, eff, devices)
        before(devices)
        last = self.current_tokens.get(eff)
        try:
            if last is None or len(devices) > 1 or last._buf.devices() != set(devices):
                return token_input(self, eff, devices)
            if last._buf.is_ready():
                last.block_until_ready()  # raises the error
            return last
        except jax.errors.JaxRuntimeError:
            self.clear()
            raise

    @functools.wraps(token_result)
    def set_token_result(self: Any, eff: Any, token: Any) -> None:
        token_result(self, eff, token)
        if eff == effect:
            after(token)

    RuntimeTokenSet.get_token_input, RuntimeTokenSet.set_token_result = get_token_input, set_token_result


def forget_tokens() -> None:
    """Lets later programs begin with new tokens: those of a program that has failed would make them fail, too."""
    runtime_tokens.clear()


def see_each_compilation(
    *, before: Callable[[Any, Any], None] = lambda *_: None, after: Callable[[Any, Any], None] = lambda *_: None
) -> None:
    """Calls functions around the compilation of each program.

    Args:
        before: called with the module and the options of the compilation, which may be read from JAX's cache.
        after: called with XLA's executable and the array of its devices, which may be other processes'.
    """
    compile_or_get_cached = compiler.compile_or_get_cached

    @functools.wraps(compile_or_get_cached)
    def seen(backend: Any, computation: Any, devices: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        before(computation, options)
        executable = compile_or_get_cached(backend, computation, devices, options, *args, **kwargs)
        after(executable, devices)
        return executable

    compiler.compile_or_get_cached = seen


def keep_tokens_out_of_cache() -> None:
    """Lets JAX write no program to its persistent cache that takes a token on several devices.

    XLA gives such a token no layout. To write the program, it reads the layout, which ends the process. JAX itself has
    no such programs, since it refuses ordered effects on several devices.
    """
    compile_or_get_cached = compiler.compile_or_get_cached
    least_time = "jax_persistent_cache_min_compile_time_secs"

    @functools.wraps(compile_or_get_cached)
    def compiled(backend: Any, computation: Any, devices: Any, *args: Any, **kwargs: Any) -> Any:
        if devices.size == 1 or not _takes_token(computation):
            return compile_or_get_cached(backend, computation, devices, *args, **kwargs)
        seconds = getattr(jax.config, least_time)
        jax.config.update(least_time, math.inf)
        try:
            return compile_or_get_cached(backend, computation, devices, *args, **kwargs)
        finally:
            jax.config.update(least_time, seconds)

    compiler.compile_or_get_cached = compiled


def _takes_token(module: Any) -> bool:
    """Whether an argument of the program is a token."""
    for operation in module.body.operations:
        if "sym_name" in operation.attributes and operation.attributes["sym_name"].value == "main":
            return any("token" in str(argument.type) for argument in operation.regions[0].blocks[0].arguments)
    return False


def disable_pass(options: Any, name: str) -> None:
    """Lets XLA compile a program with these options without a pass, and without those that the user has disabled."""
    flag, given = "xla_disable_hlo_passes", dict(options.env_option_overrides)
    disabled = given.get(flag, getattr(options.executable_build_options.debug_options, flag))
    options.env_option_overrides = [*{**given, flag: ",".join(filter(None, (disabled, name)))}.items()]
