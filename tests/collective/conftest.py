"""Communicators that tests are parametrised over.

``PYCOLLECTIVE_TEST_TRANSPORT=mpi4jax`` chooses that transport. Then test_by_mpi4jax_on_ranks.py runs too, but not what
has the mark ``native``.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from mpi4py import MPI

import pycollective as pc
from tests.under_mpirun import *  # noqa: F403
from tests.under_mpirun import SIZE, keep_programs

keep_programs()

# One device takes part; the others are for the oracle, jax.pmap. The call comes before a test module makes an array:
# an array would start JAX's devices, with a thread for each core on every rank.
TRANSPORT = os.environ.get("PYCOLLECTIVE_TEST_TRANSPORT", "native")
pc.init(devices=1, transport=TRANSPORT)

collect_ignore = [] if TRANSPORT == "mpi4jax" else ["test_by_mpi4jax_on_ranks.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only the native transport does."""
    others = [item for item in items if TRANSPORT != "native" and item.get_closest_marker("native")]
    items[:] = [item for item in items if item not in others]
    config.hook.pytest_deselected(items=others)


@pytest.fixture(scope="session")
def world() -> pc.Communicator:
    return pc.world()


def make_communicator(kind: str) -> pc.Communicator:
    """A communicator of the kind that tests are parametrised over."""
    world = pc.world()
    if kind == "world":
        return world
    if kind == "self":
        return pc.Communicator(MPI.COMM_SELF)
    assert kind == "split"  # pairs of ranks, each in opposite order
    part = world.split(color=world.rank // 2, key=-world.rank)
    assert part is not None
    return part


_made: dict[str, pc.Communicator] = {}


KINDS = {1: ("world",), 2: ("world", "self", "split")}.get(SIZE, ("world", "split"))
"""One rank by itself is the same on any number of them."""


@pytest.fixture(params=KINDS)
def comm(request: pytest.FixtureRequest) -> pc.Communicator:
    """One communicator of each kind, made once: programs compiled for it are used again."""
    kind: Any = request.param
    if kind not in _made:
        _made[kind] = make_communicator(kind)
    return _made[kind]
