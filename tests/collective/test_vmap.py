"""Batching of every operation over every axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pycollective as pc
from tests.cases import CASES, EACH_PRIMITIVE, Case, operands, values
from tests.collective.programs import compare

BATCH = 3
Array = Any


def identity(f: Any) -> Any:
    return f


def every_batch_axis(f: Any, xs: Array) -> Any:
    return [jax.vmap(f, in_axes=axis)(jnp.moveaxis(xs, 0, axis)) for axis in range(xs.ndim)]


def every_batch_axis_of_all(reference: Any, xs: Array) -> Any:
    # of shape (size, BATCH, ...); the result is the same for every axis
    return [jnp.stack([reference(xs[:, b]) for b in range(BATCH)], axis=1)] * (xs.ndim - 1)


def test_every_batch_axis(comm: pc.Communicator) -> None:
    inputs = lambda case: [operands(case, comm, extra=(BATCH,))]
    cases = CASES if comm is pc.world() else EACH_PRIMITIVE
    compare(comm, cases, inputs, every_batch_axis, every_batch_axis_of_all)


@pytest.mark.parametrize("compiler", [identity, jax.jit], ids=["eager", "jax.jit"])
def test_vmap_elsewhere(compiler: Any, world: pc.Communicator) -> None:
    def of_all(reference: Any, xs: Array) -> Any:
        return every_batch_axis_of_all(reference, xs)[0]

    inputs = lambda case: [operands(case, world, extra=(BATCH,))]
    compare(world, EACH_PRIMITIVE, inputs, lambda f, x: jax.vmap(f)(x), of_all, compiler=compiler)


def test_vmap_of_grad(world: pc.Communicator) -> None:
    def grads(f: Any, x: Array, w: Array) -> Any:
        return jax.vmap(jax.grad(lambda x, w: jnp.vdot(w, f(x**2))))(x, w)

    def grads_of_all(reference: Any, xs: Array, ws: Array) -> Any:
        one = jax.grad(lambda xs, ws: jnp.vdot(ws, reference(xs**2)))
        return jnp.stack([one(xs[:, b], ws[:, b]) for b in range(BATCH)], axis=1)

    def inputs(case: Case) -> list[Array]:
        shape = jax.eval_shape(case.reference, operands(case, world)).shape
        return [operands(case, world, extra=(BATCH,)), values((shape[0], BATCH, *shape[1:]), seed=1)]

    compare(world, EACH_PRIMITIVE, inputs, grads, grads_of_all, rtol=1e-5, atol=1e-5)


def test_grad_of_vmap(world: pc.Communicator) -> None:
    def grads(f: Any, x: Array) -> Any:
        return jax.grad(lambda x: jnp.sum(jax.vmap(f, in_axes=-1)(jnp.moveaxis(x, 0, -1)) ** 2))(x)

    def grads_of_all(reference: Any, xs: Array) -> Any:
        one = jax.grad(lambda xs: jnp.sum(reference(xs) ** 2))
        return jnp.stack([one(xs[:, b]) for b in range(BATCH)], axis=1)

    inputs = lambda case: [operands(case, world, extra=(BATCH,))]
    compare(world, EACH_PRIMITIVE, inputs, grads, grads_of_all, rtol=1e-5, atol=1e-5)


def test_nested(world: pc.Communicator) -> None:
    def nested_of_all(reference: Any, xs: Array) -> Any:
        rows = [jnp.stack([reference(xs[:, a, b]) for b in range(BATCH)], axis=1) for a in range(2)]
        return jnp.stack(rows, axis=1)

    inputs = lambda case: [operands(case, world, extra=(2, BATCH))]
    compare(world, EACH_PRIMITIVE, inputs, lambda f, x: jax.vmap(jax.vmap(f))(x), nested_of_all)


def test_send_and_recv_carry_the_batch(world: pc.Communicator) -> None:
    xs = values((world.size, BATCH, 2))
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    if world.size == 1:
        pytest.skip("LOUD: one rank cannot send to itself without a receiver under way")

    def exchange(x: jax.Array) -> jax.Array:
        if world.rank % 2 == 0:
            pc.send(x, world, dest=right)
            return pc.recv(x, world, source=left)
        y = pc.recv(x, world, source=left)
        pc.send(x, world, dest=right)
        return y

    got = jax.vmap(exchange, in_axes=1, out_axes=1)(jnp.moveaxis(xs[world.rank], 0, 1))
    np.testing.assert_array_equal(jnp.moveaxis(got, 1, 0), xs[left])


@pytest.mark.parametrize("axes", [(0, 1), (None, 1), (1, None), (1, 0)])
def test_linear_call(axes: tuple[int | None, int | None], world: pc.Communicator) -> None:
    # JAX has no rule for it. The transpose has a factor of 3, which shows that it is used.
    def fun(a: Array, x: Array) -> Array:
        forward = lambda a, x: a * pc.psum(x, world)
        backward = lambda a, ct: 3 * pc.psum(a * ct, world)
        return jax.custom_derivatives.linear_call(forward, backward, a, x)

    def operand(axis: int | None, seed: int) -> tuple[Array, Array]:
        """An array with a batch axis or without, and its batch."""
        x = jnp.asarray(values((BATCH, 2) if axis is not None else (2,), seed=seed))
        return (jnp.moveaxis(x, 0, axis), x) if axis is not None else (x, jnp.broadcast_to(x, (BATCH, 2)))

    (a, each_a), (x, each_x) = operand(axes[0], 1), operand(axes[1], 2)
    batched = jax.vmap(fun, in_axes=axes)
    np.testing.assert_allclose(pc.jit(batched)(a, x), world.size * each_a * each_x, rtol=1e-5)
    y, tangent = jax.jvp(lambda x: batched(a, x), (x,), (2 * x,))
    np.testing.assert_allclose(tangent, 2 * y, rtol=1e-5)
    grad = pc.jit(jax.grad(lambda x: jnp.sum(batched(a, x))))(x)
    each = 3 * world.size * each_a
    np.testing.assert_allclose(grad, each.sum(0) if axes[1] is None else jnp.moveaxis(each, 0, axes[1]), rtol=1e-5)
    twice = jax.linear_transpose(lambda ct: jax.linear_transpose(lambda x: batched(a, x), x)(ct)[0], y)(x)[0]
    np.testing.assert_allclose(twice, y, rtol=1e-5)


def test_names_of_other_axes_are_left_to_jax(world: pc.Communicator) -> None:
    x = jnp.arange(4.0)
    got = jax.vmap(lambda v: pc.psum(pc.psum(v, "batch"), world), axis_name="batch")(x)
    np.testing.assert_array_equal(got, np.full(4, 6.0 * world.size))
    index = jax.vmap(lambda v: pc.axis_index("batch") * pc.axis_size("batch"), axis_name="batch")(x)
    assert index.tolist() == [0, 4, 8, 12]
