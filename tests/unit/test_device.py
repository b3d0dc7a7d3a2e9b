"""Compiles and runs the tests in C++, ``tests/native``: accelerators, on CUDA's stand-in, and parts of the library."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.gpu_check import device_tests
from tests.native import weakened
from tests.native.build import EXPLORED, FOLDER, NAMES, SOURCES, build
from tests.standin import compile_cpp


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("native")
    return {program: build(program, folder) for program in SOURCES}


@pytest.fixture(scope="module")
def mutants(programs: dict[str, Path]) -> list[weakened.Mutant]:
    """To find them takes as long as to explore everything."""
    return list(weakened.mutants(programs["explore_test"]))


def test_an_object_is_kept_until_its_source_or_a_header_changes(tmp_path: Path) -> None:
    source, header, objects = tmp_path / "a.cc", tmp_path / "number.h", tmp_path / "objects"
    objects.mkdir()
    source.write_text('#include <cstdio>\n#include "number.h"\nint main() { std::printf("%d", NUMBER); }\n')

    def built() -> tuple[str, int]:
        out = subprocess.run([compile_cpp([source], tmp_path / "a", objects=objects)], capture_output=True, text=True)
        return out.stdout, (objects / "a.o").stat().st_mtime_ns

    header.write_text("#define NUMBER 1\n")
    first = built()
    assert first[0] == "1"
    assert built() == first
    header.write_text("#define NUMBER 2\n")
    assert built()[0] == "2"
    source.write_text("int main() {}\n")
    assert built()[0] == ""


def test_every_file_is_compiled() -> None:
    assert {path.stem for path in FOLDER.glob("*.cc")} == set(SOURCES)


@pytest.mark.parametrize("program", NAMES)
def test_every_test_is_run(program: str, programs: dict[str, Path]) -> None:
    out = subprocess.run([programs[program]], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.split() == sorted(NAMES[program])


@pytest.mark.parametrize(("program", "name"), [(program, name) for program in NAMES for name in NAMES[program]])
def test_native(program: str, name: str, programs: dict[str, Path]) -> None:
    run = subprocess.run([programs[program], name], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_on_a_library_of_cuda(programs: dict[str, Path]) -> None:
    """The tests as they run on CUDA's own library: only fills of the device's memory make its streams late."""
    results = dict(device_tests.results(programs["device_test"].parent, "standin", seconds=60))
    assert "forgotten_waits" in results
    assert set(results.values()) == {"ok"}, results


UNNOTICED = {
    "line.shown.store(own_number, std::memory_order_release);": "MPI's allreduce between orders it",
    "const uint64_t wanted = Shown(rank).shown.load(std::memory_order_acquire);": "MPI's allreduce between orders it",
}
"""The lines whose memory orders are stronger than the explored scenarios need, and why they may stay."""


def test_each_weaker_memory_order_is_noticed(programs: dict[str, Path], mutants: list[weakened.Mutant]) -> None:
    verdicts = weakened.verdicts(programs["explore_test"], mutants)
    unnoticed = {mutant.place.line.split("  //")[0] for mutant, verdict in verdicts.items() if not verdict}
    assert unnoticed == set(UNNOTICED), [f"{m.place}: {m.order} -> {m.weaker}" for m, v in verdicts.items() if not v]


def test_each_memory_order_is_explored(mutants: list[weakened.Mutant]) -> None:
    explored = {(mutant.place.file, mutant.place.number) for mutant in mutants}
    assert explored == weakened.lines_with_orders(EXPLORED["explore_test"])
