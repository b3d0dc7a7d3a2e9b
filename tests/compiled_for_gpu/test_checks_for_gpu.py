"""The checks of this folder find the defects that they are for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.mlir.dialects import stablehlo

import pycollective as pc
from pycollective.jax_support import jax_internals
from tests.compiled_for_gpu import checks
from tests.compiled_for_gpu.compiler import Compiled, compiled, on_one_gpu

Array = Any

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def two_calls(x: Array) -> Any:
    a = jnp.tanh(x @ x)
    return lax.psum(a, "i"), lax.all_gather(jnp.tanh(a @ x) @ x, "i")


def in_scan(x: Array) -> Any:
    return lax.scan(lambda c, _: (lax.pmax(jnp.tanh(c @ c), "i"), None), x, None, length=3)[0]


def jitted(fun: Callable[..., Any]) -> Compiled:
    return compiled(pc.jit(fun, axis_name="i", **on_one_gpu()), X)


@pytest.fixture(scope="module")
def right() -> Compiled:
    """A program that passes all checks. In its text a product, the start, a product, and the end follow each other."""
    program = jitted(two_calls)
    checks.check(program, "allreduce_start allreduce_done allgather")
    return program


@pytest.mark.parametrize("fun", [two_calls, in_scan])
def test_a_call_with_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch, fun: Callable[..., Any]) -> None:
    lower = jax_internals.lower_call

    def with_new_token(ctx: Any, effect: Any, rule: Any, *rest: Any) -> Any:
        def with_token(ctx: Any, _: Any, *operands: Any, **attributes: Any) -> Any:
            return rule(ctx, stablehlo.create_token(), *operands, **attributes)

        return lower(ctx, effect, with_token, *rest)

    monkeypatch.setattr(jax_internals, "lower_call", with_new_token)
    with pytest.raises(AssertionError, match="takes"):
        checks.check_tokens(jitted(fun).program)


def edited(program: Compiled, old: str, new: str) -> Compiled:
    """The program with one line of its text written otherwise."""
    text, count = re.subn(old, new, program.text, flags=re.MULTILINE)
    assert count == 1
    return dataclasses.replace(program, text=text)


def test_an_array_that_is_moved_before_the_end_of_its_sum(right: Compiled) -> None:
    done = r"^(.*custom-call\()(%[\w.]+)(\), custom_call_target=.pycollective_device_allreduce_done.*)$"
    moved = edited(right, done, r"  %moved = f32[64,64]{1,0} copy(\2)\n\1%moved\3")
    with pytest.raises(AssertionError, match="moved reads the array of"):
        checks.check_halves(moved.program)


def test_a_start_in_other_buffers(right: Compiled) -> None:
    start = r"(custom_call_target=.pycollective_device_allreduce_start.*), output_to_operand_aliasing=\{.*?\)\}"
    with pytest.raises(AssertionError, match="buffers of their own"):
        checks.check_halves(edited(right, start, r"\1").program)


def test_a_call_in_a_command_buffer(right: Compiled) -> None:
    """The kernels of the program do stand in some."""
    assert any(thunk.is_recorded for thunk in right.thunks)
    recorded = [dataclasses.replace(thunk, is_recorded=True) for thunk in right.thunks]
    with pytest.raises(AssertionError, match="is_recorded=True"):
        checks.check_recorded(dataclasses.replace(right, thunks=recorded))


def test_a_kernel_that_lets_a_call_begin_early(right: Compiled) -> None:
    """What stands before the start is marked as XLA of JAX 0.11 marks kernels before kernels."""
    (before,) = re.findall(r" custom-call\(%[\w.]+, (%[\w.]+)\), .*allreduce_start", right.text)
    line = rf"^(  {re.escape(before)} = .*?\)),"
    marked = edited(right, line, r'\1, frontend_attributes={xla.pdl_launch="true"},')
    with pytest.raises(AssertionError, match="lets it begin early"):
        checks.check_early_kernels(marked)


def test_kernels_may_begin_early(right: Compiled) -> None:
    """So the check is for something: the product behind the end of the sum stands before another kernel."""
    if jax.__version_info__ >= (0, 11):
        assert 'xla.pdl_launch="true"' in right.text
        return
    assert right.code.count(".entry") == right.code.count("griddepcontrol.wait;") > 0
    code = right.code.replace("ret;", "griddepcontrol.launch_dependents;\n\tret;")
    with pytest.raises(AssertionError):
        checks.check_early_kernels(dataclasses.replace(right, code=code))
