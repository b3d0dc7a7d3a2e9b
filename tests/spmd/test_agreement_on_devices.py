"""Calls over named axes that differ between ranks, and that the ranks know already."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import pycollective as pc
from pycollective.ranks.setup import devices_of_this_rank
from tests.collective.programs import RUNTIME_ERRORS


@pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="LOUD: one rank has nobody to differ from")
def test_a_call_on_each_device_that_differs(world: pc.Communicator) -> None:
    local = len(devices_of_this_rank())

    @pc.pmap(axis_name="i")
    def total(x: jax.Array) -> jax.Array:
        return lax.psum(x, "i")

    x, longer = np.ones((local, 3), np.float32), np.ones((local, 5), np.float32)
    for operand in (x, longer):
        np.testing.assert_array_equal(total(operand), operand * local * world.size)
    with pytest.raises(RUNTIME_ERRORS, match="expected the same call on every rank"):
        jax.block_until_ready(total(x if world.rank == 0 else longer))
    np.testing.assert_array_equal(total(x), x * local * world.size)


def _train(names: list[str], params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        y = x
        for name in sorted(params):
            y = jax.nn.relu(y @ params[name]) + 1
        return y.sum()

    grads = jax.grad(loss)(params)
    return {name: lax.pmean(grads[name], "i") for name in names}  # one line, in the order of a set, for example


@pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="LOUD: one rank has nobody to differ from")
@pytest.mark.parametrize("scanned", [False, True])
def test_one_line_sums_gradients_in_another_order(scanned: bool, world: pc.Communicator) -> None:
    local = len(devices_of_this_rank())
    names = ["a", "b", "c"]
    params = {name: np.full((3, 3), 0.1 * i, np.float32) for i, name in enumerate(names)}
    x = np.ones((local, 3, 3), np.float32)

    def step(names: list[str]) -> Any:
        def whole(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
            if not scanned:
                return _train(names, params, x)
            return lax.scan(lambda carry, _: (carry, _train(names, params, carry)), x, length=2)[1]

        return pc.pmap(whole, "i", in_axes=(None, 0))

    jax.block_until_ready(step(names)(params, x))
    swapped = ["a", "c", "b"] if world.rank == 0 else names
    expected = (
        r"here with psum\(.*\) as collective \d+, got its operands in collective \d+ on rank \d.*A set of strings has"
    )
    with pytest.raises(pc.CollectiveMismatch, match=expected):
        step(swapped)(params, x)


@pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="LOUD: one rank has nobody to differ from")
def test_a_rank_may_sum_something_else(world: pc.Communicator) -> None:
    local = len(devices_of_this_rank())

    @pc.pmap(axis_name="i")
    def total(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = jnp.zeros_like(x) if world.rank == 0 else x
        return lax.psum(first, "i"), lax.psum(y, "i")

    x = np.ones((local, 3), np.float32)
    sums = total(x, 2 * x)
    np.testing.assert_array_equal(sums[0], x * local * (world.size - 1))
    np.testing.assert_array_equal(sums[1], 2 * x * local * world.size)
