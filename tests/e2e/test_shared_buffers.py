"""Page-locked buffers of accelerators, on stand-ins for GPUs: ranks of a host read each other's where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import unoptimised
from tests.e2e.launch import mpirun

_PIECE = 1 << 20
"""Large enough for an allreduce whose ranks read each other's arrays."""
_DEVICES = 2

# It prints how much of the buffers of all ranks it has mapped and touched, in KiB, before and after the calls.
PROGRAM = """
import os, re, sys
from pathlib import Path
import jax, numpy as np
from mpi4py import MPI
from tests.e2e.no_reading import forbid_reading

fault = sys.argv[1]
forbid_reading()
fallocates = os.posix_fallocate


def has_no_room(*arguments):
    raise OSError(28, "No space left on device")


if fault == "no room" and MPI.COMM_WORLD.rank == 1:
    os.posix_fallocate = has_no_room
import pycollective as pc


def touched():
    maps = Path("/proc/self/smaps").read_text()
    return sum(map(int, re.findall(r"memfd:pycollective-arrays.*\\n(?:.+\\n)*?Rss: +(\\d+) kB", maps)))


world = pc.init(devices=1)
before = touched()
size, rank = world.size, world.rank
device = jax.devices()[rank % 2]  # of init on some ranks, and another one on others
ring = [(source, (source + 1) % size) for source in range(size)]
calls = jax.jit(lambda x, blocks: (
    pc.psum(x, world), pc.all_gather(x, world), pc.all_to_all(blocks, world, 0, 0), pc.psum_scatter(blocks, world),
    pc.broadcast(x, world, root=1), pc.gather(x, world, root=1), pc.scatter(blocks, world, root=1),
    pc.ppermute(x, world, ring), pc.scan(x, world), pc.pmax(x, world),
))
for salt in range(3):
    xs = np.stack([(np.arange(size * 150_000) * (r + 3) + salt) % 1009 for r in range(size)]).astype(np.float32)
    blocks = xs.reshape(size, size, -1)
    got = calls(jax.device_put(xs[rank], device), jax.device_put(blocks[rank], device))
    want = (
        xs.sum(0), xs, blocks[:, rank], blocks.sum(0)[rank], xs[1], xs if rank == 1 else 0 * xs, blocks[1, rank],
        xs[rank - 1], xs[: rank + 1].sum(0), xs.max(0),
    )
    for y, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(y, expected)
sys.stdout.write(f"{before} {touched()}\\n")
"""


_ON_4_RANKS = pytest.param("none", 4, marks=pytest.mark.whole)


@pytest.mark.parametrize(("fault", "ranks"), [("none", 2), _ON_4_RANKS, ("no room", 2)])
def test_ranks_read_each_others_buffers(fault: str, ranks: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {"JAX_NUM_CPU_DEVICES": str(_DEVICES), "PYCOLLECTIVE_STAGE_BYTES": str(_PIECE)}
    env |= {"XLA_FLAGS": unoptimised.flags(), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = mpirun(ranks, "-m", "tests.standin", "staged", str(program), fault, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    told = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    own = _DEVICES * 6 * _PIECE >> 10
    # The kernel copies nothing, and what goes through other shared memory touches no buffer of another rank.
    for before, after in told:
        assert before == (own if fault == "none" else 0), told
        assert after == 0 if fault != "none" else own + (ranks - 1) * (_PIECE >> 10) <= after, told
    assert len(told) == ranks
    warning = "of memory that the ranks of this host share, for page-locked buffers, got No space left on device"
    assert done.stderr.count(warning) == (ranks if fault == "no room" else 0), done.stderr
