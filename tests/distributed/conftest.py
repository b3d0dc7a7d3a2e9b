"""Settings for tests of global arrays: one JAX over all ranks, with one CPU device of each rank.

``PYCOLLECTIVE_TEST_COLLECTIVES=gloo`` runs them with JAX's own engine: what fails there too is a fault of the test.
"""

from __future__ import annotations

import jax
import pytest

import pycollective as pc
from tests.distributed.arrays import COLLECTIVES
from tests.under_mpirun import *  # noqa: F403
from tests.under_mpirun import SIZE

if SIZE not in (2, 4):
    raise pytest.UsageError(f"tests/distributed: expected 2 or 4 ranks, got {SIZE}")

# Both must come before a test module makes an array, which would start JAX's devices.
jax.config.update("jax_num_cpu_devices", 1)
pc.distributed.initialize(collectives=COLLECTIVES)


@pytest.fixture(scope="session")
def world() -> pc.Communicator:
    assert jax.device_count() == SIZE
    assert jax.process_count() == SIZE
    return pc.world()
