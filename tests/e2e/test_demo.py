"""The demo makes a picture and one progress bar, learns, and has the same losses on one rank, two, and stand-ins."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.e2e.launch import EXAMPLES, mpirun

EXAMPLE = str(EXAMPLES / "train_digits.py")
pytestmark = pytest.mark.whole


def train(
    where: Path, ranks: int, *options: str, start: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    short = ("--epochs", "10", "--losses", "losses.json")
    return mpirun(ranks, *start, EXAMPLE, *short, *options, timeout=240, cwd=where, env=env)


def losses(where: Path) -> np.ndarray:
    return np.array(json.loads((where / "losses.json").read_text()))


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A training: its directory, and what it has printed."""
    where = tmp_path_factory.mktemp("digits")
    done = train(where, 2)
    assert done.returncode == 0, done.stderr
    return where, done


def test_training(on_two_ranks: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    where, done = on_two_ranks
    (accuracy,) = re.findall(r"^test accuracy (\d\.\d+)$", done.stdout, re.MULTILINE)  # one rank prints it
    assert float(accuracy) >= 0.96
    # There is one bar, drawn to its end. Each rank with a bar would draw it at step 0.
    assert done.stderr.count("| 0/110 [") == 1
    assert re.match(r"100%\|[^|]*\| 110/110 ", done.stderr.replace("\r", "\n").splitlines()[-1])
    assert "rank" not in done.stderr
    picture = matplotlib.image.imread(where / "digits_loss.png")
    assert picture.shape[0] > 200
    assert picture.shape[1] > 300
    assert picture[..., :3].std() > 0.02  # the page is not empty
    assert "digits_loss.png" in done.stdout


def test_losses_do_not_depend_on_the_number_of_ranks(
    on_two_ranks: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = train(tmp_path, 1)
    assert done.returncode == 0, done.stderr
    on_one, on_two = losses(tmp_path), losses(on_two_ranks[0])
    assert len(on_one) == 110
    # float32 sums in another order differ by about 1e-7, and each step of the training amplifies the difference.
    np.testing.assert_allclose(on_two[:40], on_one[:40], rtol=1e-3)
    np.testing.assert_allclose(on_two[:10], on_one[:10], rtol=1e-5)


def test_gradients_of_16_bits(on_two_ranks: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    done = train(tmp_path, 2, "--wire-dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    narrow, wide = losses(tmp_path), losses(on_two_ranks[0])
    assert (narrow != wide).any()
    np.testing.assert_allclose(narrow[:40], wide[:40], rtol=0.05)


def test_standins_for_gpus(on_two_ranks: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    start, env = ("-m", "tests.standin", "direct"), {"PYTHONPATH": str(EXAMPLES.parent)}
    done = train(tmp_path, 2, start=start, env=env)
    assert done.returncode == 0, done.stderr
    # All bits are equal: a sum of two numbers does not depend on their order.
    np.testing.assert_array_equal(losses(tmp_path), losses(on_two_ranks[0]))


def test_a_batch_that_does_not_divide(tmp_path: Path) -> None:
    done = train(tmp_path, 2, "--batch-size", "101")
    assert done.returncode not in (0, 124, 137)
    expected = "train_digits: expected --batch-size to be a multiple of the number of ranks, 2"
    assert done.stderr.count(expected) == 1
    assert "got 101" in done.stderr
