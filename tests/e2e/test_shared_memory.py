"""Ranks that cannot share memory, or not enough, or not read each other's arrays: the results are the same."""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path

import pytest

from tests import unoptimised
from tests.e2e.launch import mpirun
from tests.standin import compile_cpp

# What /proc says of the memory that ranks share: how much of it this process has touched.
PROGRAM = """
import os, re, sys
import jax, jax.numpy as jnp, numpy as np
from pathlib import Path

fault = sys.argv[1]
if fault == "no reading":  # before MPI begins, which reads so itself
    from tests.e2e.no_reading import forbid_reading
    forbid_reading()

from mpi4py import MPI
import pycollective as pc
from pycollective.transport import native_library

rank = MPI.COMM_WORLD.rank
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
calls = jax.jit(lambda x: [(pc.psum(x, part), pc.all_gather(x, part)) for part in parts])
for count in (3, 3000, 100_000, 1_000_000)[: 3 if fault == "many communicators" else 4]:
    x = np.arange(count, dtype=np.float32) + rank
    want = sum(np.arange(count, dtype=np.float32) + other for other in range(world.size))
    for total, gathered in calls(jnp.asarray(x)):
        np.testing.assert_array_equal(total, want)
        np.testing.assert_array_equal(gathered[-1], np.arange(count) + world.size - 1)
maps = Path("/proc/self/smaps").read_text()
shared = re.findall(r"memfd:pycollective-board.*\\n(?:.+\\n)*?Rss: +(\\d+) kB", maps)
sys.stdout.write(f"{sum(map(int, shared))} {native_library.library().pycollective_board_may_read()}\\n")
"""

FAULTS: dict[str, tuple[Container[int], bool]] = {
    "none": (range(1, 4 << 10), True),
    "no memory": ([0], False),
    "another user": ([0], False),
    "no reading": (range(1, 4 << 10), False),
    "buffers": (range(1, 4 << 10), False),
    "many communicators": (range(64 << 10, 74 << 10), True),
}
"""How many KiB of shared memory a rank has touched in the end, and whether ranks read each other's arrays. There are 64
MiB of buffers, and the board's slots."""


@pytest.mark.whole
@pytest.mark.library
@pytest.mark.parametrize("fault", FAULTS)
def test_what_ranks_cannot_share_goes_another_way(fault: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    tells = compile_cpp([Path(__file__).parent / "tells_tracers.cc"], tmp_path / "tells.so", "-shared")
    env = {"JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": unoptimised.flags(), "LD_PRELOAD": str(tells)}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    if fault == "buffers":
        env["PYCOLLECTIVE_SHARED_MEMORY"] = "buffers"
    done = mpirun(2, str(program), fault, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    ranks = [line.split() for line in done.stdout.splitlines()]
    assert len(ranks) == 2
    for touched, reads in ranks:
        assert int(touched) in FAULTS[fault][0], done.stdout
        assert reads == str(FAULTS[fault][1])
    # Ranks let others read their memory as long as they read each other's.
    lets = dict(re.findall(r"process (\d+) lets (-?\d+) read", done.stderr))
    if fault == "no reading":
        assert list(lets.values()) == ["0", "0"], done.stderr
    elif FAULTS[fault][1]:
        assert list(lets.values()) == ["-1", "-1"], done.stderr
