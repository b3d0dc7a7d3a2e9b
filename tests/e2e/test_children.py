"""Children of ranks: workers of data loaders, forked processes, programs that a rank starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import mpirun, wait_until_gone

LOADER = """
import concurrent.futures
import multiprocessing
import os
import sys

import numpy as np

import jax.numpy as jnp
import pycollective as pc

mistake, *ways = sys.argv[1:]
sys.stdout.write(f"process {os.getpid()}\\n")
sys.stdout.flush()
if mistake == "unguarded":
    comm = pc.init()


def load(i):
    return np.full(3, pc.psum(i) if mistake == "collective" else i)


def main():
    comm = pc.init()
    for way in ways:
        start, kind = way.split("-")
        context = multiprocessing.get_context(start)
        if kind == "Pool":
            with context.Pool(2) as pool:
                loaded = pool.map(load, range(4))
        else:
            with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
                loaded = list(pool.map(load, range(4)))
        sys.stdout.write(f"sum {pc.psum(jnp.int32(np.sum(loaded)), comm)}\\n")


if __name__ == "__main__":
    main()
"""
SENTENCE = "a child of rank {} of {}. Leave collectives to the rank, and put what starts them under 'if __name__"


@pytest.fixture
def loader(tmp_path: Path) -> str:
    path = tmp_path / "loader.py"
    path.write_text(LOADER)
    return str(path)


def test_workers_of_a_guarded_program(loader: str) -> None:
    ways = [f"{start}-{kind}" for start in ("spawn", "fork") for kind in ("Pool", "ProcessPoolExecutor")]
    done = mpirun(2, loader, "none", *ways, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 36") == 2 * len(ways)
    wait_until_gone(loader)


@pytest.mark.whole
@pytest.mark.parametrize(("ranks", "way"), [(1, "spawn-Pool"), (2, "spawn-ProcessPoolExecutor")])
def test_workers_that_would_start_mpi_end_the_job(ranks: int, way: str, loader: str) -> None:
    done = mpirun(ranks, loader, "unguarded", way, timeout=60)
    assert done.returncode not in (0, 124, 137)
    assert "pycollective.init: expected a rank, got process " in done.stderr
    assert any(SENTENCE.format(rank, ranks) in done.stderr for rank in range(ranks)), done.stderr
    assert 2 <= done.stdout.count("process ") <= 5 * ranks  # each rank has two workers, and perhaps their successors
    wait_until_gone(loader)


@pytest.mark.whole
@pytest.mark.parametrize("start", ["spawn", "fork", "forkserver"])
def test_workers_that_call_a_collective(start: str, loader: str) -> None:
    done = mpirun(2, loader, "collective", f"{start}-Pool", timeout=60)
    assert done.returncode not in (0, 124, 137)
    assert any(SENTENCE.format(rank, 2) in done.stderr for rank in range(2)), done.stderr
    wait_until_gone(loader)


@pytest.mark.whole
def test_workers_of_a_program_without_a_launcher(loader: str) -> None:
    done = subprocess.run(
        [sys.executable, loader, "unguarded", "spawn-Pool"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert SENTENCE.format(0, 1) in done.stderr
    wait_until_gone(loader)


@pytest.mark.whole
def test_the_program_of_the_guide(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "get_context" in code)
    program = tmp_path / "loads.py"
    program.write_text(code)
    done = mpirun(2, str(program), timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    wait_until_gone(str(program))


FORKS = """
import os
import sys

import jax.numpy as jnp
import pycollective as pc

comm = pc.init()
pc.barrier()
for does in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        exec(does)
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.stdout.write(f"{does}: {status}, sum {pc.psum(jnp.int32(1))}\\n")
    sys.stdout.flush()  # else the next child writes it too
"""

CHILDREN = {
    "pass": 0,
    "sys.exit(7)": 7,
    "raise ValueError('no luck')": 1,
    "import threading; threading.Thread(target=lambda: 1 / 0).start()": 0,
    "pc.psum(1)": 1,
    "pc.psum(1, comm)": 1,
    "pc.init()": 1,
    "pc.world()": 1,
}


def test_a_forked_child_ends_alone(tmp_path: Path) -> None:
    program = tmp_path / "forks.py"
    program.write_text(FORKS)
    done = mpirun(2, str(program), *CHILDREN, timeout=60)
    assert done.returncode == 0, done.stderr
    for does, status in CHILDREN.items():
        assert done.stdout.count(f"{does}: {status}, sum 2\n") == 2, done.stdout
    assert "ending all ranks" not in done.stderr
    refused = sum("pc." in does for does in CHILDREN)
    assert all(done.stderr.count(SENTENCE.format(rank, 2)) == refused for rank in range(2)), done.stderr
    wait_until_gone(str(program))


STARTS = """
import os
import subprocess
import sys

import pycollective as pc

comm = pc.init()
command = [*sys.argv[1:], "-c", "import pycollective as pc; print(pc.init())"]
done = subprocess.run(command, capture_output=True, text=True)
sys.stdout.write(f"child {done.returncode}: {done.stdout} {done.stderr}")
"""


@pytest.mark.whole
def test_a_program_that_a_rank_starts_is_no_rank(tmp_path: Path) -> None:
    program = tmp_path / "starts.py"
    program.write_text(STARTS)
    done = mpirun(2, str(program), sys.executable, timeout=60)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert SENTENCE.format(rank, 2) in done.stdout
    assert done.stdout.count("child 1") == 2


@pytest.mark.whole
def test_a_program_of_one_process_starts_others_and_jobs(tmp_path: Path) -> None:
    program = tmp_path / "starts.py"
    program.write_text(STARTS)
    job = "import sys; from tests.e2e.launch import mpirun; done = mpirun(2, *sys.argv[1:], timeout=60); "
    launcher = tmp_path / "launcher.py"
    launcher.write_text(job + "print(done.stdout, done.stderr); sys.exit(done.returncode)\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    alone = subprocess.run(
        [sys.executable, str(program), sys.executable], capture_output=True, text=True, timeout=60, env=env
    )
    assert "child 0: Communicator(world, rank 0 of 1)" in alone.stdout, alone.stdout + alone.stderr
    both = subprocess.run(
        [sys.executable, str(program), sys.executable, str(launcher)],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
    )
    assert "child 0" in both.stdout, both.stdout + both.stderr
    assert all(f"Communicator(world, rank {rank} of 2)" in both.stdout for rank in range(2)), both.stdout
