"""The memory that a long run needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import mpirun

pytestmark = pytest.mark.whole
CALLS = 25_000

# The loop makes only the calls: other requests would let the allocator merge free memory.
SMALL = f"""
import jax.numpy as jnp
from jax import lax

import pycollective as pc


def resident_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


total = pc.jit(lambda x: lax.psum(x, "ranks"), axis_name="ranks")
x = jnp.ones(1)
for _ in range(100):
    total(x).block_until_ready()
before = resident_mib()
for _ in range({CALLS}):
    total(x).block_until_ready()
print(resident_mib() - before)
"""

# A thread that has allocated memory before init keeps its own arena, which glibc may give to XLA's threads as well. An
# arena consists of heaps of 64 MiB, so the second array needs a second heap.
LARGE = """
import resource
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import pycollective as pc


def faults_of_5():
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(5):
        first = np.ones(10 << 20, np.float32)
        second = np.ones(10 << 20, np.float32)
        del first, second
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


with ThreadPoolExecutor(1) as pool:
    pool.submit(faults_of_5).result()
    pc.init()
    pool.submit(faults_of_5).result()
    print(pool.submit(faults_of_5).result())
"""


def printed(program: str, **env: str) -> float:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_calls_of_small_programs_take_no_more_memory() -> None:
    assert printed(SMALL) < 20  # MiB; it was 47 once, and went on growing


def test_large_arrays_do_not_fault_in_again() -> None:
    assert printed(LARGE) < 500  # page faults in 5 rounds; it was 500 in each round


def test_malloc_is_left_alone_where_that_is_asked_for() -> None:
    # glibc gives arrays of this size back at once. With huge pages, which NumPy asks for, there would be few faults.
    assert printed(LARGE, PYCOLLECTIVE_MALLOC="off", NUMPY_MADVISE_HUGEPAGE="0") > 5 * 500


# As one of 2000 ranks of a host, which together may keep a quarter of its memory: each may keep little.
FREED = """
import numpy as np

from pycollective.transport import native


def resident_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


native.start(2000)
before = resident_mib()
arrays = [np.ones(1 << 20, np.uint8) for _ in range(600)]
assert resident_mib() - before > 550
del arrays
print(resident_mib() - before)
"""


def test_freed_memory_goes_back() -> None:
    assert printed(FREED) < 300  # MiB; it was 600


# What grows is told after a fifth of the rounds, when all caches are full, and at the end.
ROUNDS = """
import gc
import json
import os
import sys

import jax
import jax.numpy as jnp
from mpi4py import MPI

import pycollective as pc

world = pc.init()
x = jnp.ones(8)


def status():
    gc.collect()
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {
        "MiB": int(fields["VmRSS"].split()[0]) / 1024,
        "threads": int(fields["Threads"]),
        "files": len(os.listdir("/proc/self/fd")),
    }


def split(i):  # on each the board, a channel of its own, a program
    part = world.split(0, key=world.rank * (-1) ** i)
    pc.psum(x, part).block_until_ready()
    pc.psum(x, part, axis_index_groups=[[0], [1]]).block_until_ready()
    part.free()


def compilation(i):
    jax.jit(lambda x: pc.psum(x * i, world))(x).block_until_ready()
    jax.clear_caches()


done, rounds = {"split": split, "compilation": compilation}[sys.argv[1]], int(sys.argv[2])
for i in range(rounds // 5):
    done(i)
before = status()
for i in range(rounds):
    done(i)
after = status()
grown = {name: after[name] - before[name] for name in before}
every = MPI.COMM_WORLD.gather(grown)
if world.rank == 0:
    print(json.dumps(every))
"""

ROUNDS_EACH = 50


@pytest.mark.parametrize("of", ["split", "compilation"])
def test_rounds_take_no_more_of_anything(of: str, tmp_path: Path) -> None:
    """Each split leaves a few kilobytes: its name, for records. It left 1.4 MiB once: the programs that named it."""
    program = tmp_path / "program.py"
    program.write_text(ROUNDS)
    done = mpirun(2, str(program), of, str(ROUNDS_EACH), timeout=600)
    assert done.returncode == 0, done.stderr
    for grown in json.loads(done.stdout):
        assert (grown["threads"], grown["files"]) == (0, 0)
        assert grown["MiB"] < 10, grown
