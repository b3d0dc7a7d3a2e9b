"""Settings for tests on ranks x local devices. A rank drives all its devices; a test says how many take part."""

from __future__ import annotations

import jax
import pytest

import pycollective as pc
from pycollective.ranks.setup import devices_of_this_rank
from tests.under_mpirun import *  # noqa: F403
from tests.under_mpirun import PLATFORM, SIZE

_LOCAL = {1: (1, 4), 2: (1, 4), 4: (2,)}
if SIZE not in _LOCAL:
    raise pytest.UsageError(f"tests/spmd: expected {sorted(_LOCAL)} ranks, whose products divide 8, got {SIZE}")

# This must come before a test module makes an array, which would start JAX's devices with a thread for each core.
# PYCOLLECTIVE_TEST_PLATFORM asks for a platform, GPUs, that may have fewer devices.
pc.init(devices=max(_LOCAL[SIZE]) if PLATFORM is None else None)

_MOST = 1 << (len(devices_of_this_rank()).bit_length() - 1)  # a power of two, as all numbers of devices here
LOCAL = tuple(dict.fromkeys(min(n, _MOST) for n in _LOCAL[SIZE]))
"""The numbers of local devices to test. The oracle needs ranks x local devices in one process, which has 8."""

FEW = (2,) if SIZE == 2 and max(LOCAL) >= 2 else LOCAL[-1:]
"""The same for tests that are slow to compile: 1x4, 2x2, 4x2 (ranks x local devices)."""


def needs_local(count: int) -> pytest.MarkDecorator:
    """Skips a test that needs so many devices of each rank where there are fewer: of GPUs there may be."""
    return pytest.mark.skipif(max(LOCAL) < count, reason=f"LOUD: needs {count} local devices")


@pytest.fixture(scope="session", autouse=True)
def world() -> pc.Communicator:
    assert len(jax.devices("cpu")) >= SIZE * max(LOCAL), "the oracle needs JAX_NUM_CPU_DEVICES=8"
    return pc.world()


@pytest.fixture(params=LOCAL)
def local(request: pytest.FixtureRequest) -> int:
    """The number of devices of each rank that take part."""
    count: int = request.param
    return count


@pytest.fixture(params=FEW)
def few(request: pytest.FixtureRequest) -> int:
    """The number of devices of each rank that take part in a test that is slow to compile."""
    count: int = request.param
    return count
