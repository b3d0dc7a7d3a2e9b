"""``pycollective run`` as users type it, with the MPI library of this environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from pycollective.launch.host_share import physical_cores
from tests.e2e.launch import AS_ROOT, wait_until_gone

OTHERS = ("SLURM_", "OMP_", "OPENBLAS_", "MKL_", "JAX_NUM_")
ENVIRON = {
    **{name: value for name, value in os.environ.items() if not name.startswith(OTHERS)},
    **AS_ROOT,
    "JAX_PLATFORMS": "cpu",
}

PROGRAM = """
import os, sys, time
import jax
import pycollective as pc

comm = pc.init()
cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
threads = os.environ.get("OMP_NUM_THREADS")
said = f"RANK {comm.rank} of {comm.size}: {cores} {threads} {jax.local_device_count()} {sys.argv[1:]}"
sys.stdout.write(said + "\\n")
sys.stdout.flush()
if "wait" in sys.argv:
    time.sleep(100)
"""

# For what the launcher does alone: ranks of MPI, which start faster without JAX.
ENDS = """
import os, sys, time
from mpi4py import MPI

sys.stdout.write("RANK\\n")
sys.stdout.flush()
MPI.COMM_WORLD.barrier()
if "fail" in sys.argv and MPI.COMM_WORLD.rank == 1:
    os._exit(7)
time.sleep(100)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "prog.py"
    path.write_text(PROGRAM)
    return str(path)


def command(*arguments: str) -> list[str]:
    return ["timeout", "-k", "5", "60", sys.executable, "-m", "pycollective", "run", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, env=ENVIRON, check=False, stdin=subprocess.DEVNULL
    )


def said(output: str) -> list[list[str]]:
    """What each rank said, by rank."""
    lines = sorted(line[line.index("RANK") :] for line in output.splitlines() if "RANK" in line)
    return [line.split(maxsplit=6) for line in lines]


@pytest.mark.library
def test_ranks_and_their_cores(program: str) -> None:
    cores = physical_cores(os.sched_getaffinity(0))
    ranks = min(2, len(cores))
    done = run("-n", str(ranks), "--devices-per-rank", "3", program, "--epochs", "2")
    assert done.returncode == 0, done.stderr
    lines = said(done.stdout)
    assert [line[1] for line in lines] == [str(rank) for rank in range(ranks)]
    bound = [set(line[4].split(",")) for line in lines]
    assert all(bound[a].isdisjoint(bound[b]) for a in range(ranks) for b in range(a))
    assert sum(any(str(cpu) in own for cpu in core) for core in cores for own in bound) == len(cores) // ranks * ranks
    for line in lines:
        assert line[2:4] == ["of", f"{ranks}:"]
        rest = line[6].split(maxsplit=1)
        assert rest == ["3", "['--epochs', '2']"]
        assert 1 <= int(line[5]) <= len(line[4].split(","))


@pytest.mark.whole
def test_unbound_and_labelled(program: str) -> None:
    done = run("-n", "2", "--oversubscribe", "--bind", "none", "--label", program)
    assert done.returncode == 0, done.stderr
    everything = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert [line[4:6] for line in said(done.stdout)] == [[everything, "None"]] * 2
    for line in done.stdout.splitlines():
        if "RANK" in line:
            label, _, text = line.partition("RANK")
            assert text.split()[0] in label


@pytest.mark.library
def test_the_exit_status_is_the_programs(ends: str) -> None:
    statuses = [run("-n", "2", "--oversubscribe", ends, "fail").returncode]
    # MPICH's mpiexec kills the other rank with signal 9. On a busy machine it sometimes reports the killed rank's.
    while statuses[-1] == signal.SIGKILL and len(statuses) < 3:
        statuses.append(run("-n", "2", "--oversubscribe", ends, "fail").returncode)
    assert statuses[-1] == 7, statuses


def test_any_program() -> None:
    done = run("-n", "2", "--oversubscribe", "echo", "hello")
    assert done.stdout.split() == ["hello", "hello"], done.stderr


def test_a_set_has_the_same_order_on_all_ranks() -> None:
    done = run("-n", "2", "--oversubscribe", sys.executable, "-c", "print(*{'weight', 'bias', 'scale', 'shift'})")
    first, second = done.stdout.splitlines()
    assert first == second
    assert sorted(first.split()) == ["bias", "scale", "shift", "weight"]


def test_more_ranks_than_cores(program: str) -> None:
    done = run("-n", "1000", program)
    assert done.returncode == 2
    assert "got 1000. Start fewer, on more --hosts, or say --oversubscribe" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_that_does_not_exist() -> None:
    done = run("-n", "1", "/no/such.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected a program, got '/no/such.py', which does not exist" in done.stderr


def test_no_mpi_library(program: str, tmp_path: Path) -> None:
    # As where no MPI is installed: mpi4py's loader finds none.
    done = subprocess.run(
        command("-n", "1", program),
        capture_output=True,
        text=True,
        env={**ENVIRON, "MPI4PY_LIBMPI": str(tmp_path / "none.so")},
        check=False,
    )
    assert done.returncode == 2
    assert "expected an MPI library that mpi4py can load" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "waits"),
    [pytest.param(signal.SIGINT, "program", marks=pytest.mark.library), (signal.SIGTERM, "ends")],
    ids=["interrupt", "terminate"],
)
def test_signals_end_all_ranks(number: int, waits: str, request: pytest.FixtureRequest) -> None:
    # An interrupt is an exception in Python, so it takes the way of this package. Without timeout(1), which would take
    # the signal itself.
    program = request.getfixturevalue(waits)
    process = subprocess.Popen(
        command("-n", "2", "--oversubscribe", program, "wait")[4:],
        stdout=subprocess.PIPE,
        env=ENVIRON,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    end = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
    end.start()
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        assert all("RANK" in line for line in lines)
        process.send_signal(number)
        assert process.wait(30) != 0
    finally:
        end.cancel()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    wait_until_gone(program)
