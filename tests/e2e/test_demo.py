"""The demo makes a picture and one progress bar, has the same losses on any number of ranks, and learns."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests import unoptimised
from tests.e2e.launch import mpirun

EXAMPLE = str(Path(__file__).parents[2] / "examples/train_digits.py")
SHORT = ("--epochs", "4")  # 44 steps
pytestmark = [pytest.mark.whole, pytest.mark.xdist_group("digits")]


def train(tmp_path: Path, ranks: int, *options: str, optimised: bool = True) -> subprocess.CompletedProcess[str]:
    env = None if optimised else {"XLA_FLAGS": unoptimised.flags()}
    args = ("--plot", str(tmp_path / f"loss{ranks}.png"), "--losses", str(tmp_path / f"losses{ranks}.json"), *options)
    return mpirun(ranks, EXAMPLE, *args, timeout=240, cwd=tmp_path, env=env)


def curve(tmp_path: Path, ranks: int, *options: str) -> np.ndarray:
    done = train(tmp_path, ranks, *options, optimised=False)
    assert done.returncode == 0, done.stderr
    return np.array(json.loads((tmp_path / f"losses{ranks}.json").read_text()))


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return curve(tmp_path_factory.mktemp("digits"), 1, *SHORT)


def test_losses_do_not_depend_on_the_number_of_ranks(on_one_rank: np.ndarray, tmp_path: Path) -> None:
    assert len(on_one_rank) == 44
    assert on_one_rank[-1] < 0.5 * on_one_rank[0]
    on_four = curve(tmp_path, 4, *SHORT)
    # float32 sums in another order differ by about 1e-7, and each step of the training amplifies the difference.
    np.testing.assert_allclose(on_four, on_one_rank, rtol=1e-3)
    np.testing.assert_allclose(on_four[:10], on_one_rank[:10], rtol=1e-5)


def test_seeds_differ(on_one_rank: np.ndarray, tmp_path: Path) -> None:
    assert (curve(tmp_path, 1, *SHORT, "--seed", "1") != on_one_rank).all()


def test_gradients_of_16_bits(on_one_rank: np.ndarray, tmp_path: Path) -> None:
    narrow = curve(tmp_path, 2, *SHORT, "--wire-dtype", "bfloat16")
    assert (narrow != on_one_rank).any()
    np.testing.assert_allclose(narrow, on_one_rank, rtol=0.05)


def test_full_run_on_two_ranks(tmp_path: Path) -> None:
    done = train(tmp_path, 2)
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"^test accuracy (\d\.\d+)$", done.stdout, re.MULTILINE)  # one rank prints it
    assert float(accuracy) >= 0.97
    # There is one bar, drawn to its end. Each rank with a bar would draw it at step 0.
    assert done.stderr.count("| 0/330 [") == 1
    assert re.match(r"100%\|[^|]*\| 330/330 ", done.stderr.replace("\r", "\n").splitlines()[-1])
    assert "rank" not in done.stderr
    picture = matplotlib.image.imread(tmp_path / "loss2.png")
    assert picture.shape[0] > 200
    assert picture.shape[1] > 300
    assert picture[..., :3].std() > 0.02  # the page is not empty
    assert "loss2.png" in done.stdout


@pytest.mark.parametrize(("ranks", "batch"), [(2, "101"), (1, "0"), (1, "100000")])
def test_a_batch_that_does_not_divide(ranks: int, batch: str, tmp_path: Path) -> None:
    done = train(tmp_path, ranks, "--batch-size", batch)
    assert done.returncode not in (0, 124, 137)
    expected = f"train_digits: expected --batch-size to be a multiple of the number of ranks, {ranks}"
    assert done.stderr.count(expected) == 1
    assert f"got {batch}" in done.stderr
