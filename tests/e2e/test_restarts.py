"""``pycollective run --restarts``: a job whose rank dies starts again, and goes on from its last checkpoint.

test_hosts.py has jobs that lose a host.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests import unoptimised
from tests.e2e.fail_at import EVENTS_OF_A_CHECKPOINT
from tests.e2e.launch import AS_ROOT, EXAMPLES, limited, wait_until_gone

FAIL_AT = str(Path(__file__).with_name("fail_at.py"))
EPOCHS, STEPS_OF_AN_EPOCH = 3, 11
RANKS = ["-n", "2", "--oversubscribe", "--bind", "none"]

# Ranks of MPI, which start faster without JAX. Each says which attempt it sees and where its shared memory is.
ENDS = """
import os, re, signal, subprocess, sys, time
from mpi4py import MPI

rank, attempt, how = MPI.COMM_WORLD.rank, int(os.environ["PYCOLLECTIVE_RESTART"]), sys.argv[1]
shared = re.findall(r"/dev/shm/(?:mpich|sm_seg)\\S+", open("/proc/self/maps").read())
sys.stdout.write(f"RANK {rank} of {MPI.COMM_WORLD.size} at {attempt}: {' '.join(sorted(set(shared)))}\\n")
sys.stdout.flush()
MPI.COMM_WORLD.barrier()
if how == "launcher" and attempt > 0:
    sys.exit()
if how == "launcher" and rank == 0:
    launcher, parent = 0, os.getpid()
    while b"--restarts" not in open(f"/proc/{parent}/cmdline", "rb").read():
        launcher, parent = parent, int(re.search(r"PPid:\\s(\\d+)", open(f"/proc/{parent}/status").read())[1])
    os.kill(launcher, signal.SIGKILL)
if how == "always" and rank == 1:
    away = subprocess.DEVNULL  # else the launcher would wait until the child of this rank closes its output
    child = ["sh", "-c", "sleep 1000; :", sys.argv[0]]
    subprocess.Popen(child, stdin=away, stdout=away, stderr=away, start_new_session=True)
    os.kill(os.getpid(), signal.SIGKILL)
if how == "wait":
    import pycollective

    pycollective.init()  # an interrupt is an exception in Python, so it takes the way of this package
    sys.stdout.write("WAITS\\n")
    sys.stdout.flush()
time.sleep(100)
"""


def environ() -> dict[str, str]:
    fast = {"XLA_FLAGS": unoptimised.flags(), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    return {**os.environ, **AS_ROOT, **fast}


def run(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return limited([sys.executable, "-m", "pycollective", "run", *arguments], 120, env=environ(), cwd=where)


def attempts(printed: str) -> list[tuple[str, ...]]:
    """The number of each attempt that failed, its status, and what came then."""
    return re.findall(r"attempt (\d) of \d ended with status (\d+).*? s\. (\w+) (?:starting )?again", printed)


def train(where: Path, example: str, *failing: str) -> tuple[np.ndarray, str]:
    """The losses of an example with checkpoints, and what it said.

    Args:
        where: its directory.
        example: a file in ``examples``.
        failing: options of fail_at.py; without any, nothing fails.
    """
    program = [FAIL_AT, *failing] if failing else []
    arguments = [str(EXAMPLES / example), "--epochs", str(EPOCHS), "--checkpoints", "saved", "--losses", "losses.json"]
    done = run(where, *RANKS, "--restarts", "2", *program, *arguments)
    assert done.returncode == 0, done.stderr
    return np.array(json.loads((where / "losses.json").read_text())), done.stderr


@pytest.fixture(scope="module", params=["train_digits.py"])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, np.ndarray]:
    """An example, and its losses without a fault."""
    losses, said = train(tmp_path_factory.mktemp("undisturbed"), request.param)
    assert "attempt" not in said
    return request.param, losses


@pytest.mark.library
def test_a_killed_rank(tmp_path: Path, undisturbed: tuple[str, np.ndarray]) -> None:
    example, want = undisturbed
    losses, said = train(tmp_path, example, "--seed", "5", "--steps", str(EPOCHS * STEPS_OF_AN_EPOCH))
    assert [(number, then) for number, _, then in attempts(said)] == [("1", "Starting")], said
    np.testing.assert_allclose(losses, want, rtol=1e-5)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("undisturbed", "event"),
    [
        ("train_digits.py", EVENTS_OF_A_CHECKPOINT // 2),
        ("train_flax.py", EVENTS_OF_A_CHECKPOINT - 1),
    ],
    indirect=["undisturbed"],
)
def test_death_while_a_checkpoint_is_written(event: int, tmp_path: Path, undisturbed: tuple[str, np.ndarray]) -> None:
    example, want = undisturbed
    losses, said = train(tmp_path, example, "--saving", str(event))
    assert [(number, then) for number, _, then in attempts(said)] == [("1", "Starting")], said
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    # The second checkpoint was not whole, so the training went on from the first.
    again = re.search(rf"(\d+)/{len(want)} \[", said.partition("Starting again")[2])
    assert again is not None, said
    assert int(again[1]) == STEPS_OF_AN_EPOCH


@pytest.mark.library
def test_every_attempt_dies(ends: str, tmp_path: Path) -> None:
    done = run(tmp_path, *RANKS, "--restarts", "1", ends, "always")
    assert done.returncode not in (0, 124)
    assert attempts(done.stderr) == [("1", str(done.returncode), "Starting"), ("2", str(done.returncode), "Not")]
    assert "Not starting again: --restarts 1 are used up." in done.stderr
    said = re.findall(r"RANK (\d) of 2 at (\d): (.*)", done.stdout)
    assert sorted(place for *place, _ in said) == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    shared = {name for *_, names in said for name in names.split()}
    assert len(shared) >= 2  # of each attempt
    assert not [name for name in shared if Path(name).exists()]
    # Nothing was left running either, not even what a rank has started in a session of its own.
    wait_until_gone(ends, 0.5)


def test_what_no_attempt_can_mend(tmp_path: Path) -> None:
    done = run(tmp_path, *RANKS, "--restarts", "2", "sh", "-c", "exit 127")
    assert done.returncode == 127
    assert attempts(done.stderr) == [("1", "127", "Not")]
    assert run(tmp_path, *RANKS, "--restarts", "2", "/no/such/program").returncode == 2
    done = run(tmp_path, "-n", "2", "--min-ranks", "1", "true")
    assert done.returncode == 2
    assert "got --min-ranks 1 and --restarts 0" in done.stderr


@pytest.mark.library
def test_a_killed_launcher(ends: str, tmp_path: Path) -> None:
    done = run(tmp_path, *RANKS, "--restarts", "1", ends, "launcher")
    assert done.returncode == 0, done.stderr
    assert attempts(done.stderr) == [("1", "137", "Starting")]
    # A later launcher of Open MPI that got the number of the killed one could not start.
    assert list(Path(os.environ["TMPDIR"]).glob("ompi.*")) == []
    wait_until_gone(ends)


@pytest.mark.library
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["terminate", "interrupt"])
def test_a_signal_ends_the_job(number: int, ends: str, tmp_path: Path) -> None:
    # Without timeout(1), which would take the signal itself.
    process = subprocess.Popen(
        [sys.executable, "-m", "pycollective", "run", *RANKS, "--restarts", "2", ends, "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ(),
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    end = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
    end.start()
    try:
        lines = [process.stdout.readline() for _ in range(4)]
        assert sum("WAITS" in line for line in lines) == 2
        process.send_signal(number)
        printed, said = process.communicate(timeout=30)
        assert process.returncode != 0
        assert "at 1" not in printed
        assert "again" not in said.replace("hit ctrl-c again", "")
    finally:
        end.cancel()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    wait_until_gone(ends)
