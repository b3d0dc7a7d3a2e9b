"""``PYCOLLECTIVE_CHECK=nan``: the first call to which a rank brings a NaN or an Inf is an error on every rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.launch import mpirun

# Each case runs with rank 0 and with rank 1 as the one that brings the number.
PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax import lax
import pycollective as pc

jax.config.update("jax_enable_x64", True)
world = pc.init()


def brings(culprit, number, shape=(2, 3), place=(1, 1), dtype=jnp.float32):
    x = jnp.ones(shape, dtype)
    return x.at[place].set(number) if world.rank == culprit else x


def jit(culprit):
    return jax.jit(lambda x: pc.psum(2 * x, world))(brings(culprit, jnp.nan))

def eager(culprit):
    return pc.psum(brings(culprit, jnp.inf), world)

def grad(culprit):  # the operands of the sum are finite, its cotangent is not
    scale = brings(culprit, -jnp.inf)
    loss = lambda x: jnp.sum(scale * pc.psum(x, world))
    return jax.jit(jax.grad(loss))(jnp.ones((2, 3)))

def vmap(culprit):
    x = brings(culprit, jnp.nan, (4, 5), (3, 2))
    return jax.jit(jax.vmap(lambda row: pc.all_gather(row, world)))(x)

def bfloat16(culprit):
    return pc.all_gather(brings(culprit, jnp.nan, dtype=jnp.bfloat16), world)

def float16(culprit):
    return pc.all_to_all(brings(culprit, jnp.inf, dtype=jnp.float16), world, 0, 0)

def float64(culprit):
    return pc.psum_scatter(brings(culprit, jnp.nan, dtype=jnp.float64), world)

def complex64(culprit):
    return pc.psum(brings(culprit, complex(1, jnp.inf), dtype=jnp.complex64), world)

def complex128(culprit):
    return pc.scan(brings(culprit, jnp.nan, dtype=jnp.complex128), world)

def large(culprit):
    x = brings(culprit, jnp.nan, (200_000,), 123_456)
    return pc.psum(x.at[-1].set(jnp.inf) if world.rank == culprit else x, world)

def many(culprit):
    return pc.all_gather(brings(culprit, jnp.nan, (200_000,), slice(None), dtype=jnp.bfloat16), world)

def deep(culprit):
    return pc.psum(brings(culprit, jnp.nan, (1, 2, 1, 2, 3), (0, 1, 0, 1, 1)), world)

def scalar(culprit):
    return pc.psum(brings(culprit, jnp.nan, (), ()), world)

def tree(culprit):
    return pc.psum([jnp.ones(3), brings(culprit, jnp.nan), brings(culprit, jnp.inf)], world)[1]

def pmean(culprit):
    f = pc.jit(lambda x: lax.pmean(x, "i"), axis_name="i")
    return f(brings(culprit, jnp.nan))

def pmap(culprit):
    x = jnp.ones((2, 3))
    x = x.at[1, 2].set(jnp.nan) if world.rank == culprit else x
    return pc.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)

def max_of_nan(culprit):
    return pc.pmax(brings(culprit, jnp.nan), world)

def broadcast(culprit):
    return pc.broadcast(brings(culprit, jnp.nan), world, root=culprit)

def exchange(culprit):
    return pc.ppermute(brings(culprit, jnp.nan), world, [(0, 1), (1, 0)])

# From here on nothing is an error.

def max_of_inf(culprit):
    return pc.pmax(brings(culprit, -jnp.inf), world), pc.pmin(brings(culprit, jnp.inf), world)

def integers(culprit):  # the bits of NaN
    return pc.psum(brings(culprit, 0x7FC00000, dtype=jnp.int32), world)

def largest(culprit):
    dtypes = jnp.float32, jnp.bfloat16, jnp.float64
    return [pc.psum(brings(culprit, jnp.finfo(t).max, dtype=t), world) for t in dtypes]

def not_the_root(culprit):
    x = brings(culprit, jnp.nan)
    return pc.broadcast(x, world, root=1 - culprit), pc.scatter(x, world, root=1 - culprit)

def not_sent(culprit):
    return pc.ppermute(brings(culprit, jnp.nan), world, [(1 - culprit, culprit)])

def not_sent_between_devices(culprit):
    x = jnp.full((2, 3), jnp.nan if world.rank == culprit else 1.0)
    route = [(2 * (1 - culprit), 2 * culprit), (2 * (1 - culprit) + 1, 2 * culprit + 1)]
    return pc.pmap(lambda x: lax.ppermute(x, "i", route), axis_name="i")(x)

def after_all(culprit):
    return pc.psum(brings(culprit, 2), world)

def message(culprit):
    if world.rank != culprit:
        return pc.recv(jnp.ones((2, 3)), world, source=culprit)
    jax.block_until_ready(pc.send(brings(culprit, jnp.nan), world, dest=1 - culprit))


if sys.argv[1] == "uncaught":
    jax.block_until_ready(globals()[sys.argv[2]](int(sys.argv[3])))
    sys.exit()
for name in sys.argv[1:]:
    for culprit in range(2):
        try:
            jax.block_until_ready(globals()[name](culprit))
            said = "nothing"
        except Exception as error:
            said = " ".join(str(error).split())
        sys.stdout.write(f"{name} {culprit} on {world.rank}: {said}\\n")
"""

# Where the culprit is rank C.
SAID = {
    "jit": r"1 NaN or Inf on rank C, the first is nan at \[1,1\] of float32\[2,3\], "
    r"in allreduce\(float32\[2,3\], op=sum\) at program.py:17 \(jit",
    "eager": r"1 NaN or Inf on rank C, the first is inf at \[1,1\] of float32\[2,3\], in allreduce\(.*\) \(rank",
    "grad": r"1 NaN or Inf on rank C, the first is -inf at \[1,1\] of .*, in allreduce\(.*\) at program.py:24 \(grad",
    "vmap": r"1 NaN or Inf on rank C, the first is nan at \[3,2\] of .*, in allgather\(float32\[4,5\]\) at program",
    "bfloat16": r"1 .* nan at \[1,1\] of bfloat16\[2,3\], in allgather",
    "float16": r"1 .* inf at \[1,1\] of float16\[2,3\], in alltoall",
    "float64": r"1 .* nan at \[1,1\] of float64\[2,3\], in reduce_scatter",
    "complex64": r"1 .* inf at \[1,1\] of complex64\[2,3\], in allreduce",
    "complex128": r"1 .* nan at \[1,1\] of complex128\[2,3\], in scan",
    "large": r"2 .* nan at \[123456\] of float32\[200000\], in allreduce",
    "many": r"200000 .* nan at \[0\] of bfloat16\[200000\], in allgather",
    "deep": r"1 .* nan at element 10 of float32\[1,2,1,2,\.\.\. #\d+\], in allreduce",
    "scalar": r"1 .* nan at \[\] of float32\[\], in allreduce",
    "tree": r"2 .* nan at \[1,1\] of array 2 of 3, float32\[2,3\], in allreduce",
    "pmean": r"1 .* nan at \[1,1\] of float32\[2,3\], in allreduce\(.*\) at program.py:\d+ \(pmean",
    "pmap": r"1 NaN or Inf on rank C, device 1, the first is nan at \[2\] of float64\[3\], in allreduce",
    "max_of_nan": r"1 .* nan at \[1,1\] of float32\[2,3\], in allreduce\(.*op=max",
    "broadcast": r"1 .* nan at \[1,1\] of float32\[2,3\], in bcast",
    "exchange": r"1 .* nan at \[1,1\] of float32\[2,3\], in ppermute",
    "after_all": "nothing",
}
SAID |= dict.fromkeys(
    ("max_of_inf", "integers", "largest", "not_the_root", "not_sent", "not_sent_between_devices"), "nothing"
)


@pytest.mark.parametrize(
    ("check", "shared_memory"), [("nan", "on"), ("never,nan", "off")], ids=["shared memory", "not compared"]
)
def test_every_rank_says_who_brings_which_number(check: str, shared_memory: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {"PYCOLLECTIVE_CHECK": check, "PYCOLLECTIVE_SHARED_MEMORY": shared_memory, "JAX_NUM_CPU_DEVICES": "2"}
    done = mpirun(2, str(program), *SAID, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    lines = dict(re.findall(r"^(\w+ \d on \d): (.*)$", done.stdout, re.MULTILINE))
    assert len(lines) == 4 * len(SAID), done.stdout
    for where, line in lines.items():
        case, culprit, _, rank = where.split()
        text = SAID[case].replace("rank C", f"rank {culprit}")
        if text != "nothing":
            text = rf".*expected finite numbers, got .*on rank {culprit},.*\(rank {rank} of 2, communicator world.*"
            assert re.search(SAID[case].replace("rank C", f"rank {culprit}"), line), (where, line)
        assert re.fullmatch(text, line), (where, line)


def test_none_is_an_error_by_default(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = mpirun(2, str(program), "jit", timeout=60, env={"PYCOLLECTIVE_CHECK": ""})
    assert done.stdout.count(": nothing") == 4, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("case", "line", "culprit"), [("jit", 17, 0), ("eager", 20, 1), ("message", 110, 0), ("message", 110, 1)]
)
def test_the_job_ends_with_it(case: str, line: int, culprit: int, tmp_path: Path) -> None:
    """The error names the line, or its traceback does. A rank that waits for the message ends too."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = (str(program), "uncaught", case, str(culprit))
    done = mpirun(2, *command, timeout=60, env={"PYCOLLECTIVE_CHECK": "nan"})
    assert done.returncode not in (0, 124, 137), done.stderr
    assert done.stderr.count("; ending all ranks.") == 1, done.stderr
    said = rf"expected finite numbers, got 1 NaN or Inf on rank {culprit}, the first is (nan|inf) at \[1,1\] of "
    assert re.search(said, done.stderr), done.stderr
    assert re.search(rf"program.py(\", line |:){line}\D", done.stderr), done.stderr
