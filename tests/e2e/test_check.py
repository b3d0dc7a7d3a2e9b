"""``PYCOLLECTIVE_CHECK``: when ranks compare their calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.launch import mpirun

PROGRAM = """
import sys
import jax.numpy as jnp
from jax import lax
import pycollective as pc

world = pc.init()
x = jnp.ones(1)


def of_rank(first, second):
    return first if world.rank == 0 else second


def known(comm):
    for f in (pc.psum, pc.pmax):  # from now on every rank knows both calls
        f(x, comm).block_until_ready()
    return of_rank(pc.psum, pc.pmax)(x, comm)


def new(comm):
    return of_rank(pc.psum, pc.pmax)(x, comm)


def alike(comm):
    return [pc.psum(k * x, comm) for k in of_rank((1, 4), (4, 1))][0]


def named(comm):
    f = pc.jit(lambda x: of_rank(lax.psum, lax.pmax)(x, "i"), axis_name="i", comm=comm)
    return f(x)


for case in (known, new, alike, named):
    comm = world.split(0)  # an error in one case does not reach the next
    try:
        said = f"got {case(comm)[0]:g}"
    except Exception as error:
        said = "caught " + " ".join(str(error).split())
    sys.stdout.write(f"{case.__name__}: {said}\\n")
"""

COMPARED = r"caught .*pycollective.allreduce: CollectiveMismatch: expected the same call on every rank, got allreduce.*"
AT_ITS_FIRST_CALL = r"caught pycollective.jit: expected the same program on every rank, here with p.*"


@pytest.mark.parametrize(
    ("check", "known", "new", "named"),
    [
        pytest.param("always", COMPARED, COMPARED, AT_ITS_FIRST_CALL, marks=pytest.mark.whole),
        ("", COMPARED, COMPARED, AT_ITS_FIRST_CALL),
        # As the documentation says, the numbers are wrong where a known call is not compared.
        ("first", "got .*", COMPARED, AT_ITS_FIRST_CALL),
        pytest.param("never", "got .*", "got .*", "got .*", marks=pytest.mark.whole),
    ],
    ids=["always", "default", "first", "never"],
)
def test_what_is_compared(check: str, known: str, new: str, named: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = mpirun(2, str(program), timeout=60, env={"PYCOLLECTIVE_CHECK": check})
    assert done.returncode == 0, done.stderr
    # Calls outside jit that look alike are not told apart, as the documentation says: they carry no line.
    for case, outcome in {"known": known, "new": new, "named": named, "alike": "got 5"}.items():
        lines = re.findall(rf"^{case}: (.*)$", done.stdout, re.MULTILINE)
        assert len(lines) == 2
        assert all(re.fullmatch(outcome, line) for line in lines), lines
        if outcome == COMPARED:
            for rank in range(2):
                assert any(f"on rank {1 - rank} (rank {rank} of 2, communicator world/0)" in line for line in lines)


def stderr_of_failure(tmp_path: Path, program: str, env: Mapping[str, str] | None = None) -> str:
    """What two ranks write to stderr when they run a program that ends in an error, and in time."""
    file = tmp_path / "program.py"
    file.write_text(program)
    done = mpirun(2, str(file), timeout=60, env=env)
    assert done.returncode not in (0, 124, 137), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [("CHECK", "first"), ("SHARED_MEMORY", "off"), ("BUCKET_BYTES", "4096"), ("STAGE_BYTES", "1")],
)
def test_settings_that_must_agree(tmp_path: Path, variable: str, value: str) -> None:
    stderr = stderr_of_failure(
        tmp_path,
        "import os\n"
        "from mpi4py import MPI\n"
        f"if MPI.COMM_WORLD.rank == 1: os.environ['PYCOLLECTIVE_{variable}'] = '{value}'\n"
        "import pycollective as pc\n"
        "pc.init()\n",
    )
    expected = f"expected the same PYCOLLECTIVE_{variable} on all ranks, got no value on rank 0 and {value} on rank 1"
    assert stderr.count(expected) == 1, stderr


@pytest.mark.parametrize("late", [0, 1])
def test_a_broadcast_from_another_root(late: int, tmp_path: Path) -> None:
    """Of the two ranks the one that comes last gets the error; the other may have ended its call by then."""
    stderr = stderr_of_failure(
        tmp_path,
        "import time, jax, jax.numpy as jnp, pycollective as pc\n"
        "world = pc.init()\n"
        "programs = [jax.jit(lambda x, root=root: pc.broadcast(x, world, root=root)) for root in (0, 1)]\n"
        "for program in programs: program(jnp.ones(3)).block_until_ready()\n"
        f"if world.rank == {late}: time.sleep(1)\n"
        "programs[world.rank](jnp.ones(3)).block_until_ready()\n"
        "pc.barrier(world)\n",
    )
    got = (
        rf"got broadcast\(float32\[3\], root={late}\) at program.py:3 .* and broadcast\(float32\[3\], root={1 - late}\)"
    )
    assert re.search(got.replace("broadcast", "bcast"), stderr), stderr
    assert f"rank {late} of 2" in stderr


@pytest.mark.parametrize("shared_memory", ["on", "off"])
def test_a_broadcast_that_one_rank_leaves_out(shared_memory: str, tmp_path: Path) -> None:
    """Its root does not wait for the others in it. The next call that all ranks meet in shows that they differ."""
    stderr = stderr_of_failure(
        tmp_path,
        "import jax, jax.numpy as jnp, pycollective as pc\n"
        "world = pc.init()\n"
        "share, add = jax.jit(lambda x: pc.broadcast(x, world)), jax.jit(lambda x: pc.psum(x, world))\n"
        "x = jnp.ones(3)\n"
        "for program in (share, add): program(x).block_until_ready()\n"
        "if world.rank == 0: share(x).block_until_ready()\n"
        "add(x).block_until_ready()\n",
        env={"PYCOLLECTIVE_SHARED_MEMORY": shared_memory},
    )
    assert "CollectiveMismatch: expected the same call on every rank" in stderr
    if shared_memory == "off":  # in shared memory a call is compared with its like
        assert re.search(
            r"got allreduce\(float32\[3\], op=sum\) at program.py:3 \(.*\), collective 4 of its ranks, here and "
            r"allreduce\(float32\[3\], op=sum\) at program.py:3 \(.*\), collective 3 of its ranks, on rank 1 \(",
            stderr,
        ), stderr
