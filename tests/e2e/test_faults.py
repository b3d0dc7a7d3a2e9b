"""Faults of one rank: each ends the job within its bound, and one report names the rank and the cause.

The reports come from the monitor of a rank, which asks the others on sockets (native/monitor/monitor.h). The tests of
``test_ends.py`` are about ranks that end by themselves.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import launch
from tests.e2e.launch import mpirun

SHORT = 60  # seconds; none of these should take a quarter of it

# Every rank knows the calls already when rank 1 does something else.
PROGRAM = """
import ctypes, os, signal, sys, time
import jax, jax.numpy as jnp
from jax import lax
import pycollective as pc

fault = sys.argv[1]
world = pc.init()
rank = world.rank
x = jnp.ones((2, 3))
step = pc.jit(lambda x: lax.psum(x, "i"), axis_name="i")
step(x).block_until_ready()
half = world.split(rank % 2)


def loads_data():
    time.sleep(300)


if rank == 1:
    if fault == "missing":
        loads_data()
    elif fault == "lock":  # no other Python thread runs meanwhile
        ctypes.PyDLL(None).sleep(300)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "exit at once":
        os._exit(0)
    elif fault == "early":
        sys.exit(0)
    elif fault == "receives":
        pc.recv(x, world, source=0).block_until_ready()
if fault == "split":
    if rank == 1:
        loads_data()
    world.split(0)
elif fault == "sends":  # each rank sends before it receives, more than MPI buffers
    large = jnp.ones(1 << 20)
    pc.send(large, world, dest=(rank + 1) % world.size)
    pc.recv(large, world, source=(rank - 1) % world.size).block_until_ready()
for _ in range(2):
    step(x).block_until_ready()
"""

# The first device of rank 1 is stuck in a function of the user's; its second one makes the call.
ONE_DEVICE = """
import time
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import pycollective as pc

world = pc.init(devices=2)
waits = False


def loads_data(x, index):
    if waits and index == 2:
        time.sleep(300)
    return np.asarray(x)


def step(x):
    x = jax.pure_callback(loads_data, jax.ShapeDtypeStruct(x.shape, x.dtype), x, lax.axis_index("i"))
    return lax.psum(x, "i")


step = pc.pmap(step, axis_name="i")
jax.block_until_ready(step(jnp.ones((2, 3))))
waits = True
jax.block_until_ready(step(jnp.ones((2, 3))))
"""

IN_STEP = r"has waited in collective 2 of communicator world, allreduce\(float32\[2,3\], op=sum\), at program.py:11 "


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            "missing",
            [
                rf"ranks 0, 2 have{IN_STEP[3:]}",
                r"rank 1 makes no call\. Its last one was collective 1 of communicator world, allreduce",
                r"Python on rank 1:\n +File \".*program.py\", line 17 in loads_data\n",
                r"Look at rank 1: the others wait for it\.",
            ],
        ),
        pytest.param(
            "lock",
            [r"Python on rank 1 \(read without the interpreter's lock, .*\):\n +File \".*program.py\", line 24"],
            marks=pytest.mark.whole,
        ),
        ("stopped", [r"rank 1 does not answer: process \d+ on host \S+ is stopped\.", "Look at rank 1:"]),
        pytest.param(
            "receives",
            [
                r"rank 1 has waited in message 1 of communicator world, recv\(float32\[2,3\]\) from rank 0",
                "Look at rank 0: the others wait for it",
            ],
        ),
        pytest.param(
            "split",
            [r"ranks 0, 2 have waited in split on communicator world", "Look at rank 1:"],
            marks=pytest.mark.whole,
        ),
        pytest.param(
            "sends",
            [
                r"rank 2 has waited in message 1 of communicator world, send\(float32\[1048576\]\) to rank 0",
                r"The ranks wait for each other, in messages that no rank sends or no rank receives\.",
            ],
            marks=pytest.mark.whole,
        ),
    ],
)
def test_a_long_wait_is_reported_once(fault: str, told: list[str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {"PYCOLLECTIVE_TIMEOUT": "2", "PYCOLLECTIVE_RECORDS": str(tmp_path / "records")}
    done = mpirun(3, str(program), fault, timeout=SHORT, env=env)
    assert done.returncode not in (0, 124, 137), done.stderr
    assert done.stderr.count("expected an answer from the other ranks within 2 s, got none for") == 1, done.stderr
    for line in told:
        assert re.search(line, done.stderr), f"{line}\n{done.stderr}"
    launch.wait_until_gone(str(program))
    alive = [0, 2] if fault == "stopped" else [0, 1, 2]  # a stopped rank writes nothing
    for rank in alive:
        records = json.loads((tmp_path / "records" / f"rank-{rank}.json").read_text())
        assert records["rank"] == rank
        assert "expected an answer" in records["reason"]
        first = next(entry for entry in records["entries"] if entry["collective_seq_id"] == 1)
        assert (first["profiling_name"], first["state"]) == ("pycollective:allreduce", "completed")
        assert first["frames"] == [{"name": "<lambda>", "filename": "program.py", "line": 11}]


def test_a_device_that_is_stuck_in_a_callback_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ONE_DEVICE)
    env = {"PYCOLLECTIVE_TIMEOUT": "2", "PYCOLLECTIVE_RECORDS": "off", "JAX_NUM_CPU_DEVICES": "2"}
    done = mpirun(2, str(program), timeout=SHORT, env=env)
    assert done.returncode not in (0, 124, 137), done.stderr
    callback = r"A callback of a program on rank 1:\n +File \".*program.py\", line 13 in loads_data\n"
    assert re.search(callback, done.stderr), done.stderr
    assert "Look at rank 1: the others wait for it." in done.stderr, done.stderr
    launch.wait_until_gone(str(program))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("exit at once", [r"rank 1 of 3 called os\._exit\(0\) before the job's end; ending all ranks"]),
        (
            "early",
            [
                "some ranks wait for a rank that has ended; ending all ranks",
                "rank 1 has ended, and waited for the others",
                rf"ranks 0, 2 have{IN_STEP[3:]}",
            ],
        ),
    ],
)
def test_a_rank_that_leaves_is_reported_without_a_timeout(fault: str, told: list[str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = mpirun(3, str(program), fault, timeout=SHORT)
    assert done.returncode not in (0, 124, 137), done.stderr
    for line in told:
        assert len(re.findall(line, done.stderr)) == 1, f"{line}\n{done.stderr}"
    assert "Python on" not in done.stderr, done.stderr  # a rank at its end stands in this package alone
    launch.wait_until_gone(str(program))


@pytest.mark.whole
def test_a_rank_whose_launcher_was_killed_ends(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import pycollective as pc, time\npc.init()\nprint('began', flush=True)\ntime.sleep(300)\n")
    options = ["--oversubscribe"] if launch.is_open_mpi() else []
    command = [str(Path(sys.executable).parent / "mpiexec"), *options, "-n", "2", sys.executable, str(program)]
    env = {**os.environ, **launch.AS_ROOT}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True) as launcher:
        assert launcher.stdout is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["began\n"] * 2
        launcher.send_signal(signal.SIGKILL)
        launch.wait_until_gone(str(program), 20)


def test_a_warning_comes_before_the_end_and_the_job_goes_on(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import time, jax.numpy as jnp, pycollective as pc\n"
        "from pycollective.faults import monitor\n"
        "monitor._WARNING_S = 1.0\n"
        "world = pc.init()\n"
        "if world.rank == 1:\n"
        "    time.sleep(3)\n"
        "print(float(pc.psum(jnp.ones(2), world)[0]))\n"
    )
    started = time.monotonic()
    done = mpirun(2, str(program), timeout=SHORT)
    assert time.monotonic() - started > 3
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2.0", "2.0"]
    assert len(re.findall(r"a call has waited for \d\.\d s\. All ranks end after 600 s\.", done.stderr)) == 1, (
        done.stderr
    )
    assert re.search(r"Python on rank 1:\n +File \".*program.py\", line 6 in <module>", done.stderr), done.stderr


def test_a_report_that_nobody_reads_ends_the_job(tmp_path: Path) -> None:
    """The console is full before the report. The other rank is told to end all the same."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, sys, threading, time, jax.numpy as jnp, pycollective as pc\n"
        "world = pc.init(timeout=2)\n"
        "def fills(): os.write(2, b'a' * (1 << 22))\n"
        "pathlib.Path(sys.argv[1], f'pid-{world.rank}').write_text(str(os.getpid()))\n"
        "threading.Thread(target=fills, daemon=True).start()\n"
        "if world.rank == 1:\n"
        "    time.sleep(300)\n"
        "pc.psum(jnp.ones(2), world).block_until_ready()\n"
    )
    options = ["--oversubscribe"] if launch.is_open_mpi() else []
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    command = [mpiexec, *options, "-n", "2", sys.executable, str(program), str(tmp_path)]
    env = {**os.environ, **launch.AS_ROOT, "PYCOLLECTIVE_RECORDS": str(tmp_path / "records")}
    pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=env, start_new_session=True) as launcher:
        try:
            wait_until(lambda: all(pid.exists() and pid.read_text() for pid in pids), SHORT)
            wait_until(lambda: not any(is_running(int(pid.read_text())) for pid in pids), SHORT)
        finally:
            os.killpg(launcher.pid, signal.SIGKILL)  # it waits for a reader
    for rank in range(2):  # both knew the end
        records = json.loads((tmp_path / "records" / f"rank-{rank}.json").read_text())
        assert "expected an answer" in records["reason"]


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_monitor_without_threads_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import resource\n"
        "import pycollective as pc\n"
        "from pycollective.transport import watch\n"
        "from mpi4py import MPI\n"
        "start = watch.start_monitor\n"
        "def start_without_threads(monitoring):\n"
        "    if MPI.COMM_WORLD.rank == 1:\n"
        "        used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))\n"
        "    try:\n"
        "        start(monitoring)\n"
        "    finally:\n"
        "        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)\n"
        "watch.start_monitor = start_without_threads\n"
        "pc.init()\n"
    )
    done = mpirun(2, str(program), timeout=SHORT)
    assert done.returncode not in (0, 124, 137), done.stderr
    expected = (
        r"pycollective\.init: expected threads that watch this rank's waits, got .* \(rank 1 of 2\)\. Raise the "
        r"limits of this host \(ulimit -u, ulimit -v\)\."
    )
    assert re.search(expected, done.stderr), done.stderr


def test_a_rank_that_waits_in_a_call_which_another_rank_has_refused_is_reported(tmp_path: Path) -> None:
    """The root of a known gather is ahead: it compares with no post, and waits for data of a rank that sends none."""
    program = tmp_path / "program.py"
    program.write_text(
        "import time, jax, jax.numpy as jnp\n"
        "import pycollective as pc\n"
        "comm = pc.init(timeout=3)\n"
        "x = jnp.ones(2000)\n"
        "gather = pc.jit(lambda x: pc.gather(x, comm, root=0))\n"
        "bcast = pc.jit(lambda x: pc.broadcast(x, comm, root=0))\n"
        "for known in (gather, bcast) * 3:\n"
        "    jax.block_until_ready(known(x))\n"
        "if comm.rank == 0:\n"
        "    jax.block_until_ready(gather(x))\n"
        "time.sleep(1)\n"
        "try:\n"
        "    jax.block_until_ready(bcast(x))\n"
        "except (ValueError, jax.errors.JaxRuntimeError) as error:\n"
        "    print(error, flush=True)\n"
        "time.sleep(60)\n"
    )
    done = mpirun(2, str(program), timeout=SHORT)
    assert done.returncode not in (0, 124, 137), done.stderr
    assert "expected the same call on every rank, got bcast(float32[2000], root=0)" in done.stdout
    assert re.search(r"rank 0 has waited in collective \d+ of communicator world, gather\(float32\[2000\]", done.stderr)
    assert "Look at rank 1: the others wait for it." in done.stderr
