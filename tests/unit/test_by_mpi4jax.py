"""The transport by mpi4jax, as far as it needs no mpi4jax."""

from __future__ import annotations

import importlib
import types

import jax
import pytest

from pycollective.transport import by_mpi4jax
from pycollective.transport.by_mpi4jax import ByMpi4jax
from pycollective.transport.mpi import MPI


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> ByMpi4jax:
    monkeypatch.setattr(importlib, "import_module", lambda name: types.ModuleType(name))
    return ByMpi4jax()


def test_without_mpi4jax(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        ImportError,
        match=r"init: expected mpi4jax for transport='mpi4jax', got No module named 'mpi4jax'\. Install it",
    ):
        ByMpi4jax()


def test_several_devices_are_refused(transport: ByMpi4jax) -> None:
    devices = jax.local_devices()
    with pytest.raises(ValueError, match="init: expected one CPU device for each rank with transport='mpi4jax', got"):
        transport.check([*devices, *devices])
    transport.check(devices[:1])


def test_programs_of_another_process_are_told_from_ours(transport: ByMpi4jax) -> None:
    # Their communicators have other handles, which mpi4jax has written into them.
    assert transport.facts(MPI.COMM_WORLD, MPI.COMM_SELF) == transport.facts(MPI.COMM_WORLD, MPI.COMM_SELF)
    assert transport.facts(MPI.COMM_WORLD, MPI.COMM_SELF) != transport.facts(MPI.COMM_SELF, MPI.COMM_WORLD)


def test_an_operation_that_it_does_not_know(transport: ByMpi4jax) -> None:
    with pytest.raises(
        NotImplementedError, match="permute_all: expected one of allreduce, .* with transport='mpi4jax'"
    ):
        by_mpi4jax._check("permute_all", -1, [], [])
