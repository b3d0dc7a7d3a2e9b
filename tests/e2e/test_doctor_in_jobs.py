"""``pycollective doctor`` as users type it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import AS_ROOT, mpirun

DOCTOR = ["-m", "pycollective", "doctor"]


def alone(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *DOCTOR, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **AS_ROOT, **env},
        timeout=150,
        check=False,
    )


@pytest.mark.whole
def test_the_installation() -> None:
    done = alone("--json", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {item["name"]: item for item in json.loads(done.stdout)}
    assert {item["status"] for item in found.values()} <= {"ok", "warning"}, done.stdout
    assert found["launcher"]["status"] == "ok"
    assert "mpi4py 4" in found["versions"]["text"]
    assert found["2 ranks: psum"]["text"] == "right on 2 rank(s)"
    assert "us, " in found["2 ranks: within a host"]["text"]


@pytest.mark.whole
@pytest.mark.library
def test_a_job() -> None:
    done = mpirun(2, *DOCTOR, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum("psum" in line for line in lines) == 1  # rank 0 speaks for all
    assert all(line.startswith(("ok ", "warning ")) for line in lines)
    assert "2 rank(s), as " in lines[0]


def test_no_mpi() -> None:
    done = alone(MPI4PY_LIBMPI="/no/libmpi.so")
    assert done.returncode == 1
    assert "wrong   MPI library" in done.stdout
    assert "pip install '.[mpich]' in a clone" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_ranks_that_are_alone() -> None:
    # What a plain srun starts where MPI needs --mpi=pmi2.
    done = alone(SLURM_STEP_NUM_TASKS="4")
    assert done.returncode == 1
    assert "srun started 4 rank(s), MPI sees 1" in done.stdout
    assert "--mpi=pmi2" in done.stdout
