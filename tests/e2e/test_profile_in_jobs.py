"""``pycollective profile``, run as users run it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from pycollective.planning.profile import ARRAYS, AXES, NARROW, OPERATIONS, Group, Profile
from pycollective.profiling.collectives import SIZES
from pycollective.profiling.computing import CHANNELS, COLUMNS, SMALLEST, TRANSPOSED
from tests import unoptimised
from tests.e2e.launch import limited, mpirun

pytestmark = pytest.mark.whole

FAST = {"XLA_FLAGS": unoptimised.flags()}
FLOAT32 = ["--dtypes", "float32"]


def check(profile: Profile, kinds: tuple[str, ...], groups: list[Group], dtypes: list[str]) -> None:
    """Checks that all of it was measured, and has times that can be."""
    assert profile.memory > 1 << 27
    assert 0 < profile.call < 1
    assert 0 < profile.instruction < 1e-2
    assert list(profile.collectives) == list(kinds)
    for kind in kinds:
        assert list(profile.collectives[kind]) == (["psum"] if kind == NARROW else list(OPERATIONS))
        for operation, curves in profile.collectives[kind].items():
            assert list(curves) == groups, (kind, operation)
            for curve in curves.values():
                assert curve.sizes == SIZES[: len(curve.sizes)]
                assert all(0 < seconds < 60 for seconds in curve.seconds)
    assert profile.transposes is not None
    assert (
        profile.transposes.sizes
        == tuple(4 * rows * columns for rows, columns in TRANSPOSED)[: len(profile.transposes.sizes)]
    )
    for tables, values in (
        (profile.products, SMALLEST),
        (profile.transposed, COLUMNS),
        (profile.convolutions, CHANNELS),
    ):
        assert list(tables) == dtypes
        for curves in tables.values():
            assert tuple(curves) == values
            assert all(0 < seconds < 60 for curve in curves.values() for seconds in curve.seconds)
            assert all(list(curve.sizes) == sorted(curve.sizes) for curve in curves.values())


def test_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    done = mpirun(2, "-m", "pycollective", "profile", "-o", str(file), *FLOAT32, timeout=400, env=FAST)
    assert done.returncode == 0, done.stderr
    profile = Profile.load(file)
    assert (profile.hosts, profile.ranks, profile.devices, profile.per_host) == (1, 2, 1, 2)
    check(profile, (AXES, NARROW, ARRAYS), [Group(2, 1)], ["float32"])
    assert profile.noise is not None
    assert min(profile.noise[:2]) >= 1
    assert list(profile.overlap) == [AXES, ARRAYS]
    assert str(profile.noise) in done.stdout
    assert " profile, 20" in profile.source
    assert "2 rank(s) on 1 host(s)" in profile.source
    for kind in (AXES, ARRAYS):
        small, large = (profile.collective_s("psum", nbytes, Group(2, 1), kind) for nbytes in (4 << 10, SIZES[-1]))
        assert small < large, f"psum in {kind}"
    for curve in (profile.streams, profile.tanh, profile.products["float32"][64]):
        assert curve.seconds[0] < curve.seconds[-1]
    text = " ".join(done.stdout.split())
    assert " ".join(profile.source.split()) in text
    assert f"Collectives in programs of {ARRAYS}" in text
    assert f"{file.name}: {file.stat().st_size} B" in text
    assert text.count("2 x 1") == 1, "rank 0 alone prints"


def test_it_starts_its_own_ranks_with_two_devices_each(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "pycollective", "profile", "-o", str(file), *FLOAT32, "--ranks", "2"]
    done = limited([*command, "--devices", "2"], 200, env={**os.environ, **FAST})
    assert done.returncode == 0, done.stderr
    profile = Profile.load(file)
    assert (profile.hosts, profile.ranks, profile.devices, profile.per_host) == (1, 2, 2, 4)
    check(profile, (AXES, NARROW), [Group(4, 1)], ["float32"])
    assert " 4 x 1 " in done.stdout
    assert profile.collective_s("psum", 4096, Group(2, 1), AXES) > 0
    with pytest.raises(ValueError, match="a profile with psum in programs of global arrays"):
        profile.collective_s("psum", 4096, Group(4, 1), ARRAYS)


def test_one_rank_measures_the_other_dtype(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    done = mpirun(1, "-m", "pycollective", "profile", "-o", str(file), "--dtypes", "bfloat16", timeout=200, env=FAST)
    assert done.returncode == 0, done.stderr
    profile = Profile.load(file)
    assert (profile.hosts, profile.ranks, profile.devices) == (1, 1, 1)
    check(profile, (), [], ["bfloat16"])  # nobody to communicate with
    assert "bfloat16" in done.stdout
    assert profile.collective_s("psum", 4096, Group(1, 1)) == 0


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "int32"), (1, "nonsense")])
def test_a_dtype_that_is_none_with_a_fraction(tmp_path: Path, ranks: int, dtype: str) -> None:
    file = tmp_path / "cluster.json"
    words = ["-m", "pycollective", "profile", "-o", str(file), "--dtypes", f"float32,{dtype}", "--ranks", "1"]
    done = mpirun(2, *words, timeout=60) if ranks == 2 else limited([sys.executable, *words], 60)
    assert done.returncode != 0
    sentence = (
        f"ValueError: pycollective.profile: expected a dtype of numbers with a fraction, got '{dtype}'. Say float32"
    )
    assert done.stderr.count(sentence) == 1, done.stderr
    assert not file.exists()


# Four ranks that take themselves for two hosts, and measure two operations of one size. Each tells who was with it.
TWO_HOSTS = """
import json, sys
from types import SimpleNamespace

import pycollective as pc
from pycollective.profiling import collectives

comm = pc.distributed.initialize()
collectives.OPERATIONS, collectives.SIZES = ("psum", "ppermute"), (512,)
members, ticks = [], []

def split(color, key):
    part = comm.split(color, key=key)
    members.append(part.mpi.allgather(comm.rank))
    return part

place = {"host_index": comm.rank // 2, "local_rank": comm.rank % 2, "host_count": 2, "local_size": 2}
faked = SimpleNamespace(rank=comm.rank, size=4, mpi=comm.mpi, split=split, **place)
curves, noise = collectives.measure_collectives(faked, 1, ticks.append)
assert noise >= 1
found = {kind: {name: list(groups) for name, groups in table.items()} for kind, table in curves.items()}
measured = [curve for table in curves.values() for groups in table.values() for curve in groups.values()]
sizes = sorted({curve.sizes for curve in measured})
every = comm.mpi.gather(members)
if comm.rank == 0:
    print(json.dumps({"found": found, "sizes": sizes, "members": every, "ticks": sum(ticks)}))
"""


def test_groups_within_hosts_and_between_them(tmp_path: Path) -> None:
    program = tmp_path / "two_hosts.py"
    program.write_text(TWO_HOSTS)
    done = mpirun(4, str(program), timeout=100, env=FAST)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    groups = [[1, 2], [2, 1], [2, 2]]
    found = {kind: dict.fromkeys(["psum", "ppermute"], groups) for kind in (AXES, ARRAYS)}
    assert told["found"] == {**found, NARROW: {"psum": groups}}
    assert told["sizes"] == [[512]]
    assert told["ticks"] == 3 * 2
    across, within, every = ([[0, 2], [1, 3]] * 2, [[0, 1]] * 2 + [[2, 3]] * 2, [[0, 1, 2, 3]] * 4)
    assert told["members"] == [list(of_a_rank) for of_a_rank in zip(across, within, every, strict=True)]
