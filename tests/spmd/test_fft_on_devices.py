"""Transforms over ranks x devices, against the same programs over JAX's axes and jax.numpy.fft of whole arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.spmd.cases import compare, stacked

Array = Any
P = jax.P


def program(x: Array) -> dict[str, Array]:
    """Returns transforms of blocks (2, 5) of an array of 2 N - 1 rows, and of the array as one dimension."""
    n = 2 * lax.axis_size("i") - 1
    y = pc.fft.rfftn(x, "i", (n, 5), out_spec=P(None, "i"))
    row = x.ravel()
    prime, square = 10 * lax.axis_size("i") - 3, lax.axis_size("i") ** 2
    return {
        "spectrum": jnp.abs(y),
        "back": pc.fft.irfftn(y * pc.fft.rfftfreq(5, "i").astype(y.dtype)[None], P(None, "i"), (n, 5), out_spec=P("i")),
        "pieces": jnp.abs(pc.fft.fftn(x, "i", (n, 5), pieces=2)),
        "Bluestein": jnp.abs(pc.fft.fft(row, "i", prime)),
        "four steps": jnp.abs(pc.fft.ifft(jnp.tile(row[: lax.axis_size("i")], 2), "i", 2 * square)),
        "frequencies": pc.fft.fftfreq(n, "i"),
        "cut": pc.fft.join(pc.fft.cut(jnp.arange(float(n)), "i"), "i", (n,)),
    }


def test_as_over_an_axis_of_jax(world: pc.Communicator, few: int) -> None:
    def with_gradient(x: Array) -> Any:
        weight = 1 + lax.axis_index("i").astype(x.dtype)
        loss = lambda x: weight * sum(jnp.sum(y**3) for y in program(x).values())
        return program(x), jax.grad(loss)(x)

    compare(world, few, with_gradient, stacked(world, few, seed=1, shape=(2, 5)), tolerance=1e-4)


@pytest.mark.parametrize("types", [False, True])
def test_pencils(world: pc.Communicator, few: int, types: bool) -> None:
    """An array of odd lengths is cut along two axes of a mesh. A loop carries it to its spectrum and back."""
    mesh = pc.make_mesh((world.size, few), ("y", "x"), devices=devices_of_this_rank()[:few])
    shape, spec, moved = (2 * world.size - 1, 2 * few + 1, 3), P("y", "x"), P(None, "y", "x")
    whole = np.asarray(values(shape, seed=2))
    filters = np.exp(-np.abs(np.fft.fftfreq(shape[0])))[:, None, None].astype(np.complex64)

    def filtered(x: Array) -> Array:
        def once(_: Any, x: Array) -> Array:
            y = pc.fft.fftn(x, spec, shape, out_spec=moved) * filters
            return pc.fft.ifftn(y, moved, shape, out_spec=spec).real

        return lax.fori_loop(0, 2, once, x)

    def loss(x: Array) -> Array:
        return lax.psum(jnp.sum(filtered(x) ** 3), ("y", "x"))

    # The transpose of psum is psum where JAX has no types: each device then counts the loss once.
    count = 1 if types else world.size * few
    both = pc.shard_map(
        lambda x: (pc.fft.join(filtered(x), spec, shape), jax.grad(loss)(x) / count),
        mesh=mesh,
        in_specs=spec,
        out_specs=(P(), spec),
        check_vma=types,
    )
    pads = [(0, -n % m) for n, m in zip(shape, (world.size, few, 1), strict=True)]
    rows = slice(2 * world.rank, 2 * (world.rank + 1))
    out, gradient = both(np.pad(whole, pads)[rows])

    def of_whole(x: Array) -> Array:
        for _ in range(2):
            x = jnp.fft.ifftn(jnp.fft.fftn(x) * filters).real
        return x

    np.testing.assert_allclose(out, of_whole(whole), 1e-4, 1e-4)
    want = np.pad(jax.grad(lambda x: jnp.sum(of_whole(x) ** 3))(whole), pads)
    np.testing.assert_allclose(gradient, want[rows], 1e-3, 1e-3)
