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


def train(tmp_path: Path, ranks: int, *options: str, optimised: bool = True) -> subprocess.CompletedProcess[str]:
    env = None if optimised else {"XLA_FLAGS": unoptimised.flags()}
    args = ("--plot", str(tmp_path / f"loss{ranks}.png"), "--losses", str(tmp_path / f"losses{ranks}.json"), *options)
    return mpirun(ranks, EXAMPLE, *args, timeout=240, cwd=tmp_path, env=env)


def test_losses_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    curves = []
    for ranks in (1, 2, 4):
        done = train(tmp_path, ranks, *SHORT, optimised=False)
        assert done.returncode == 0, done.stderr
        curves.append(np.array(json.loads((tmp_path / f"losses{ranks}.json").read_text())))
    assert len(curves[0]) == 44
    assert curves[0][-1] < 0.5 * curves[0][0]
    for curve in curves[1:]:
        # float32 sums in another order differ by about 1e-7, and each step of the training amplifies the difference.
        np.testing.assert_allclose(curve, curves[0], rtol=1e-3)
        np.testing.assert_allclose(curve[:10], curves[0][:10], rtol=1e-5)


def test_seeds_differ(tmp_path: Path) -> None:
    curves = []
    for seed in ("0", "1"):
        assert train(tmp_path, 1, "--epochs", "1", "--seed", seed, optimised=False).returncode == 0
        curves.append(json.loads((tmp_path / "losses1.json").read_text()))
    assert curves[0] != curves[1]


@pytest.mark.parametrize("options", [(), ("--wire-dtype", "bfloat16")], ids=["float32", "bfloat16"])
def test_full_run_on_two_ranks(options: tuple[str, ...], tmp_path: Path) -> None:
    done = train(tmp_path, 2, *options)
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


@pytest.mark.parametrize("batch", ["101", "0", "100000"])
def test_a_batch_that_does_not_divide(batch: str, tmp_path: Path) -> None:
    done = train(tmp_path, 2, "--batch-size", batch)
    assert done.returncode not in (0, 124, 137)
    assert done.stderr.count("train_digits: expected --batch-size to be a multiple of the number of ranks, 2") == 1
    assert f"got {batch}" in done.stderr
