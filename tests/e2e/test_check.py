"""``PYCOLLECTIVE_CHECK``: when ranks compare their calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launch import mpirun

PROGRAM = """
import sys
import jax.numpy as jnp
import pycollective as pc

comm = pc.init()
x = jnp.ones(1)
for f in (pc.psum, pc.pmax):  # from now on every rank knows both calls
    f(x, comm).block_until_ready()
try:
    y = (pc.psum if comm.rank == 0 else pc.pmax)(x, comm)
    sys.stdout.write(f"got {y[0]:g}\\n")
except Exception as error:
    sys.stdout.write("caught " + " ".join(str(error).split()) + "\\n")
"""


def outcome(tmp_path: Path, check: str, program: str = PROGRAM) -> list[str]:
    (tmp_path / "program.py").write_text(program)
    done = mpirun(2, str(tmp_path / "program.py"), timeout=60, env={"PYCOLLECTIVE_CHECK": check})
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_always_compares_each_call(tmp_path: Path) -> None:
    lines = outcome(tmp_path, "always")
    assert all(line.startswith("caught ") for line in lines)
    for rank in range(2):
        (line,) = (line for line in lines if f"on rank {1 - rank} (rank {rank} of 2, communicator world)" in line)
        assert "pycollective.allreduce: expected the same call on every rank, got allreduce" in line


@pytest.mark.parametrize("check", ["first", "never"])
def test_otherwise_a_known_call_is_not_compared(check: str, tmp_path: Path) -> None:
    # As the README says, the numbers are wrong then.
    assert all(line.startswith("got ") for line in outcome(tmp_path, check))


SWAPPED = PROGRAM.replace("for f in (pc.psum, pc.pmax):", "for f in ():").replace(
    "y = (pc.psum if comm.rank == 0 else pc.pmax)(x, comm)",
    "y, _ = [pc.psum(k * x, comm) for k in ((1, 4) if comm.rank == 0 else (4, 1))]",
)


@pytest.mark.parametrize("check", ["always", "first"])
def test_calls_that_look_alike_are_not_told_apart(check: str, tmp_path: Path) -> None:
    # As the README says: the ranks compare operations and shapes, and here they are the same.
    assert outcome(tmp_path, check, SWAPPED) == ["got 5", "got 5"]


FIRST = PROGRAM.replace("for f in (pc.psum, pc.pmax):", "for f in ():")


def test_first_compares_what_is_new(tmp_path: Path) -> None:
    assert all("expected the same call on every rank" in line for line in outcome(tmp_path, "first", FIRST))


def test_never_compares_nothing(tmp_path: Path) -> None:
    assert all(line.startswith("got ") for line in outcome(tmp_path, "never", FIRST))


WAITS = """
import sys
import time
import jax.numpy as jnp
from jax import lax
import pycollective as pc

comm = pc.init(timeout=3)
f = pc.jit(lambda x: lax.psum(x, "i"), axis_name="i")
if comm.rank == 0:
    try:
        f(jnp.ones(1))
    except RuntimeError as error:
        sys.stdout.write("caught " + " ".join(str(error).split()) + "\\n")
        sys.stdout.flush()
    comm.mpi.Abort(5)
time.sleep(60)
"""


def test_a_first_call_that_others_do_not_make_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WAITS)
    done = mpirun(2, str(tmp_path / "program.py"), timeout=40)
    assert done.returncode not in (0, 124, 137), done.stderr
    assert (
        "caught pycollective.jit: expected the other ranks to call <lambda> too, got no call from some of them for"
        in done.stdout
    )


NAMED = """
import sys
import jax.numpy as jnp
from jax import lax
import pycollective as pc

comm = pc.init()
f = pc.jit(lambda x: (lax.psum if comm.rank == 0 else lax.pmax)(x, "i"), axis_name="i")
try:
    sys.stdout.write(f"got {f(jnp.ones(1))[0]:g}\\n")
except Exception as error:
    sys.stdout.write("caught " + " ".join(str(error).split()) + "\\n")
"""


@pytest.mark.parametrize(("check", "start"), [("always", "caught "), ("first", "caught "), ("never", "got ")])
def test_programs_over_named_axes(check: str, start: str, tmp_path: Path) -> None:
    for line in outcome(tmp_path, check, NAMED):
        assert line.startswith(start), line
        if start == "caught ":
            assert "jit: expected the same program on every rank, here with p" in line
