"""The diffusion example finds the same amplitudes on any mesh, and they are those of the measured temperature."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests import unoptimised
from tests.e2e.launch import EXAMPLES, mpirun

EXAMPLE = str(EXAMPLES / "diffusion.py")
pytestmark = pytest.mark.whole


def find(where: Path, ranks: int, *options: str, devices: int = 1) -> tuple[dict[str, np.ndarray], str]:
    """Returns what the example has written and printed."""
    file = where / "found.npz"
    env = {"JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": unoptimised.flags()}
    start = (EXAMPLE, "--size", "16", "--steps", "60", "--output", str(file), *options)
    done = mpirun(ranks, *start, timeout=240, cwd=where, env=env)
    assert done.returncode == 0, done.stderr
    with np.load(file) as arrays:
        return dict(arrays), done.stdout


def poisson(amplitudes: np.ndarray) -> np.ndarray:
    """The temperature at 16 x 16 points, by a dense matrix."""
    size, waves = 16, np.arange(3)[:, None] * np.pi
    points = np.arange(size + 2) / (size + 1)
    k = np.exp(np.einsum("ab,ai,bj->ij", amplitudes, np.cos(waves * points), np.cos(waves * points)))
    matrix = np.zeros((size, size, size, size))
    for i in range(size):
        for j in range(size):
            for di, dj in ((0, 1), (0, -1), (1, 0), (-1, 0)):
                between = (k[i + 1, j + 1] + k[i + 1 + di, j + 1 + dj]) / 2
                matrix[i, j, i, j] += between
                if 0 <= i + di < size and 0 <= j + dj < size:
                    matrix[i, j, i + di, j + dj] -= between
    source = np.full(size**2, 1 / (size + 1) ** 2)
    return np.linalg.solve(matrix.reshape(size**2, -1), source).reshape(size, size)


def test_amplitudes_do_not_depend_on_the_mesh(tmp_path: Path) -> None:
    one, _ = find(tmp_path, 1)
    many, printed = find(tmp_path, 2, "--columns", "2", devices=2)
    assert "2 x 2 devices, 16 x 16 points" in printed
    assert re.search(r"solver: \d\d iterations, residual \d\.\de-0\d", printed)
    assert one["losses"][-1] < 1e-3 * one["losses"][0]
    np.testing.assert_allclose(many["losses"], one["losses"], 0.02, 1e-6)
    np.testing.assert_allclose(many["temperature"], one["temperature"], 1e-3)
    truth = np.array([[0.3, -0.5, 0.2], [0.4, 0.1, -0.2], [-0.3, 0.2, 0.1]])
    np.testing.assert_allclose(one["temperature"], poisson(truth), 1e-3)
    np.testing.assert_allclose(many["amplitudes"], truth, 0, 0.1)
