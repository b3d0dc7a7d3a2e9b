"""Real libraries over ranks x local devices, against one process with as many devices."""

from __future__ import annotations

import jax
import pytest

import pycollective as pc
from tests.libraries.programs import WAYS, Way
from tests.under_mpirun import *  # noqa: F403
from tests.under_mpirun import SIZE

LOCAL = (1, 2)

# Before a test module makes an array: with that JAX would start its devices, and a thread for each core on every rank.
pc.init(devices=max(LOCAL))

# What the libraries do, and JAX lets them where nobody asks for more.
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_numpy_rank_promotion", "allow")
jax.config.update("jax_legacy_prng_key", "allow")


@pytest.fixture(scope="session", autouse=True)
def world() -> pc.Communicator:
    assert jax.local_device_count() >= SIZE * max(LOCAL), "the oracle needs JAX_NUM_CPU_DEVICES=8"
    return pc.world()


@pytest.fixture(params=LOCAL)
def local(request: pytest.FixtureRequest) -> int:
    """How many devices of each rank take part."""
    count: int = request.param
    return count


@pytest.fixture(params=WAYS, ids=lambda way: way.id)
def way(request: pytest.FixtureRequest) -> Way:
    """How a program is run."""
    chosen: Way = request.param
    return chosen
