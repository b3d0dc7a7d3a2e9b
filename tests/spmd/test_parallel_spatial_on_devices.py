"""Halos and convolutions over ranks and devices, against the same programs over JAX's axes and the whole array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from pycollective.parallel.spatial import conv, halo_exchange, reduce_window
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.spmd.cases import compare, own

Array = Any
Tree = Any
P = jax.P

KERNEL = np.asarray(values((2, 2, 3, 2), seed=1))


def network(x: Array, kernel: Array) -> Array:
    """A convolution whose window reaches into several blocks, with a maximum over the rows after it."""
    y = jnp.tanh(conv(x, kernel, {2: "i"}, (1, 1), "SAME", rhs_dilation=(3, 1)))
    return reduce_window(y, -jnp.inf, lax.max, {2: "i"}, (1, 1, 3, 1), (1, 1, 2, 1), "SAME")


def network_of_the_whole(x: Array, kernel: Array) -> Array:
    y = jnp.tanh(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", rhs_dilation=(3, 1)))
    return lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 3, 1), (1, 1, 2, 1), "SAME")


def program(x: Array, kernel: Array) -> Tree:
    """Returns halos, an output, and the gradients of a loss that weighs the devices differently."""
    weight = 1 + lax.axis_index("i").astype(x.dtype)
    gradients = jax.grad(lambda x, kernel: jnp.sum(weight * network(x, kernel) ** 2), (0, 1))(x, kernel)
    halos = [halo_exchange(x, "i", (3, 1), 2, periodic=True), halo_exchange(x, "i", (0, 2), 2, fill=7)]
    return halos, network(x, kernel), gradients


@pytest.mark.parametrize("types", [False, True])
def test_as_over_an_axis_of_jax(world: pc.Communicator, few: int, types: bool) -> None:
    devices = world.size * few
    xs = np.asarray(values((devices, 1, 2, 2, 3), seed=2))
    if not types:
        compare(world, few, program, xs, KERNEL, in_axes=(0, None))
        return
    mesh = pc.make_mesh((devices,), ("i",), devices=devices_of_this_rank()[:few])

    def loss(x: Array, kernel: Array) -> Array:
        return lax.psum(jnp.sum(network(x, kernel) ** 2), "i")

    run = pc.shard_map(
        jax.grad(loss, (0, 1)), mesh=mesh, in_specs=(P(None, None, "i"), P()), out_specs=(P(None, None, "i"), P())
    )
    whole = np.concatenate(list(xs), 2)
    dx, dkernel = run(np.concatenate(list(own(world, few, xs)), 2), KERNEL)
    want_dx, want_dkernel = jax.jit(jax.grad(lambda x, k: jnp.sum(network_of_the_whole(x, k) ** 2), (0, 1)))(
        whole, KERNEL
    )
    mine = want_dx[:, :, 2 * few * world.rank : 2 * few * (world.rank + 1)]
    np.testing.assert_allclose(dx, mine, 1e-4, 1e-5)
    np.testing.assert_allclose(dkernel, want_dkernel, 1e-4, 1e-5)


def test_along_both_axes_of_a_mesh(world: pc.Communicator, few: int) -> None:
    """The rows are cut among ranks, and the columns among the devices of a rank."""
    mesh = pc.make_mesh((world.size, few), ("y", "x"), devices=devices_of_this_rank()[:few])
    x, kernel = np.asarray(values((1, 2, 3 * world.size, 2 * few), seed=3)), np.asarray(values((1, 2, 3, 3), seed=4))
    spec = P(None, None, "y", "x")
    run = pc.shard_map(
        lambda x, k: conv(x, k, {2: "y", 3: "x"}, (1, 1), "SAME"), mesh=mesh, in_specs=(spec, P()), out_specs=spec
    )
    rows = slice(3 * world.rank, 3 * (world.rank + 1))
    want = lax.conv_general_dilated(x, kernel, (1, 1), "SAME")[:, :, rows]
    np.testing.assert_allclose(run(x[:, :, rows], kernel), want, 1e-5, 1e-5)


def test_in_jit(world: pc.Communicator) -> None:
    x = np.arange(2 * world.size, dtype=np.int32)
    got = pc.jit(lambda x: halo_exchange(x, "i", (1, 3), 0, fill=-1), axis_name="i")(x[2 * world.rank :][:2])
    np.testing.assert_array_equal(got, np.pad(x, (1, 3), constant_values=-1)[2 * world.rank :][:6])
