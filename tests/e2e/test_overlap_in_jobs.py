"""Calls that run beside computation, forced by the setting: the program goes on, and the results and errors stay."""

from __future__ import annotations

import pytest

from tests.e2e.launch import mpirun

pytestmark = pytest.mark.whole

BEGIN = """
import dataclasses, os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX makes its threads: one core, one thread
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import pycollective as pc

world = pc.init()
mpi = world.mpi
"""

# Rank 1 begins its sum when rank 0 has computed what stands beside the sum in its program.
GOES_ON = (
    BEGIN
    + """
def tell(x):
    mpi.send("computed", 1)
    return x


@pc.jit(axis_name="i")
def f(large, x):
    total = lax.psum(large, "i")
    if world.rank == 0:
        for _ in range(12):  # XLA runs short programs one operation after another
            x = jnp.tanh(x @ x)
        x = jax.pure_callback(tell, x, x)
    return total, x


arrays = jnp.full(1 << 18, 1.0 + world.rank), jnp.ones((200, 200))
for call in range(3):
    if call == 0:  # the ranks compare the program before it runs
        out = f(*arrays)
        heard = world.rank == 0 or mpi.recv(source=0)
    else:
        heard = world.rank == 0 or mpi.recv(source=0)
        out = f(*arrays)
    np.testing.assert_array_equal(out[0], 3.0)
print("done")
"""
)


def test_the_program_goes_on_while_a_sum_travels() -> None:
    env = {"PYCOLLECTIVE_OVERLAP": "on", "PYCOLLECTIVE_TIMEOUT": "20", "JAX_NUM_CPU_DEVICES": "1"}
    done = mpirun(2, "-c", GOES_ON, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done", "done"]


# XLA sets how its threads round, and that they take denormal numbers for zero. It goes on in a thread of the package.
MODES = (
    BEGIN
    + """
tiny = jnp.full(4096, 1e-20)
scale = lambda x: jnp.tanh(x * jnp.float32(1e-20)) * jnp.float32(1e20) + x
alone = jax.jit(scale)(2 * tiny)
out = pc.jit(lambda x: scale(lax.psum(x, "i")), axis_name="i")(tiny)
np.testing.assert_array_equal(np.asarray(out).view(np.uint32), np.asarray(alone).view(np.uint32))
print("done")
"""
)


def test_xla_computes_with_the_same_modes_afterwards() -> None:
    done = mpirun(2, "-c", MODES, timeout=100, env={"PYCOLLECTIVE_OVERLAP": "on", "JAX_NUM_CPU_DEVICES": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done", "done"]


# MPI's blocking and nonblocking collectives do not match, so ranks must not mix them: here they would, since one rank
# has another setting than at init.
MIXED = (
    BEGIN
    + """
from pycollective.transport import handlers
handlers.config = dataclasses.replace(handlers.config, overlap="on" if world.rank else "off")
for more in (0, 1):  # elements on the second rank
    try:
        pc.psum(jnp.ones(1000 + more * world.rank), world).block_until_ready()
    except Exception as error:
        assert "CollectiveMismatch: expected the same call on every rank" in str(error), error
        # Shapes that differ are the mistake, though one of them may be too small to travel beside computation.
        assert ("host memory, beside computation)" in str(error)) == (not more), error
        assert ("with the same shapes" if more else "with the same settings") in str(error), error
        print("refused")
"""
)


@pytest.mark.parametrize("shared", ["on", "off"])  # where the ranks share no memory, they compare by a collective
def test_ranks_that_make_a_call_in_two_ways_are_refused(shared: str) -> None:
    env = {"PYCOLLECTIVE_SHARED_MEMORY": shared, "PYCOLLECTIVE_TIMEOUT": "20", "JAX_NUM_CPU_DEVICES": "1"}
    done = mpirun(2, "-c", MIXED, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused"] * 4
