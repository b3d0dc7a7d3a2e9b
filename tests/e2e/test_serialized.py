"""Programs from another process run only if their communicator has the same ranks and devices here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.launch import mpirun

HEAD = """
import pickle, sys
import jax, jax.numpy as jnp
from jax.experimental import serialize_executable
import pycollective as pc
from pycollective.ordering import region

world = pc.init()
file = f"{sys.argv[1]}/{world.rank}"
x = jnp.ones(3)


def written(comm):
    program = jax.jit(region.Region(lambda x: pc.psum(x, comm))).lower(x).compile()
    with open(file, "wb") as out:
        pickle.dump(serialize_executable.serialize(program), out)


def loaded():
    with open(file, "rb") as out:
        return serialize_executable.deserialize_and_load(*pickle.load(out))


def told(text):
    sys.stdout.write(" ".join(str(text).split()) + "\\n")
"""

WRITES = HEAD + "written(COMM)\npc.barrier()\n"

LOADS = (
    HEAD
    + """
kept = [COMM]
try:
    told(f"got {loaded()(x)[0]}")
except Exception as error:
    told(error)
"""
)


pytestmark = [pytest.mark.whole, pytest.mark.xdist_group("serialized")]


def run(folder: Path, text: str, ranks: int = 2, cache: Path | None = None) -> str:
    program = folder / "program.py"
    program.write_text(text)
    env = {"JAX_NUM_CPU_DEVICES": "1", **({"JAX_COMPILATION_CACHE_DIR": str(cache)} if cache else {})}
    done = mpirun(ranks, str(program), str(folder), timeout=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SPLIT = "world.split(world.rank)"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the programs lie that an earlier process compiled for a communicator."""
    folders = {made_for: tmp_path_factory.mktemp("programs") for made_for in ("world", SPLIT)}
    for made_for, folder in folders.items():
        run(folder, WRITES.replace("COMM", made_for))
    return folders


@pytest.mark.parametrize(
    ("made_for", "other", "outcome"),
    [
        ("world", "None", r"got 2\.0"),
        (SPLIT, SPLIT, r"got 1\.0"),
        (
            SPLIT,
            "world.split(0)",
            r"compiled for, got one of other ranks or devices \(rank \d of 2, communicator world/0\)\. Compile it",
        ),
        (SPLIT, "world.split(0, -world.rank)", "expected the communicator that this program was compiled for"),
        (SPLIT, "None", "allreduce: expected a communicator of this process, got an unknown one. Call pycollective"),
    ],
)
def test_another_process(made_for: str, other: str, outcome: str, programs: dict[str, Path]) -> None:
    assert len(re.findall(outcome, run(programs[made_for], LOADS.replace("COMM", other)))) == 2


CACHED = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import pycollective as pc

world = pc.init()
{first}
comm = {comm}
groups = [[r] for r in range(world.size)]
got = [pc.jit(lambda x: pc.psum(x, comm))(jnp.ones(3))[0]]
got += [pc.psum(1.0, world, axis_index_groups=groups), pc.psum(1, world)]
sys.stdout.write(f"{{[int(y) for y in got]}} {{comm.size}}\\n")
"""


def test_the_compilation_cache(tmp_path: Path) -> None:
    # The cache has programs of earlier runs: of the same communicators, of others with the same number, and of runs
    # that made another communicator before.
    cache = tmp_path / "cache"
    runs = [("", "world"), ("", SPLIT), ("", "world.split(0)"), ("pc.psum(1, world.split(0))", SPLIT), ("", "world")]
    for first, comm in runs:
        told = run(tmp_path, CACHED.format(first=first, comm=comm), cache=cache)
        size = 1 if comm == SPLIT else 2
        assert told.splitlines() == [f"[{size}, 1, 2] {size}"] * 2
    assert list(cache.iterdir())
