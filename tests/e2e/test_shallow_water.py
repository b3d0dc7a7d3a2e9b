"""The shallow-water example has the same fields on any mesh, conserves what it should, and keeps balanced jets."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests import unoptimised
from tests.e2e.launch import EXAMPLES, mpirun

EXAMPLE = str(EXAMPLES / "shallow_water.py")
pytestmark = pytest.mark.whole


def solve(where: Path, ranks: int, *options: str, devices: int = 1) -> tuple[dict[str, np.ndarray], str]:
    """Returns what the example has written and printed."""
    file = where / "fields.npz"
    env = {"JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": unoptimised.flags()}
    done = mpirun(ranks, EXAMPLE, "--size", "32", "--output", str(file), *options, timeout=120, cwd=where, env=env)
    assert done.returncode == 0, done.stderr
    with np.load(file) as arrays:
        return dict(arrays), done.stdout


def test_fields_do_not_depend_on_the_mesh(tmp_path: Path) -> None:
    one, _ = solve(tmp_path, 1, "--steps", "150")
    plot = ("--plot", "jets.png")
    many, printed = solve(tmp_path, 2, "--steps", "150", "--columns", "2", "--report-every", "70", *plot, devices=2)
    assert "2 x 2 devices, 32 x 32 cells, 150 steps" in printed
    assert len(re.findall(r"relative change [+-]\d\.\de-\d\d|relative change \+0\.0e\+00", printed)) == 2
    assert (tmp_path / "jets.png").stat().st_size > 0
    for name in ("h", "u", "v"):
        assert one[name].shape == (32, 32)
        np.testing.assert_allclose(many[name], one[name], 0, 1e-5 * np.abs(one[name]).max(), err_msg=name)
    assert many["masses"].shape == many["energies"].shape == (4,)
    for sums in (one, many):
        np.testing.assert_allclose(sums["masses"], sums["masses"][0], rtol=1e-6)
        np.testing.assert_allclose(sums["energies"], sums["energies"][0], rtol=1e-5)


def test_the_coriolis_force_holds_the_jets(tmp_path: Path) -> None:
    """After two hours they still have their speed and place, although waves could have crossed the square."""
    start, _ = solve(tmp_path, 1, "--steps", "1")
    later, _ = solve(tmp_path, 1, "--steps", "20")
    jets = start["u"].mean(axis=1)
    assert jets.max() == pytest.approx(12, rel=0.02)
    assert jets.min() == pytest.approx(-12, rel=0.02)
    np.testing.assert_allclose(later["u"].mean(axis=1), jets, atol=0.6)
    assert 0.01 < np.abs(later["v"]).max() < 1.2  # the wave has begun to bend them


def test_bad_options() -> None:
    for option, expected in (
        (("--columns", "2"), "expected --columns to be a divisor of 1 devices"),
        (("--report-every", "0"), "expected --steps and --report-every to be positive, got 1500 and 0"),
    ):
        done = mpirun(1, EXAMPLE, *option, timeout=120)
        assert done.returncode != 0
        assert expected in done.stderr
        assert "Traceback" not in done.stderr
