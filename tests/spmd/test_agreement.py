"""Calls over named axes that differ between ranks, and that the ranks know already."""

from __future__ import annotations

import jax
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
