"""Runs a program up to the first call of its step of training, which is traced there and not run."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import runpy
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import jax

from pycollective.errors import message
from pycollective.jax_support import call_site
from pycollective.jax_support.jax_internals import at_top_level
from pycollective.ordering.effect import effect
from pycollective.planning.by_compiling.of_one_rank import with_axis, without_mapped_axis
from pycollective.planning.by_compiling.trace import positional_names, states_of

_WHERE = "plan"

_INSTALLED = tuple(sysconfig.get_path(kind) + "/" for kind in ("purelib", "platlib"))
"""Folders of libraries."""

Place = int | str
"""Of an argument: its position, or its name."""


class Call(NamedTuple):
    """A call of a compiled function.

    Attributes:
        name: the name of the function.
        line: where it stands, "train.py:31".
        made_by: the function that has compiled it, "pc.jit".
        step: the same for global arrays; positional arguments that are trees of arrays.
        args: the shapes of these.
        names: their names.
        donate_argnums: those whose memory the results may take.
        states: those that the function returns again.
        is_parallel: whether it is written for many devices: it has an axis of them, or communicates.
        error: why it cannot be traced as one rank's; "" if it can.
    """

    name: str
    line: str
    made_by: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    names: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    states: tuple[int, ...]
    is_parallel: bool
    error: str

    def __str__(self) -> str:
        trouble = f": {self.error}" if self.error else ""
        return f"{self.name} ({self.line}, {self.made_by}){trouble}"


class _Found(BaseException):
    """Ends the program at its step. A program that goes on after exceptions does not catch it."""


def first_call(program: Path, arguments: Sequence[str], name: str = "") -> tuple[Call, list[Call]]:
    """Runs a program as ``python program arguments`` would, as one rank, until it calls its step.

    The step is the first function compiled by ``jax.jit``, ``jax.pmap``, ``pycollective.jit`` or ``pycollective.pmap``
    that returns one of its arguments again, as a step of training does with its parameters. Functions that libraries
    compile for themselves do not count.

    Args:
        program: the file.
        arguments: the words of its command line.
        name: the name of the step's function. Default: the first that returns an argument again; if there is none, the
            one with the largest arguments.

    Returns:
        The call of the step, and the calls of other functions before it.

    Raises:
        ValueError: the program fails before, or calls no such function.
    """
    calls: list[Call] = []

    def seen(call: Call) -> None:
        calls.append(call)
        if not call.error and (call.name == name if name else call.states):
            raise _Found

    stopped, ended = False, "it ended"
    sys.argv[:] = [str(program), *arguments]
    sys.path.insert(0, str(program.resolve().parent))
    try:
        with _watched(seen):
            runpy.run_path(str(program), run_name="__main__")
    except _Found:
        stopped = True
    except SystemExit as error:
        ended = f"it ended with status {error.code}"
    except Exception as error:  # whatever a program may raise
        ended = f"it raised {type(error).__name__}: {error}"
        if isinstance(error, ImportError):
            ended += ", so install what it needs"
    if stopped:
        return calls[-1], calls[:-1]
    plannable = [call for call in calls if not call.error]
    if plannable and not name and ended == "it ended":
        largest = max(plannable, key=lambda call: _nbytes(call.args))
        return largest, [call for call in calls if call is not largest]
    called = ", ".join(map(str, calls)) or "none"
    which = f"of the name {name}" if name else "that returns its state"
    expected = f"a call of a function {which}, made by jax.jit, jax.pmap, pc.jit or pc.pmap, in {program}"
    remedy = "Name the step with --step, or write the function `network` (docs/plan.md)."
    raise ValueError(message(_WHERE, expected, f"{called} before {ended}", remedy))


def _nbytes(args: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args))


@contextmanager
def _watched(seen: Callable[[Call], None]) -> Iterator[None]:
    """What compiles functions hands the first call of each function of the user to ``seen``."""
    makers: list[tuple[Any, str, str]] = [(jax, "jit", "jax.jit"), (jax, "pmap", "jax.pmap")]
    package = importlib.import_module("pycollective")  # whose names programs use
    makers += [(package, "jit", "pc.jit"), (package, "pmap", "pc.pmap")]
    before = [(where, name, getattr(where, name)) for where, name, _ in makers]
    for (where, name, real), (*_, words) in zip(before, makers, strict=True):
        setattr(where, name, _maker(real, words, seen))
    try:
        yield
    finally:
        for where, name, real in before:
            setattr(where, name, real)


def _maker(real: Callable[..., Any], words: str, seen: Callable[[Call], None]) -> Callable[..., Any]:
    @functools.wraps(real)
    def make(fun: Any = None, *args: Any, **options: Any) -> Any:
        if fun is None:
            return functools.partial(make, **options)
        compiled = real(fun, *args, **options)
        code = getattr(inspect.unwrap(fun), "__code__", None)
        if not (call_site.is_of_user(sys._getframe(1).f_code.co_filename) and code and _is_own(code.co_filename)):
            return compiled
        named = inspect.signature(real).bind_partial(fun, *args, **options)
        given = {**named.arguments, **named.arguments.get("options", {})}
        return _Watched(compiled, lambda own, by_name: seen(_call_of(fun, words, given, own, by_name)))

    return make


def _is_own(file: str) -> bool:
    """Whether a function in this file is the user's own, and no library's."""
    return call_site.is_of_user(file) and not file.startswith(_INSTALLED)


class _Watched:
    """A compiled function that hands the arguments of its first call to another function before it runs."""

    def __init__(self, compiled: Any, seen: Callable[[Any, Any], None]) -> None:
        functools.update_wrapper(self, compiled)
        self._compiled, self._seen, self._called = compiled, seen, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._look(args, kwargs)
        return self._compiled(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        self._look(args, kwargs)
        return self._compiled.lower(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def _look(self, args: Any, kwargs: Any) -> None:
        if not self._called and at_top_level():
            self._called = True
            self._seen(args, kwargs)


def _call_of(fun: Callable[..., Any], made_by: str, options: dict[str, Any], args: Any, kwargs: Any) -> Call:
    names = [name or f"arg{i}" for i, name in enumerate(positional_names(fun, len(args)))]
    is_static = _chosen(fun, options, "static_argnums", "static_broadcasted_argnums")
    is_donated = _chosen(fun, options, "donate_argnums")
    by_name = [name for name in sorted(kwargs) if not is_static(name)]
    places: list[Place] = [*(i for i in range(len(args)) if not is_static(i)), *by_name]
    given = [args[place] if isinstance(place, int) else kwargs[place] for place in places]
    labels = tuple(names[place] if isinstance(place, int) else place for place in places)
    of_one = fun
    if options.get("axis_name") is not None or made_by.endswith("pmap"):
        of_one = with_axis(fun, options.get("axis_name") or "mapped axis")

    def step(*values: Any) -> Any:
        positional, named = list(args), dict(kwargs)
        for place, value in zip(places, values, strict=True):
            if isinstance(place, int):
                positional[place] = value
            else:
                named[place] = value
        return of_one(*positional, **named)

    kind = inspect.Parameter.POSITIONAL_ONLY
    step.__signature__ = inspect.Signature([inspect.Parameter(one, kind) for one in labels])  # type: ignore[attr-defined]
    plain = inspect.unwrap(fun)
    line = f"{Path(plain.__code__.co_filename).name}:{plain.__code__.co_firstlineno}"
    donated = tuple(i for i, place in enumerate(places) if is_donated(place))
    call = Call(plain.__name__, line, made_by, step, (), labels, donated, (), of_one is not fun, "")
    try:
        if made_by.endswith("pmap"):
            axes = options.get("in_axes", 0)
            of_each = [axes[i] if isinstance(axes, (tuple, list)) else axes for i in places if isinstance(i, int)]
            given = without_mapped_axis(given, [*of_each, *[0] * len(by_name)])
        shapes = jax.eval_shape(lambda *xs: xs, *given)
        is_parallel = call.is_parallel or effect in jax.make_jaxpr(step)(*shapes).effects
        states = tuple(number for number in states_of(step, shapes) if _can_be_trained(shapes[number]))
    except Exception as error:  # of the program's own function; its call raises it too, or this one cannot be planned
        return call._replace(error=f"{type(error).__name__}: {error}")
    return call._replace(args=shapes, states=states, is_parallel=is_parallel)


def _can_be_trained(arg: Any) -> bool:
    """Whether it has arrays with a fraction. Counters and keys of random numbers are returned again as well."""
    return any(jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact) and leaf.ndim for leaf in jax.tree.leaves(arg))


def _chosen(fun: Callable[..., Any], options: dict[str, Any], *words: str) -> Callable[[Place], bool]:
    """Whether options such as ``static_argnums`` and ``static_argnames`` choose an argument."""
    names = positional_names(fun)
    chosen: set[Place] = set()
    for word in words:
        numbers: Any = () if options.get(word) is None else options[word]
        for number in (numbers,) if isinstance(numbers, int) else numbers:
            place = operator.index(number)
            place += len(names) if place < 0 else 0
            chosen |= {place, *names[place : place + 1]}
        by_name = options.get(word.replace("argnums", "argnames")) or ()
        for name in (by_name,) if isinstance(by_name, str) else by_name:
            chosen |= {name, *([names.index(name)] if name in names else [])}
    return lambda place: place in chosen
