"""C++ alone: accelerators, on the stand-in for CUDA's runtime, and teams: ``tests/native/device_test.cc``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native.build import NAMES, build


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("native"))


def test_every_test_is_run(program: Path) -> None:
    out = subprocess.run([program], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.split() == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_device(program: Path, name: str) -> None:
    run = subprocess.run([program, name], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
