"""Peers of the benchmark in processes of their own: their ends. What they measure is tested end to end."""

from __future__ import annotations

import multiprocessing

import pytest

from pycollective.bench import peers
from pycollective.bench.works import make_work
from pycollective.mpi import MPI

WORLD = MPI.COMM_WORLD


def test_one_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers._PACKAGES, "torch-gloo", "no_such_package")
    with pytest.raises(ImportError, match="pip install no_such_package"):
        peers.Beside(WORLD, "torch-gloo", 1)


def test_one_whose_process_ends() -> None:
    beside = peers.Beside(WORLD, "jax-gloo", 1)
    (process,) = multiprocessing.active_children()
    process.kill()
    process.join(10)
    with pytest.raises(RuntimeError, match="an answer of jax gloo's process"):
        beside.prepare(make_work("psum", 64, "float32", 1), 1)
