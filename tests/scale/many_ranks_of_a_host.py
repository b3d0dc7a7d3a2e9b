"""Calls of more ranks of one host than its board takes: results, the number of comparisons, a broadcast that differs.

    mpirun -n 34 python tests/scale/many_ranks_of_a_host.py

Rank 0 writes that all is right. Each rank checks its own results.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pycollective as pc
from pycollective.transport import native

world = pc.init()
rank, size = world.rank, world.size
x = np.arange(5, dtype=np.float32) + rank
every = np.arange(5, dtype=np.float32) + np.arange(size, dtype=np.float32)[:, None]


@pc.jit
def program(x: Any, flag: Any) -> Any:
    y = pc.psum(x) + pc.broadcast(x, root=size - 1)
    y = jax.lax.cond(flag, lambda y: y + pc.broadcast(x, root=1), lambda y: y, y)
    return y, pc.all_gather(x), pc.psum(jnp.tile(x, 5000))


@pc.jit
def one_of_two(x: Any, flag: Any) -> Any:
    return jax.lax.cond(flag, lambda x: pc.broadcast(x, root=0), lambda x: pc.broadcast(x, root=1), x)


# In the first run four calls; then two sections, and the call that depends on data.
for flag, wanted in ((False, 4), (True, 3), (False, 2), (True, 3)):
    before = native.comparisons()
    y, gathered, large = map(np.asarray, program(x, flag))
    assert native.comparisons() - before == wanted
    np.testing.assert_array_equal(y, every.sum(0) + every[-1] + flag * every[1])
    np.testing.assert_array_equal(gathered, every)
    np.testing.assert_array_equal(large, np.tile(every.sum(0), 5000))

for flag in (True, False):  # now both are known
    one_of_two(x, flag).block_until_ready()
odd = 7
with pytest.raises((RuntimeError, ValueError), match=f"CollectiveMismatch.* on rank {0 if rank == odd else odd} "):
    one_of_two(x, rank == odd).block_until_ready()
total = int(pc.psum(jnp.int32(1)))
if rank == 0:
    sys.stdout.write(f"all is right on {total} ranks\n")
