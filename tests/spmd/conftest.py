"""Ranks x local devices: every rank drives all its devices, and each test says how many take part."""

from __future__ import annotations

import jax
import pytest

import pycollective as pc
from tests.under_mpirun import *  # noqa: F403
from tests.under_mpirun import PLATFORM, SIZE

_LOCAL = {1: (1, 4), 2: (1, 2, 4), 4: (2,)}
if SIZE not in _LOCAL:
    raise pytest.UsageError(f"tests/spmd: expected {sorted(_LOCAL)} ranks, whose products divide 8, got {SIZE}")

# Before a test module makes an array: with that JAX would start its devices, and a thread for each core on every rank.
# Of a platform that somebody asks for, GPUs, there may be fewer.
pc.init(devices=max(_LOCAL[SIZE]) if PLATFORM is None else None)

LOCAL = tuple(n for n in _LOCAL[SIZE] if n <= len(pc.communicator.devices_of_this_rank())) or (1,)
"""Local devices by the number of ranks; the oracle needs ranks x devices in one process."""

FEW = (2,) if SIZE == 2 and 2 in LOCAL else LOCAL[-1:]
"""For what is slow to compile: 1x4, 2x2, 4x2."""


def needs_local(count: int) -> pytest.MarkDecorator:
    """For a test of so many devices of each rank: of GPUs there may be fewer."""
    return pytest.mark.skipif(max(LOCAL) < count, reason=f"LOUD: needs {count} local devices")


@pytest.fixture(scope="session", autouse=True)
def world() -> pc.Communicator:
    assert len(jax.devices("cpu")) >= SIZE * max(LOCAL), "the oracle needs JAX_NUM_CPU_DEVICES=8"
    return pc.world()


@pytest.fixture(params=LOCAL)
def local(request: pytest.FixtureRequest) -> int:
    """How many devices of each rank take part."""
    count: int = request.param
    return count


@pytest.fixture(params=FEW)
def few(request: pytest.FixtureRequest) -> int:
    """As ``local``, for what is slow to compile."""
    count: int = request.param
    return count
