"""Compiles and runs the tests in C++, ``tests/native``: accelerators, on CUDA's stand-in, and parts of the library."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native.build import FOLDER, NAMES, SOURCES, build


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("native")
    return {program: build(program, folder) for program in SOURCES}


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
