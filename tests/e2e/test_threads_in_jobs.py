"""The number of threads with which XLA computes."""

from __future__ import annotations

import pytest

from tests.e2e.launch import mpirun

pytestmark = pytest.mark.whole

PROGRAM = """
import os
import jax.numpy as jnp
import pycollective as pc

comm = pc.init()
jnp.dot(jnp.ones((256, 256)), jnp.ones((256, 256))).block_until_ready()
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
threads = comm.mpi.allgather(names.count("tf_XLAEigen"))
cores = set().union(*comm.mpi.allgather(os.sched_getaffinity(0)))
if comm.rank == 0:
    print(len(cores), os.environ.get("NPROC"), *threads)
"""


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other numbers of ranks and cores, and the user's own NPROC, are in tests/unit/test_threads_in_jobs.py.
    monkeypatch.delenv("NPROC", raising=False)
    done = mpirun(2, "-c", PROGRAM, timeout=60, env={"JAX_NUM_CPU_DEVICES": "1"})
    assert done.returncode == 0, done.stderr
    cores, variable, *threads = done.stdout.split()
    assert len(threads) == 2
    assert variable == "None"  # programs that this one starts must not inherit it
    assert set(threads) == {str(max(1, int(cores) // 2))}


def test_programs_for_mpi4jax_are_not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """They use JAX's devices before their first call."""
    monkeypatch.delenv("NPROC", raising=False)
    program = """
import jax.numpy as jnp
from mpi4py import MPI
import pycollective.compat.mpi4jax as mpi4jax

print(mpi4jax.allreduce(jnp.ones(3), op=MPI.SUM))
"""
    done = mpirun(2, "-c", program, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("[2. 2. 2.]") == 2


def test_devices_that_are_there_before_init_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    early = "import jax\njax.devices()\n" + PROGRAM
    done = mpirun(2, "-c", early, timeout=60, env={"JAX_NUM_CPU_DEVICES": "1"})
    assert done.returncode == 0, done.stderr
    cores = int(done.stdout.split()[0])
    warned = "Call pycollective.init before JAX computes" in done.stderr
    assert warned == (cores > 1)
    assert done.stderr.count("RuntimeWarning") == int(warned)  # one rank warns
