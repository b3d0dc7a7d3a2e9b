"""How peers of the benchmark in subprocesses end. What they measure is tested end to end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pycollective.bench.workloads import make_workload
from pycollective.transport.mpi import MPI

WORLD = MPI.COMM_WORLD

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # its subprocesses get this, too
import peer_process  # noqa: E402


def test_one_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_process, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="pip install torch"):
        peer_process.InSubprocess(WORLD, 1, "torch-gloo")


def test_one_whose_process_ends() -> None:
    runner = peer_process.InSubprocess(WORLD, 1, "jax-gloo")
    runner.process.kill()
    runner.process.join(10)
    with pytest.raises(RuntimeError, match="an answer of jax gloo's process"):
        runner.prepare(make_workload("psum", 64, "float32", 1), 1)


def test_one_that_fails() -> None:
    runner = peer_process.InSubprocess(WORLD, 1, "jax-gloo")
    with pytest.raises(RuntimeError, match="an answer of jax gloo's process"):
        runner.time_calls("many")  # type: ignore[arg-type]
    runner.process.join(10)
    assert runner.process.exitcode == 1
