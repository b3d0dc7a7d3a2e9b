"""What a long run costs in memory."""

from __future__ import annotations

import subprocess
import sys

CALLS = 100_000

# The loop makes nothing but the calls: other requests would let the allocator merge what is free.
PROGRAM = f"""
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


def test_calls_of_small_programs_take_no_more_memory() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 40  # it was 200, and went on
