"""``PYCOLLECTIVE_LANES`` changes how a sum travels, but not its result."""

from __future__ import annotations

import pytest

from tests.e2e.launch import mpirun

LANES = """
import sys

import jax
import jax.numpy as jnp
import pycollective as pc

pc.init()
total = pc.pmap(lambda x: jax.lax.psum(x, "i"), "i")(jnp.ones((2, 1 << 20)))
sys.stdout.write(f"{total.min()} {total.max()}\\n")
"""


@pytest.mark.whole
def test_all_lanes() -> None:  # tests/spmd has the default, one
    done = mpirun(2, "-c", LANES, timeout=60, env={"JAX_NUM_CPU_DEVICES": "2", "PYCOLLECTIVE_LANES": "all"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["4.0 4.0"] * 2
