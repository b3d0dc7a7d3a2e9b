"""Children of ranks: workers of data loaders, forked processes, programs that a rank starts.

test_pages.py runs the program of the guide, which has workers of spawn in a Pool.
"""

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
import subprocess
import sys

import numpy as np

import jax.numpy as jnp
import pycollective as pc

guarded = sys.argv[1] == "guarded"
sys.stdout.write(f"process {os.getpid()}\\n")
sys.stdout.flush()
if not guarded:
    comm = pc.init()


def load(i):
    return np.full(3, i)


def told(command):
    try:
        sys.stdout.write(f"got {command()}\\n")
    except RuntimeError as error:
        sys.stdout.write(f"refused {error}\\n")


def main():
    comm = pc.init()
    if not guarded:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.map(load, range(4))
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        sys.stdout.write(f"sum {pc.psum(jnp.int32(np.sum(list(pool.map(load, range(4))))), comm)}\\n")
        told(lambda: list(pool.map(pc.psum, range(4))))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        sys.stdout.write(f"sum {pc.psum(jnp.int32(np.sum(pool.map(load, range(4)))), comm)}\\n")
        told(lambda: pool.map(pc.psum, range(4)))
    if comm.rank == 1:
        command = [sys.executable, "-c", "import pycollective as pc; pc.init()"]
        done = subprocess.run(command, capture_output=True, text=True)
        sys.stdout.write(f"child {done.returncode}: {done.stderr}\\n")
    sys.stdout.write(f"end {pc.psum(1, comm)}\\n")


if __name__ == "__main__":
    main()
"""
SENTENCE = "a child of rank {} of {}. Leave collectives to the rank, and put what starts them under 'if __name__"


@pytest.fixture
def loader(tmp_path: Path) -> str:
    path = tmp_path / "loader.py"
    path.write_text(LOADER)
    return str(path)


def test_children_of_a_guarded_program(loader: str) -> None:
    """Workers load data, and are refused a collective; so is a program that a rank starts."""
    done = mpirun(2, loader, "guarded", timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 36") == 4  # of two kinds of workers
    assert done.stdout.count("end 2") == 2
    assert not re.search("^got", done.stdout, re.MULTILINE)
    for rank in range(2):  # of two workers, and of a program
        assert done.stdout.count(SENTENCE.format(rank, 2)) == 2 + rank, done.stdout
    assert done.stdout.count("child 1") == 1
    wait_until_gone(loader)


@pytest.mark.whole
def test_workers_that_would_start_mpi_end_the_job(loader: str) -> None:
    # multiprocessing.Pool starts another worker for one that ends, for ever.
    done = mpirun(2, loader, "unguarded", timeout=60)
    assert done.returncode not in (0, 124, 137)
    assert "pycollective.init: expected a rank, got process " in done.stderr
    assert any(SENTENCE.format(rank, 2) in done.stderr for rank in range(2)), done.stderr
    assert 3 <= done.stdout.count("process ") <= 8  # each rank has a worker, and perhaps its successors
    wait_until_gone(loader)


# A main module that imports MPI outside of the guard, as most do, before this package or after it.
POOL = """
{imports}
import multiprocessing
{uses}

def load(i):
    return i


if __name__ == "__main__":
    comm = pc.init()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(f"sum {{sum(pool.map(load, range(4)))}} on {{comm.rank}}")
    pc.barrier()
"""
IMPORTS = ["import pycollective as pc", "from mpi4py import MPI"]


@pytest.mark.library
@pytest.mark.parametrize("imports", [IMPORTS, IMPORTS[::-1]], ids=["ours first", "MPI first"])
def test_a_worker_does_not_start_mpi(imports: list[str], tmp_path: Path) -> None:
    program = tmp_path / "pool.py"
    program.write_text(POOL.format(imports="\n".join(imports), uses=""))
    done = mpirun(2, str(program), timeout=60)
    assert done.returncode == 0, done.stderr[:2000]
    assert sorted(done.stdout.splitlines()) == ["sum 6 on 0", "sum 6 on 1"]
    assert not done.stderr, done.stderr[:2000]


@pytest.mark.library
def test_a_worker_that_uses_mpi_ends_the_job(tmp_path: Path) -> None:
    # MPI would end the worker, and the pool starts the next one, for ever.
    program = tmp_path / "pool.py"
    program.write_text(POOL.format(imports="\n".join(IMPORTS), uses="rank = MPI.COMM_WORLD.rank"))
    done = mpirun(2, str(program), timeout=60)
    assert done.returncode not in (0, 124, 137)
    assert "pycollective.mpi4py.MPI.Comm.rank: expected a rank, got process " in done.stderr
    assert any(SENTENCE.format(rank, 2) in done.stderr for rank in range(2)), done.stderr
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
for command in [sys.executable], [sys.executable, sys.argv[1]]:
    command += ["-c", "import pycollective as pc; print(pc.init())"]
    done = subprocess.run(command, capture_output=True, text=True)
    sys.stdout.write(f"child {done.returncode}: {done.stdout} {done.stderr}")
"""


@pytest.mark.whole
def test_a_program_of_one_process_starts_others_and_jobs(tmp_path: Path) -> None:
    program = tmp_path / "starts.py"
    program.write_text(STARTS)
    job = "import sys; from tests.e2e.launch import mpirun; done = mpirun(2, *sys.argv[1:], timeout=60); "
    launcher = tmp_path / "launcher.py"
    launcher.write_text(job + "print(done.stdout, done.stderr); sys.exit(done.returncode)\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(program), str(launcher)], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.stdout.count("child 0") == 2, done.stdout + done.stderr
    assert "Communicator(world, rank 0 of 1)" in done.stdout
    assert all(f"Communicator(world, rank {rank} of 2)" in done.stdout for rank in range(2)), done.stdout
