"""Transforms of arrays that are cut over the ranks of communicators, against jax.numpy.fft of whole arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pycollective as pc
from tests.cases import values

Array = Any
P = jax.P


def own(x: Array, spec: Any) -> np.ndarray:
    """Returns this rank's block of an array."""
    x = np.asarray(x)
    for axis, comm in enumerate(spec):
        if comm is not None:
            length = -(-x.shape[axis] // comm.size)
            x = np.moveaxis(x, axis, 0)
            x = np.pad(x, [(0, comm.size * length - len(x)), *[(0, 0)] * (x.ndim - 1)])
            x = np.moveaxis(x[comm.rank * length : (comm.rank + 1) * length], 0, axis)
    return x


def close(got: Array, whole: Array, spec: Any) -> None:
    whole = np.asarray(whole)
    assert got.dtype == whole.dtype
    np.testing.assert_allclose(got, own(whole, spec), 1e-4, 1e-5 * np.abs(whole).max())


def rows_and_columns(world: pc.Communicator) -> tuple[pc.Communicator, pc.Communicator]:
    """Returns the communicators of a grid of ranks with at most two columns: along its first axis, along its second."""
    columns = 2 if world.size % 2 == 0 else 1
    first = world.split(color=world.rank % columns, key=world.rank)
    second = world.split(color=world.rank // columns, key=world.rank)
    assert first is not None
    assert second is not None
    return first, second


@pytest.mark.parametrize(
    ("wrap", "lengths"),
    [(lambda f: f, ()), (jax.jit, (139,)), (pc.jit, (140, 139, 7))],
    ids=["eager", "jax.jit", "pc.jit"],
)
def test_over_the_world(world: pc.Communicator, wrap: Callable[..., Any], lengths: tuple[int, ...]) -> None:
    x, cut = np.asarray(values((5, 4, 7), seed=1)), P(world)
    close(wrap(lambda x: pc.fft.fftn(x, s=(5, 4, 7)))(own(x, cut)), jnp.fft.fftn(x), cut)
    row = x.ravel()
    for n in lengths:
        length = -(-n // world.size)
        mine = np.zeros(length, np.float32)
        part = row[:n][world.rank * length : (world.rank + 1) * length]
        mine[: len(part)] = part
        close(wrap(lambda x, n=n: pc.fft.fft(x, n=n, norm="ortho"))(mine), jnp.fft.fft(row[:n], norm="ortho"), cut)


def test_pencils_of_communicators(world: pc.Communicator) -> None:
    first, second = rows_and_columns(world)
    spec, moved, shape = P(first, second), P(None, first, second), (5, 7, 6)
    x = np.asarray(values(shape, seed=2))
    there = pc.jit(lambda x: pc.fft.rfftn(x, spec, shape, out_spec=moved))
    back = pc.jit(lambda y: pc.fft.irfftn(y, moved, shape, out_spec=spec, pieces=2))
    y = there(own(x, spec))
    close(y, jnp.fft.rfftn(x), moved)
    close(back(y), x, spec)
    close(pc.fft.join(y, moved, (5, 7, 4)), jnp.fft.rfftn(x), P())


def test_derivatives_and_vmap(world: pc.Communicator) -> None:
    x = np.asarray(values((3, 4, 5), seed=3))
    weight = np.asarray(values((4, 3), seed=4))

    def one(transform: Callable[[Array], Array], weight: Array, x: Array) -> Array:
        return jnp.sum(weight * jnp.abs(transform(x)) ** 3)

    own_weight = own(weight, P(None, world))
    ours = lambda x: one(lambda x: pc.fft.rfftn(x, s=(4, 5), out_spec=P(None, world)), own_weight, x)
    of_whole = lambda x: one(jnp.fft.rfftn, weight, x)
    batch = P(None, world)
    close(pc.jit(jax.vmap(jax.grad(ours)))(own(x, batch)), jax.vmap(jax.grad(of_whole))(x), batch)
    tangent = lambda f, x: jax.jvp(jax.vmap(jax.grad(f)), (x,), (x,))[1]
    close(pc.jit(lambda x: tangent(ours, x))(own(x, batch)), tangent(of_whole, x), batch)


def test_frequencies_over_the_world(world: pc.Communicator) -> None:
    np.testing.assert_array_equal(pc.fft.fftfreq(7), own(jnp.fft.fftfreq(7), P(world)))
    np.testing.assert_array_equal(pc.fft.rfftfreq(7, d=0.5), own(jnp.fft.rfftfreq(7, 0.5), P(world)))


def test_the_groups_of_a_result(world: pc.Communicator) -> None:
    other = world.split(color=0, key=world.rank)
    with pytest.raises(ValueError, match="an out_spec with the devices of spec"):
        pc.fft.fftn(jnp.ones((1, 4)), P(world), out_spec=P(None, other))
    with pytest.raises(ValueError, match="a spec with each axis or communicator once"):
        pc.fft.fftn(jnp.ones((1, 4)), P(world, world))
