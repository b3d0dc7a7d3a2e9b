"""The transport by mpi4jax, as far as it needs no mpi4jax."""

from __future__ import annotations

import importlib
import types
from typing import Any

import jax
import pytest

import pycollective as pc
from pycollective.ranks import setup
from pycollective.transport import by_mpi4jax, chosen, mpi4jax_operations, native
from pycollective.transport.by_mpi4jax import ByMpi4jax


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


def test_an_operation_that_it_does_not_know(transport: ByMpi4jax) -> None:
    with pytest.raises(
        NotImplementedError, match="permute_all: expected one of allgather, .* with transport='mpi4jax'"
    ):
        by_mpi4jax._check("permute_all", -1, [], [])


def test_each_operation_has_a_method() -> None:
    """Over a part of the ranks, too, but the messages, which are a program's own."""
    pc.init()
    refused = {"isendrecv", "wait"}  # mpi4jax has no requests
    assert set(native.host_targets()) - refused == set(mpi4jax_operations.ATTRIBUTES)
    of_some = vars(mpi4jax_operations._Operations)
    assert set(native.host_targets()) - set(of_some) == {"recv", "send", "sendrecv", *refused}


@pytest.fixture
def other_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The ranks, of which the other one has mpi4jax; the list of what this one told it."""
    told: list[str] = []

    def allreduce(own: dict[str, list[range]], op: Any) -> dict[str, list[range]]:
        told.extend(own)
        return dict(op(own, {"mpi4jax": [range(1, 2)]}))

    monkeypatch.setattr(chosen, "_chosen", [])
    return types.SimpleNamespace(rank=0, size=2, allreduce=allreduce), told


def test_ranks_with_different_transports_are_refused(other_rank: Any) -> None:
    ranks, _ = other_rank
    with pytest.raises(
        ValueError,
        match=r"init: expected the same transport on all ranks, got native on rank 0, mpi4jax on rank 1 \(rank",
    ):
        setup._choose_transport(ranks, None)


def test_a_rank_without_mpi4jax_tells_the_others(other_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, told = other_rank
    monkeypatch.setitem(chosen.TRANSPORTS, "mpi4jax", _missing)
    with pytest.raises(ImportError, match="No module"):
        setup._choose_transport(ranks, "mpi4jax")
    assert told == ["none"]


def _missing() -> None:
    raise ImportError("No module named 'mpi4jax'")
