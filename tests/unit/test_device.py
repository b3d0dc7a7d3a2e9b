"""Compiles and runs the tests in C++, ``tests/native``: accelerators, on the stand-in for CUDA's runtime, and teams."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.standin import compile_cpp

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
TESTS = ROOT / "tests" / "native"

SOURCES = {
    "device_test": [
        *(NATIVE / name for name in ("device.cc", "collectives.cc", "own_reductions.cc")),
        ROOT / "tests" / "standin" / "cudart.cc",
    ],
    "team_test": [NATIVE / "team.cc"],
}
"""What each program is compiled with, besides its own file."""

NAMES = {program: re.findall(r'\{"(\w+)", Test\w+\}', (TESTS / f"{program}.cc").read_text()) for program in SOURCES}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("native")
    return {name: compile_cpp([TESTS / f"{name}.cc", *sources], folder / name) for name, sources in SOURCES.items()}


def test_every_file_is_compiled() -> None:
    assert {path.stem for path in TESTS.glob("*.cc")} == set(SOURCES)


@pytest.mark.parametrize("program", SOURCES)
def test_every_test_is_run(program: str, programs: dict[str, Path]) -> None:
    out = subprocess.run([programs[program]], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.split() == sorted(NAMES[program])


@pytest.mark.parametrize(("program", "name"), [(program, name) for program in NAMES for name in NAMES[program]])
def test_native(program: str, name: str, programs: dict[str, Path]) -> None:
    run = subprocess.run([programs[program], name], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
