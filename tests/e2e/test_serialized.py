"""Programs from another process run only if their communicator has the same ranks and devices here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import mpirun

pytestmark = pytest.mark.whole

HEAD = """
import pickle, sys
import jax, jax.export, jax.numpy as jnp
from jax.experimental import serialize_executable
import pycollective as pc
from pycollective.ordering import region

world = pc.init()
x = jnp.ones(3)


def file(name):
    return f"{sys.argv[1]}/{name}{world.rank}"


def told(text):
    sys.stdout.write(" ".join(str(text).split()) + "\\n")
"""

# The communicators have the same numbers in both runs.
WRITES = (
    HEAD
    + """
kept = {"world": world, "alone": world.split(world.rank), "also alone": world.split(world.rank), "both": world.split(0)}
for name, comm in kept.items():
    compiled = jax.jit(region.Region(lambda x: pc.psum(x, comm))).lower(x).compile()
    exported = jax.export.export(pc.jit(lambda x: pc.psum(x, comm)), disabled_checks=pc.export_checks())(x)
    for kind, written in {
        "compiled": pickle.dumps(serialize_executable.serialize(compiled)),
        "exported": bytes(exported.serialize()),
    }.items():
        with open(file(f"{kind} {name}"), "wb") as out:
            out.write(written)
pc.barrier()
"""
)

LOADS = (
    HEAD
    + """
def load(name):
    for kind, loaded in {
        "compiled": lambda written: serialize_executable.deserialize_and_load(*pickle.loads(written)),
        "exported": lambda written: jax.export.deserialize(bytearray(written)).call,
    }.items():
        with open(file(f"{kind} {name}"), "rb") as written:
            program = loaded(written.read())
        try:
            told(f"{kind} {name}: got {program(x)[0]}")
        except Exception as error:
            told(f"{kind} {name}: {error}")


load("world")
load("alone")  # there is no communicator of its number yet
kept = [world.split(world.rank), world.split(0), world.split(0, -world.rank)]
for name in "alone", "also alone", "both":
    load(name)
"""
)


def run(folder: Path, text: str, cache: Path | None = None) -> list[str]:
    """The lines that the ranks printed."""
    program = folder / "program.py"
    program.write_text(text)
    env = {"JAX_NUM_CPU_DEVICES": "1", **({"JAX_COMPILATION_CACHE_DIR": str(cache)} if cache else {})}
    done = mpirun(2, str(program), str(folder), timeout=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_another_process(tmp_path: Path) -> None:
    run(tmp_path, WRITES)
    told = run(tmp_path, LOADS)
    for kind in "compiled", "exported":
        assert told.count(f"{kind} world: got 2.0") == 2
        assert told.count(f"{kind} alone: got 1.0") == 2
        unknown = "allreduce: expected a communicator of this process, got an unknown one. Call pycollective"
        assert sum(line.startswith(f"{kind} alone: ") and unknown in line for line in told) == 2
        for name in "also alone", "both":  # other ranks; the same ranks in another order
            refusal = "expected the communicator that this program was compiled for, got one of other ranks or devices"
            for rank in range(2):
                place = f"(rank {rank} of 2, communicator world/0). Compile it"
                refused = [line for line in told if line.startswith(f"{kind} {name}: ") and refusal in line]
                assert sum(place in line for line in refused) == 1, told
    assert len(told) == 20


CACHED = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import pycollective as pc

world = pc.init()
groups = [[r] for r in range(world.size)]
for comm in {comms}:
    got = [pc.jit(lambda x: pc.psum(x, comm))(jnp.ones(3))[0]]
    got += [pc.psum(1.0, world, axis_index_groups=groups), pc.psum(1, world)]
    sys.stdout.write(f"{{[int(y) for y in got]}} {{comm.size}}\\n")
"""
ALONE, BOTH = "world.split(world.rank)", "world.split(0)"


def test_the_compilation_cache(tmp_path: Path) -> None:
    # The cache has programs of the first run. In the second one the same numbers stand for other communicators, and the
    # same communicators have other numbers.
    cache = tmp_path / "cache"
    for comms, sizes in (("world", ALONE, BOTH), (2, 1, 2)), (("world", BOTH, ALONE), (2, 2, 1)):
        told = run(tmp_path, CACHED.format(comms=", ".join(comms)), cache=cache)
        assert sorted(told) == sorted([f"[{size}, 1, 2] {size}" for size in sizes] * 2)
    assert list(cache.iterdir())


TOKENS = """
import sys
import jax
import jax.numpy as jnp
import pycollective as pc

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
world = pc.init(devices=4)
f = pc.pmap(lambda x: 2 * jax.lax.psum(x, "i"), "i")
for transformed in (jax.jit(f), jax.grad(lambda x: f(x).sum())):
    assert (transformed(jnp.ones((4, 3))) == 8).all()


@jax.jit
def on_one_device(x):
    return pc.psum(x, world)


assert on_one_device(jnp.ones(3))[0] == 1
assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
"""


def test_programs_with_a_token_on_several_devices_stay_out_of_the_compilation_cache(tmp_path: Path) -> None:
    """XLA gives the token no layout, and to write the program it reads that."""
    command = [sys.executable, "-c", TOKENS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [*tmp_path.glob("jit_on_one_device*")]
