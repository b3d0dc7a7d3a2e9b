"""A call that comes too early or too late, and a lack of memory, are an error on every rank, and never a hang."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.launch import mpirun, wait_until_gone
from tests.standin import compile_cpp

SHORT = 120  # seconds: none of these should take a tenth of it

HEAD = """
import sys
import jax, jax.numpy as jnp
import pycollective as pc
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank


def told(function):
    try:
        text = str(function())
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    sys.stdout.write(" ".join(text.split()) + "\\n")
"""


def run(tmp_path: Path, text: str, **env: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(HEAD + text)
    done = mpirun(2, str(program), timeout=SHORT, env={"JAX_NUM_CPU_DEVICES": "2", **env})
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_what_comes_before_all_have_started(tmp_path: Path) -> None:
    # One rank alone may import a module with decorated functions. But by a communicator of some ranks the package would
    # start among these ranks only.
    text = """
def decorate():
    total = pc.jit(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    mapped = pc.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    plain = pc.jit(lambda x: pc.psum(x))
    return total, mapped, plain


if rank == 0:
    total, mapped, plain = decorate()
MPI.COMM_WORLD.barrier()
if rank == 1:
    total, mapped, plain = decorate()
alone = MPI.COMM_WORLD.Split(rank)
told(lambda: pc.Communicator(alone))
told(lambda: (float(total(1.0)), mapped(jnp.ones(2)).tolist(), float(plain(1.0))))
told(lambda: pc.psum(1, pc.Communicator(alone)))
"""
    lines = run(tmp_path, text).stdout.splitlines()
    refusal = (
        r"RuntimeError: pycollective\.Communicator: expected a package that has started, which all ranks do together, "
        r"got a communicator of 1 ranks before that \(rank \d of 2\)\. Call pycollective\.init\(\) on all ranks first"
    )
    assert sum(bool(re.match(refusal, line)) for line in lines) == 2
    assert sorted(line for line in lines if "Error" not in line) == ["(2.0, [4.0, 4.0], 2.0)"] * 2 + ["1"] * 2


@pytest.mark.whole
def test_a_communicator_of_all_starts_the_package_and_no_memory(tmp_path: Path) -> None:
    # Without shared memory the arrays of a sum are packed into one, of 64 or 128 MiB, for which new[] throws in the
    # middle of the call. This is tested on several devices as well, where one of them makes the call for all, and where
    # one is told that another has failed.
    text = """
import ctypes

blocks = ctypes.CDLL(None)


def without_memory(function, xs):
    compiled = function.lower(*xs).compile()
    blocks.allow_blocks_of(ctypes.c_size_t(32 << 20))
    try:
        return jax.block_until_ready(compiled(*xs))
    finally:
        blocks.allow_blocks_of(ctypes.c_size_t(-1))


comm = pc.Communicator(MPI.COMM_WORLD.Dup())
told(lambda: pc.psum(jnp.ones(1), comm))
several = jax.sharding.NamedSharding(jax.make_mesh((2,), ("d",)), jax.sharding.PartitionSpec("d"))
refused = pc.jit(lambda x, y: pc.psum((x, y)))
arrays = [jnp.ones((2, 8 << 20)), jnp.ones((2, 8 << 20))]
told(lambda: without_memory(refused, arrays))
arrays = jax.device_put(arrays, several)
told(lambda: without_memory(refused, arrays))
each = pc.pmap(lambda x, y: jax.lax.psum((x, y), "i"), "i")
told(lambda: without_memory(each, arrays))
told(lambda: pc.psum(1))
"""
    environ = {
        "PYCOLLECTIVE_SHARED_MEMORY": "off",
        "PYCOLLECTIVE_BUCKET_BYTES": str(1 << 50),
        "PYCOLLECTIVE_MALLOC": "off",  # it would keep memory for the call
        "LD_PRELOAD": str(compile_cpp([Path(__file__).parent / "lack_of_memory.cc"], tmp_path / "lack.so", "-shared")),
    }
    lines = run(tmp_path, text, **environ).stdout.splitlines()
    thrown = (
        r"pycollective\.allreduce: expected memory for the call, got the exception std::bad_alloc\. Use smaller arrays"
    )
    assert sum(bool(re.search(thrown, line)) for line in lines) == 6, lines
    assert lines.count("[2.]") == 2
    assert lines.count("2") == 2


# What rank 1 does before it would start MPI, what the others do, and what is said of rank 1.
NEVER_COME = {
    "it ends": ("sys.exit(0)", "pc.init(timeout=2)", "rank 1 has no process: it has ended"),
    "it is at work": (
        "time.sleep(50)",
        "from mpi4py import MPI",
        r"rank 1 has a process \(\d+\) that does not start MPI by this package",
    ),
}


@pytest.mark.library
@pytest.mark.parametrize("what", NEVER_COME)
def test_a_rank_that_never_starts_mpi(what: str, tmp_path: Path) -> None:
    """A rank that waits says so, at half of the limit and at its end."""
    does, others, told = NEVER_COME[what]
    program = tmp_path / "program.py"
    program.write_text(f"""
import os, sys, time
if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    {does}
import pycollective as pc
{others}
""")
    done = mpirun(3, str(program), timeout=60, env={"PYCOLLECTIVE_TIMEOUT": "2"})
    assert done.returncode not in (0, 124, 137), done.stderr
    wait = rf"On this host \(\S+\) .*{told}.*"
    # Rank 0, the lowest, unless a busy machine has let it come late.
    waits = rf"pycollective: rank [02] of 3 has waited \S+ s for all ranks to start MPI\. {wait} All ranks end after"
    assert re.search(waits, done.stderr), done.stderr
    ended = (
        r"pycollective\.init: expected all ranks to start MPI within 2 s, got a wait of \S+ s \(rank [02] of 3\)\. "
        rf"{wait} Look for a rank that raised or exited before it imported mpi4py or called init; ending all ranks\."
    )
    assert re.search(ended, done.stderr), done.stderr
    wait_until_gone(str(program))


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    """Without a limit as well: MPI cannot start any more."""
    program = tmp_path / "program.py"
    program.write_text("""
import os
if os.environ["PMI_RANK"] == "1":
    raise SystemExit(3)
import pycollective as pc
pc.init()
""")
    done = mpirun(2, str(program), timeout=60, env={"PYCOLLECTIVE_TIMEOUT": "off"})
    assert done.returncode == 3, done.stderr
    assert "expected all ranks to start MPI, got a wait of " in done.stderr
    assert "rank 1 has no process: it has ended. Look for" in done.stderr
