"""``PYCOLLECTIVE_LANES`` changes how a sum travels, but not its result."""

from __future__ import annotations

import pytest

from tests.e2e.launch import mpirun

# The second run has a rank that calls MPI on one lane, and a rank that calls it on all: each waits for the other.
LANES = """
import os
import sys

from mpi4py import MPI

os.environ["PYCOLLECTIVE_LANES"] = sys.argv[1 + MPI.COMM_WORLD.rank]

import jax
import jax.numpy as jnp
import pycollective as pc

pc.init(timeout=None if sys.argv[1] == sys.argv[2] else 1)
total = pc.pmap(lambda x: jax.lax.psum(x, "i"), "i")(jnp.ones((2, 1 << 20)))
sys.stdout.write(f"{total.min()} {total.max()}\\n")
"""


@pytest.mark.whole
@pytest.mark.parametrize("lanes", [("all", "all"), ("one", "all")])  # tests/spmd has the default, one
def test_lanes(lanes: tuple[str, str]) -> None:
    done = mpirun(2, "-c", LANES, *lanes, timeout=60, env={"JAX_NUM_CPU_DEVICES": "2"})
    if len(set(lanes)) == 1:
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["4.0 4.0"] * 2
    else:
        assert done.returncode not in (0, 124, 137)
        assert "pycollective.allreduce: expected an answer from the other ranks within 1 s, got none" in done.stderr
