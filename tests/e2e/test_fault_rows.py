"""Each fault of one rank ends the job with its first cause, said once, with the rank. ``faulty.py`` has the faults.

Other tests have those that are not here: reports of long waits and ranks that leave in ``test_faults.py``, exceptions
and exit codes in ``test_ends.py``, settings that differ in ``test_check.py``, calls that all ranks know and that differ
in ``tests/collective/test_agreement_on_ranks.py``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import unoptimised
from tests.e2e import launch
from tests.e2e.launch import mpirun

BOUND_S = 150  # no fault should take a tenth of it
LIMIT_S = 4  # of waits, which some faults last
PROGRAM = str(Path(__file__).with_name("faulty.py"))
ENV = {"PYCOLLECTIVE_RECORDS": "off", "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": unoptimised.flags()}
whole, library = pytest.mark.whole, pytest.mark.library


def on_one_host(why: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(launch.HOSTS), reason=f"LOUD: on several hosts {why}")


def environ(timeout_s: int = LIMIT_S) -> dict[str, str]:
    return {**ENV, "PYCOLLECTIVE_TIMEOUT": str(timeout_s)}


def check_end(where: Path, stderr: str, *said: str) -> None:
    """The sentences were said once, nobody speaks but one rank, and nothing is left."""
    for sentence in said:
        assert len(re.findall(sentence, stderr, re.MULTILINE)) == 1, f"{sentence}\n{stderr}"
    assert len(launch.sentences(stderr)) == bool(said), stderr
    launch.wait_until_gone(str(where))


def check_shared_memory(stdout: str) -> None:
    """Of the files in shared memory that the ranks had mapped only those of MPI are left: MPICH leaves one."""
    mapped = {name for line in re.findall("^SHARED(.*)$", stdout, re.MULTILINE) for name in line.split()}
    ours = [name for name in mapped if not re.match(r"/dev/shm/(mpich_shm|ucx_shm|sm_segment|osc|vader)", name)]
    assert not [name for name in ours if Path(name).exists()]


ENDED = r"pycollective: rank 1 of \d {}; ending all ranks\."
RAISED = ENDED.format("raised")
DIED = r"^pycollective: rank 1 of 3 died: process \d+ on host \S+ was killed, crashed or called _exit\.$"
EARLY = ENDED.format("raised before init")
NO_LUCK = r"^(\w+\.)*\w*Error: no luck$"
DIFFER = r"pycollective\.\w+: CollectiveMismatch: expected the same call on every rank, got .* here and .* on rank \d "
ABSENT = (
    rf"pycollective\.init: expected the other ranks to start within {LIMIT_S} s, got no start of rank 1 after .* "
    r"\(rank 0 of "
)
IN_STEP = r"waited in collective \d+ of communicator world, allreduce\(float32\[2,3\], op=sum\), at faulty\.py:\d+"
APART = "The ranks wait for each other, in calls on different communicators or channels"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param("interrupt", [RAISED, "^KeyboardInterrupt"], marks=whole),
        pytest.param("exit text", [ENDED.format("exited with code 1, others did not"), "^no luck$"], marks=whole),
        pytest.param("out of memory", [RAISED, r"^\S*MemoryError: "], marks=whole),
        ("broken stdout", [RAISED, NO_LUCK, r"^Its standard output could not be flushed: OSError: no reader$"]),
        pytest.param("feeding thread", [ENDED.format("raised in a thread, 'feeder'"), NO_LUCK], marks=whole),
        pytest.param("pure callback", [RAISED, "JaxRuntimeError: "], marks=whole),
        ("io callback", [RAISED, "JaxRuntimeError: "]),
        pytest.param("ordered callback", [RAISED, "Error: INTERNAL"], marks=whole),
        pytest.param("debug callback", [RAISED], marks=whole),
        pytest.param(
            "interrupt in wait",
            [ENDED.format(r"was interrupted while it waited in allreduce\(float32\[2,3\], op=sum\)")],
            marks=library,
        ),
        pytest.param("before init: raise", [EARLY, NO_LUCK], marks=library),
        ("before init: exit", [ENDED.format("exited with code 3 before init")]),
        pytest.param("before init: text", [ENDED.format("exited with code 1 before init"), "^no luck$"], marks=whole),
        pytest.param("before init: interrupt", [EARLY, "^KeyboardInterrupt"], marks=whole),
        pytest.param("before init: leave", [ABSENT], marks=whole),
        pytest.param("before the import: raise", [ABSENT, NO_LUCK], marks=whole),
        ("in init", [RAISED, NO_LUCK]),
        ("another option of init", [EARLY, "ValueError: pycollective.init: expected timeout"]),
    ],
)
def test_an_end_of_one_rank(fault: str, said: list[str], tmp_path: Path) -> None:
    check(tmp_path, fault, said)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("shape", [DIFFER]),
        pytest.param("rank 0 logs", [DIFFER], marks=whole),
        pytest.param("trips", [DIFFER], marks=whole),
        pytest.param("branch", [DIFFER], marks=whole),
    ],
)
def test_a_call_that_differs(fault: str, said: list[str], tmp_path: Path) -> None:
    check(tmp_path, fault, [r"pycollective: rank \d of \d raised; ending all ranks", *said])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param("one more", [rf"rank 1 has {IN_STEP}", r"Look at ranks? 0(, 2)?:"], marks=whole),
        ("one less", ["rank 1 has ended, and waited", rf"ranks? 0(, 2)? ha\w+ {IN_STEP}", "Look at rank 1:"]),
        pytest.param("communicator", ["rank 1 has waited in collective 1 of communicator world/0", APART], marks=whole),
        pytest.param(
            "free",
            ["rank 1 has waited in free on communicator world/0", APART],
            marks=[whole, on_one_host("a rank that frees a communicator alone harms nobody")],
        ),
        pytest.param(
            "large send",
            [
                r"rank 1 has waited in message 1 .* send\(float32\[1048576\]\) to",
                "Look at rank 0: the others wait for it",
            ],
            marks=whole,
        ),
    ],
)
def test_a_call_that_not_all_make(fault: str, said: list[str], tmp_path: Path) -> None:
    started = r"pycollective: (some ranks wait for a rank that has ended|expected an answer from the other ranks)"
    check(tmp_path, fault, [started, *said])


@pytest.mark.parametrize("fault", [pytest.param("segfault", marks=whole), pytest.param("kill", marks=library)])
def test_a_rank_that_dies(fault: str, tmp_path: Path) -> None:
    """Open MPI's launcher names the rank on one host. Else a rank of its host does, if it has the time."""
    done = mpirun(3, PROGRAM, fault, str(tmp_path), timeout=BOUND_S, env=environ())
    assert done.returncode not in (0, 124), done.stderr
    said = launch.sentences(done.stderr)
    if launch.is_open_mpi():  # on several hosts its launcher may name a rank that has lost the connection
        assert said or re.search("process rank 1 with PID", done.stderr), done.stderr
        assert launch.HOSTS or not said, done.stderr
    assert len(said) <= 1, done.stderr
    assert all(re.match(DIED, line) for line in said), done.stderr
    launch.wait_until_gone(str(tmp_path))
    check_shared_memory(done.stdout)


DIES = """
import os, signal, time
import pycollective as pc

world = pc.init()
launcher = os.getppid()
world.mpi.barrier()
if world.rank == 1:
    os.kill(launcher, signal.SIGSTOP)  # it would end the others when it sees the death
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(3)
os.kill(launcher, signal.SIGCONT)
time.sleep(300)
"""


@whole
@pytest.mark.skipif(launch.is_open_mpi(), reason="LOUD: Open MPI's launcher names the rank: see test_a_rank_that_dies")
def test_the_rank_that_died_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(DIES)
    records = tmp_path / "records"
    done = mpirun(3, str(program), timeout=BOUND_S, env={**environ(), "PYCOLLECTIVE_RECORDS": str(records)})
    assert done.returncode not in (0, 124), done.stderr
    assert len(re.findall(DIED, done.stderr, re.MULTILINE)) == 1, done.stderr
    assert done.stderr.count("pycollective") == 1, done.stderr
    assert {file.name for file in records.iterdir()} == {"rank-0.json", "rank-2.json"}
    for file in records.iterdir():
        assert json.loads(file.read_text())["reason"].startswith("rank 1 of 3 died: process ")
    launch.wait_until_gone(str(program))


ENDS_EARLIER = """
import os, sys, time
import pycollective as pc
from mpi4py import MPI
from pycollective.faults import rank_exit

rank, finalizes, leaves = pc.init().rank, {}, "{}"
if finalizes:
    MPI.Finalize()
if rank == 1:
    exec(leaves)
else:
    rank_exit.call_at_end(lambda: time.sleep(1))
time.sleep(1)
"""


@whole
@pytest.mark.parametrize(
    ("finalizes", "leaves"),
    [
        (True, "os._exit(0)"),
        (True, "sys.exit()"),
        (False, "if os.fork() == 0: sys.exit()"),
        (False, ""),
    ],
)
def test_an_end_in_order_is_no_death(finalizes: bool, leaves: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ENDS_EARLIER.format(finalizes, leaves))
    # MPICH's mpiexec sometimes sees the end of a rank before it has read that the rank has left MPI, and kills the
    # other one with signal 9: under load 7 of 894 times for a program that has mpi4py alone.
    for _ in range(3):
        done = mpirun(2, str(program), timeout=BOUND_S, env=environ())
        assert "died" not in done.stderr, done.stderr
        if done.returncode != signal.SIGKILL:
            break
    assert done.returncode == 0, done.stderr


def check(where: Path, fault: str, said: list[str]) -> None:
    """Runs a fault. The path tells its processes from others."""
    started = time.monotonic()
    done = mpirun(3, PROGRAM, fault, str(where), timeout=BOUND_S, env=environ())
    assert time.monotonic() - started < BOUND_S, done.stderr  # a killed rank's status may be that of timeout(1)
    assert done.returncode != 0, done.stderr
    check_end(where, done.stderr, *said)
    check_shared_memory(done.stdout)


@whole
def test_a_rank_that_compiles_alone() -> None:
    done = mpirun(3, PROGRAM, "compiles alone", timeout=BOUND_S, env=environ())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("end") == 3


STUCK = """
import time
import pycollective as pc
from pycollective.faults import rank_exit
from pycollective.transport import watch

world = pc.init()
watch.stop_monitor()  # else rank 0 would end by itself, and the launcher then ends rank 1
world.mpi.barrier()


class Stuck:
    size, rank = world.size, world.rank

    def Abort(self, status):
        time.sleep(300)


if world.rank == 1:
    class Mpi:
        COMM_WORLD = Stuck()
        Is_finalized = staticmethod(rank_exit.MPI.Is_finalized)

    rank_exit.MPI = Mpi
    raise ValueError("no luck")
time.sleep(300)
"""


@whole
@on_one_host("MPICH's mpiexec does not notice an _exit; the monitors do, which this test stops")
def test_a_rank_ends_though_mpi_does_not_end_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(STUCK)
    started = time.monotonic()
    done = mpirun(2, str(program), timeout=BOUND_S, env=environ())
    assert time.monotonic() - started < BOUND_S
    assert done.returncode != 0
    assert len(re.findall(NO_LUCK, done.stderr, re.MULTILINE)) == 1, done.stderr
    launch.wait_until_gone(str(program))


@whole
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupt", "terminate"])
def test_a_signal_to_the_launcher(number: int, tmp_path: Path) -> None:
    """All ranks wait or sleep. They are ended, and say at most once why."""
    options = ["--oversubscribe"] if launch.is_open_mpi() else []
    command = [str(Path(sys.executable).parent / "mpiexec"), *options, "-n", "2", sys.executable, PROGRAM]
    with subprocess.Popen(
        [*command, "all wait", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **launch.AS_ROOT, **environ(100)},
        start_new_session=True,
    ) as launcher:
        assert launcher.stdout is not None
        too_late = threading.Timer(BOUND_S, os.killpg, (launcher.pid, signal.SIGKILL))
        too_late.start()
        said = [launcher.stdout.readline() for _ in range(4)]
        assert said.count("waits\n") == 2, said
        time.sleep(1)  # now they wait
        launcher.send_signal(number)
        _, stderr = launcher.communicate()
        too_late.cancel()
    assert launcher.returncode not in (0, -signal.SIGKILL), stderr
    assert stderr.count("Traceback") <= 1, stderr
    assert len(launch.sentences(stderr)) <= 1, stderr
    launch.wait_until_gone(str(tmp_path))
