"""Ranks of one host that cannot share memory, or not enough: MPI carries the arrays, and the results are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import unoptimised
from tests.e2e.launch import mpirun

# What /proc says of the memory that ranks share: how much of it this process has touched.
PROGRAM = """
import os, re, sys
import jax.numpy as jnp, numpy as np
from mpi4py import MPI
from pathlib import Path
import pycollective as pc

fault, rank = sys.argv[1], MPI.COMM_WORLD.rank
opens = os.open


def makes_no_file(name):
    raise OSError(28, "No space left on device")


def opens_no_file_of_others(path, *args, **options):
    if str(path).startswith("/proc/"):
        raise PermissionError(13, "Permission denied", path)
    return opens(path, *args, **options)


if fault == "no memory" and rank == 0:
    os.memfd_create = makes_no_file
elif fault == "another user" and rank == 1:
    os.open = opens_no_file_of_others
world = pc.init()
parts = [world] + [world.split(0) for _ in range(200 if fault == "many communicators" else 0)]
for part in parts:
    for count in (3, 3000, 100_000):
        x = np.arange(count, dtype=np.float32) + rank
        total = sum(np.arange(count, dtype=np.float32) + other for other in range(world.size))
        np.testing.assert_array_equal(pc.psum(jnp.asarray(x), part), total)
        gathered = pc.all_gather(jnp.asarray(x[:5]), part)
        np.testing.assert_array_equal(gathered[-1], np.arange(min(count, 5)) + world.size - 1)
maps = Path("/proc/self/smaps").read_text()
shared = re.findall(r"memfd:pycollective-board.*\\n(?:.+\\n)*?Rss: +(\\d+) kB", maps)
sys.stdout.write(f"{sum(map(int, shared))}\\n")
"""

FAULTS = {
    "none": range(1, 4 << 10),
    "no memory": [0],
    "another user": [0],
    "many communicators": range(64 << 10, 74 << 10),
}
"""How many KiB of shared memory a rank has touched in the end. There are 64 MiB of buffers, and the board's slots."""


@pytest.mark.whole
@pytest.mark.library
@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_shared_goes_by_mpi(fault: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {"JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": unoptimised.flags()}
    done = mpirun(2, str(program), fault, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    touched = [int(line) for line in done.stdout.split()]
    assert len(touched) == 2
    assert all(kib in FAULTS[fault] for kib in touched), touched
