"""Derivatives of every operation, forward and reverse, of first and second order, against those of its reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pycollective as pc
from tests.cases import CASES, EACH_PRIMITIVE, Case, by_id, operands, values
from tests.collective.programs import compare

Array = Any


def weights(case: Case, comm: pc.Communicator, seed: int) -> Array:
    """Stacked cotangents of the results, which differ between ranks; those of a summed loss would not."""
    xs = operands(case, comm)
    return values(jax.eval_shape(case.reference, xs).shape, seed=seed)


def identity(f: Any) -> Any:
    return f


def jvp(f: Any, x: Array, t: Array) -> Any:
    return jax.jvp(f, (x,), (t,))


def grad(f: Any, x: Array, w: Array) -> Any:
    return jax.grad(lambda x: jnp.vdot(w, f(jnp.sin(x))))(x)


def transpose(f: Any, x: Array, w: Array) -> Any:
    return jax.linear_transpose(f, x)(w)


def loss(f: Any, x: Array, w: Array) -> Any:
    return jnp.vdot(w, f(jnp.sin(x)) ** 2)


def reverse_over_reverse(f: Any, x: Array, v: Array, w: Array) -> Any:
    return jax.grad(lambda x: jnp.vdot(v, jax.grad(partial(loss, f))(x, w)))(x)


def forward_over_reverse(f: Any, x: Array, v: Array, w: Array) -> Any:
    return jax.jvp(lambda x: jax.grad(partial(loss, f))(x, w), (x,), (v,))


def through_linearize(f: Any, x: Array, t: Array) -> Any:
    y, f_jvp = jax.linearize(lambda x: f(jnp.sin(x)), x)
    return y, f_jvp(t)


def tangents(case: Case, comm: pc.Communicator) -> list[Array]:
    return [operands(case, comm), operands(case, comm, seed=1)]


def cotangents(case: Case, comm: pc.Communicator) -> list[Array]:
    return [operands(case, comm), weights(case, comm, 2)]


FIRST_ORDER = {
    "jvp": (jvp, tangents),
    "linearize": (through_linearize, tangents),
    "grad": (grad, cotangents),
    "transpose": (transpose, cotangents),
}


def those_of(transform: str, cases: tuple[Case, ...]) -> list[Case]:
    return [case for case in cases if case.linear or transform != "transpose"]


@pytest.mark.parametrize("transform", ["jvp", "grad", "transpose"])
def test_first_order(transform: str, comm: pc.Communicator) -> None:
    f, inputs = FIRST_ORDER[transform]
    cases = those_of(transform, CASES if comm is pc.world() else EACH_PRIMITIVE)
    compare(comm, cases, lambda case: inputs(case, comm), f, f, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("transform", "compiler"),
    [("jvp", identity), ("grad", identity), ("grad", jax.jit), ("transpose", jax.jit), ("linearize", pc.jit)],
    ids=["jvp-eager", "grad-eager", "grad-jax.jit", "transpose-jax.jit", "linearize-pc.jit"],
)
def test_first_order_elsewhere(transform: str, compiler: Any, world: pc.Communicator) -> None:
    f, inputs = FIRST_ORDER[transform]
    cases = those_of(transform, EACH_PRIMITIVE)
    compare(world, cases, lambda case: inputs(case, world), f, f, compiler=compiler, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("second_order", [reverse_over_reverse, forward_over_reverse])
def test_second_order(second_order: Any, world: pc.Communicator) -> None:
    def inputs(case: Case) -> list[Array]:
        return [operands(case, world), operands(case, world, seed=5), weights(case, world, 4)]

    compare(world, EACH_PRIMITIVE, inputs, second_order, second_order, rtol=1e-3, atol=1e-3)


def test_grad_of_a_compiled_function(world: pc.Communicator) -> None:
    def f(call: Any, x: Array, w: Array) -> Any:
        return grad(pc.jit(call), x, w)

    inputs = lambda case: cotangents(case, world)
    compare(world, EACH_PRIMITIVE, inputs, f, grad, compiler=identity, rtol=1e-4, atol=1e-5)


def test_a_tie_of_extremes_is_shared(world: pc.Communicator) -> None:
    got = jax.grad(lambda x: pc.pmax(x, world))(1.0)
    # The sum of all ranks' cotangents, divided by the number of ranks that hold the maximum.
    np.testing.assert_allclose(got, 1.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cotangents_of_small_floats_are_rounded_once(dtype: str, world: pc.Communicator) -> None:
    x = jnp.ones(3, dtype)
    c = jnp.asarray(256.0 if world.rank == 0 else 1.0, dtype)
    got = jax.grad(lambda x: (pc.all_gather(x, world) * c).sum())(x)
    np.testing.assert_array_equal(got.astype(jnp.float32), np.full(3, 256.0 + world.size - 1).astype(jnp.dtype(dtype)))


def test_complex(world: pc.Communicator) -> None:
    xs = values((world.size, 3), np.complex64)
    want = jax.grad(lambda xs: jnp.real(jnp.sum(by_id["psum"].reference(xs) ** 2)))(xs)
    got = jax.grad(lambda x: jnp.real(jnp.sum(pc.psum(x, world) ** 2)))(xs[world.rank])
    np.testing.assert_allclose(got, want[world.rank], rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, comm: pc.reduce(x, comm, op="prod"), "reduce with op='prod'"),
        (lambda x, comm: pc.allreduce(x, comm, op="prod"), "allreduce with op='prod'"),
        (lambda x, comm: pc.scan(x, comm, op="max"), "scan with op='max'"),
        (lambda x, comm: pc.exscan(x, comm, op="prod"), "exscan with op='prod'"),
        (lambda x, comm: (pc.send(x, comm, dest=0), x)[1], "send"),
        (lambda x, comm: pc.recv(x, comm, source=0), "recv"),
    ],
)
def test_no_derivative(call: Any, name: str, world: pc.Communicator) -> None:
    comm = pc.Communicator(world.mpi)
    with pytest.raises(NotImplementedError, match=f"expected a differentiable operation.*got {name}"):
        jax.eval_shape(jax.grad(lambda x: call(x, comm).sum()), jax.ShapeDtypeStruct((3,), jnp.float32))


def test_integers_have_no_tangent(world: pc.Communicator) -> None:
    got = jax.grad(lambda x: x * pc.psum(world.rank + 1, world).astype(jnp.float32))(2.0)
    assert got == sum(range(1, world.size + 1))
