"""Settings for tests of other libraries over ranks x local devices. The oracle is one process with as many devices."""

from __future__ import annotations

import jax
import pytest

import pycollective as pc
from tests.libraries.programs import WAYS, Way
from tests.under_mpirun import *  # noqa: F403
from tests.under_mpirun import SIZE

LOCAL = (1, 2)

# This must come before a test module makes an array, which would start JAX's devices with a thread for each core.
pc.init(devices=max(LOCAL))

# The libraries promote dtypes and ranks implicitly, which is JAX's default.
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_numpy_rank_promotion", "allow")
jax.config.update("jax_legacy_prng_key", "allow")


@pytest.fixture(scope="session", autouse=True)
def world() -> pc.Communicator:
    assert jax.local_device_count() >= SIZE * max(LOCAL), "the oracle needs JAX_NUM_CPU_DEVICES=8"
    return pc.world()


@pytest.fixture(params=LOCAL)
def local(request: pytest.FixtureRequest) -> int:
    """The number of devices of each rank that take part."""
    count: int = request.param
    return count


@pytest.fixture(params=WAYS, ids=lambda way: way.id)
def way(request: pytest.FixtureRequest) -> Way:
    """A way to run a program."""
    chosen: Way = request.param
    return chosen
