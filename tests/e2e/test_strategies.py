"""The programs of docs/strategies.md: their losses on two ranks, and the numbers of lines that the page says."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys

import numpy as np
import pytest

from tests import unoptimised
from tests.e2e.launch import EXAMPLES, mpirun

pytestmark = pytest.mark.whole
FOLDER = EXAMPLES / "strategies"
TEXT = EXAMPLES.parent / "README.md"
STRATEGIES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "one_device")


def losses(text: str) -> np.ndarray:
    return np.array([float(line.split()[1]) for line in text.splitlines()])


@pytest.fixture(scope="module")
def on_one_device() -> np.ndarray:
    command = [sys.executable, str(FOLDER / "one_device.py"), str(TEXT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_losses_are_those_of_one_device(strategy: str, on_one_device: np.ndarray) -> None:
    env = {"XLA_FLAGS": unoptimised.flags(), "JAX_NUM_CPU_DEVICES": "1"}
    done = mpirun(2, str(FOLDER / f"{strategy}.py"), str(TEXT), timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert len(on_one_device) == 10
    assert on_one_device[-1] < 0.8 * on_one_device[0]
    np.testing.assert_allclose(losses(done.stdout), on_one_device, atol=3e-4)


def lines(strategy: str) -> list[str]:
    """The lines of code of a program."""
    _, _, code = (FOLDER / f"{strategy}.py").read_text().split('"""', 2)
    return [line for line in code.splitlines() if line.strip() and not line.startswith("#")]


def test_the_page_counts_the_lines_that_change() -> None:
    page = (EXAMPLES.parent / "docs" / "strategies.md").read_text()
    one = lines("one_device")
    assert f"`one_device.py`, {len(one)} lines" in page
    for strategy in STRATEGIES:
        marks = [line[0] for line in difflib.ndiff(one, lines(strategy))]
        (row,) = re.findall(rf"^\| `{strategy}\.py`.*\| (\d+) \| (\d+) \|$", page, re.MULTILINE)
        assert row == (str(marks.count("+")), str(marks.count("-"))), strategy
