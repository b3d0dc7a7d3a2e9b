"""The examples of Fourier transforms: errors and spectra, the same on any mesh."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests import unoptimised
from tests.e2e.launch import EXAMPLES, mpirun

pytestmark = pytest.mark.whole


def run(where: Path, ranks: int, example: str, *options: str, devices: int = 1) -> str:
    env = {"JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": unoptimised.flags()}
    done = mpirun(ranks, str(EXAMPLES / example), *options, timeout=120, cwd=where, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("options", "most"), [(("--size", "33"), 1e-4), (("--size", "32", "--double"), 1e-10)], ids=["single", "double"]
)
def test_poisson_on_a_mesh(tmp_path: Path, options: tuple[str, ...], most: float) -> None:
    """33 rows are blocks of 17 and 16. In double precision the errors are those of the Fourier series."""
    printed = run(tmp_path, 2, "poisson.py", *options, "--columns", "2", devices=2)
    assert "2 x 2 devices" in printed
    errors = [float(error) for error in re.findall(r"\d\.\de-\d\d", printed)]
    assert len(errors) == 2
    assert max(errors) < most


def test_power_spectrum(tmp_path: Path) -> None:
    options = ("--size", "30", "--output", "spectrum.npz")
    run(tmp_path, 1, "power_spectrum.py", *options)
    with np.load(tmp_path / "spectrum.npz") as file:
        one = dict(file)
    printed = run(tmp_path, 2, "power_spectrum.py", *options, devices=2)
    assert "4 devices, 30^3 points" in printed
    with np.load(tmp_path / "spectrum.npz") as file:
        many = dict(file)
    for name in ("k", "power", "given", "modes"):
        np.testing.assert_allclose(many[name], one[name], 1e-4, err_msg=name)
    assert one["modes"][:2].tolist() == [18, 62]
    deviations = (one["power"] / one["given"] - 1) * np.sqrt(one["modes"] / 2)
    assert np.abs(deviations).max() < 4
    assert 0.5 < np.sqrt(np.mean(deviations**2)) < 1.6


def test_bad_options() -> None:
    for example, option, expected in (
        ("poisson.py", ("--columns", "2"), "--columns to be a divisor of 1 devices, got --size 64, --columns 2"),
        ("power_spectrum.py", ("--size", "2"), "expected --size of at least 4, got 2"),
    ):
        done = mpirun(1, str(EXAMPLES / example), *option, timeout=120)
        assert done.returncode != 0
        assert expected in done.stderr
        assert "Traceback" not in done.stderr
