"""How implementations in subprocesses end. What they measure is tested end to end."""

from __future__ import annotations

import pytest

from pycollective.bench import subprocesses
from pycollective.bench.workloads import make_workload
from pycollective.transport.mpi import MPI

WORLD = MPI.COMM_WORLD


def test_one_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocesses, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="pip install torch"):
        subprocesses.InSubprocess(WORLD, "torch-gloo", 1)


def test_one_whose_process_ends() -> None:
    runner = subprocesses.InSubprocess(WORLD, "jax-gloo", 1)
    runner.process.kill()
    runner.process.join(10)
    with pytest.raises(RuntimeError, match="an answer of jax gloo's process"):
        runner.prepare(make_workload("psum", 64, "float32", 1), 1)


def test_one_that_fails() -> None:
    runner = subprocesses.InSubprocess(WORLD, "jax-gloo", 1)
    with pytest.raises(RuntimeError, match="an answer of jax gloo's process"):
        runner.time_calls("many")  # type: ignore[arg-type]
    runner.process.join(10)
    assert runner.process.exitcode == 1
