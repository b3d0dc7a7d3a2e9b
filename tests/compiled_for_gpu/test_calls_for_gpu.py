"""Collectives in programs that XLA has compiled for GPUs: their order, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pycollective as pc
from tests.compiled_for_gpu.checks import check, letters
from tests.compiled_for_gpu.compiler import Compiled, compiled, on_one_gpu

Array = Any
Over = Callable[[Array], Array]
"""A sum over the axis, or nothing in its place."""

N = 64
X = jax.ShapeDtypeStruct((N, N), jnp.float32)
NBYTES = 4 * N * N


def jitted(fun: Callable[..., Any], *args: Any, donate: Any = ()) -> Compiled:
    return compiled(pc.jit(fun, axis_name="i", donate_argnums=donate, **on_one_gpu()), *args)


def test_calls_in_the_order_of_the_program() -> None:
    """The operand of the first call is ready last: the data alone would allow another order."""

    def f(x: Array, y: Array) -> Any:
        a = x
        for _ in range(4):
            a = jnp.tanh(a @ a)
        return (
            lax.pmax(a, "i"),
            lax.all_gather(y, "i"),
            lax.ppermute(jnp.sin(a @ y), "i", [(0, 1), (1, 0)]),
            lax.all_to_all(y + 1, "i", 0, 0, tiled=True),
            lax.psum_scatter(y * 2, "i", tiled=True),
        )

    check(jitted(f, X, X), "allreduce allgather ppermute alltoall reduce_scatter")


def test_a_call_whose_result_nobody_reads() -> None:
    def f(x: Array) -> Array:
        lax.psum(x, "i")
        lax.ppermute(x, "i", [(0, 1), (1, 0)])
        return x * 2

    check(jitted(f, X), "allreduce ppermute")


def in_scan(over: Over) -> Callable[..., Any]:
    return lambda x, w: lax.scan(lambda c, _: (over(jnp.tanh(c @ w)), None), x, None, length=3)[0]


def in_while_loop(over: Over) -> Callable[..., Any]:
    return lambda x, w: lax.while_loop(lambda c: over(c.sum()) < 1, lambda c: over(jnp.tanh(c @ w)), x)


def in_cond(over: Over) -> Callable[..., Any]:
    def f(x: Array, w: Array) -> Array:
        y = lax.cond(x[0, 0] > 0, lambda: over(x @ w), lambda: lax.ppermute(w, "i", [(0, 1)]))
        return lax.all_gather(y @ w, "i").sum(axis=0)

    return f


@pytest.mark.parametrize(
    ("form", "calls"),
    [
        (in_scan, "(allreduce)"),
        (
            in_while_loop,
            "allreduce (allreduce allreduce)",
        ),  # JAX computes the condition before the loop and in its body
        (in_cond, "[allreduce | ppermute] allgather"),
    ],
)
def test_loops_and_branches_copy_no_matrix_for_a_sum(form: Callable[[Over], Any], calls: str) -> None:
    """XLA copies what is carried from trip to trip, as it does without a collective. It copies nothing besides."""
    with_sum = jitted(form(lambda x: lax.psum(x, "i")), X, X, donate=0)
    check(with_sum, calls)
    without = letters(jitted(form(lambda x: x), X, X, donate=0).program, N * N)
    assert without.count("m")
    assert letters(with_sum.program, N * N).replace("A", "") == without
    assert with_sum.donated == NBYTES


@pytest.mark.parametrize("number", [1, 3])
def test_a_sum_overwrites_what_is_donated(number: int) -> None:
    """Without a copy, and in the donated buffers; arguments that are not donated are not copied either."""
    xs = [X] * number

    def total(*xs: Array) -> Any:
        return lax.psum(xs, "i")

    kept, donated = jitted(total, *xs), jitted(total, *xs, donate=range(number))
    for program in (kept, donated):
        check(program, "allreduce")
        assert letters(program.program, N * N) == "A"
    assert kept.donated == 0
    assert donated.donated == number * NBYTES


def test_a_sum_of_a_slice_and_an_update_by_it() -> None:
    """XLA of JAX 0.11 would fuse the call with both, and end the process (``lowering.apart``)."""

    def f(x: Array, k: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(x, k, 8)
        return lax.dynamic_update_slice_in_dim(x, lax.psum(rows, "i"), 0, 0)

    check(jitted(f, X, jax.ShapeDtypeStruct((), jnp.int32), donate=0), "allreduce")


def test_float64() -> None:
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((N, N), jnp.float64)
        program = jitted(lambda x: jnp.tanh(lax.psum(jnp.exp(x @ x), "i")), x, donate=0)
    check(program, "allreduce")
    assert letters(program.program, N * N) == "mA"
    assert program.donated == 2 * NBYTES


@pytest.mark.parametrize(("width", "steps"), [(512, "mRAG"), (64, "mLA")])
def test_several_gpus_of_each_rank(width: int, steps: str) -> None:
    """Large arrays in slices: NCCL's reduce-scatter, a sum on each lane, NCCL's all-gather. Small ones whole."""
    x = jax.ShapeDtypeStruct((2, width, width), jnp.float32)
    program = compiled(pc.pmap(lambda x: lax.psum(x @ x, "i"), "i"), x)
    check(program, "allreduce")
    assert letters(program.program, width * width // 2) == steps
