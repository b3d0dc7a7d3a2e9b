"""Programs on stand-ins for GPUs compute the same as on CPUs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests import unoptimised
from tests.e2e.launch import EXAMPLES, losses, mpirun

ROOT = EXAMPLES.parent
EPOCH = ("--epochs", "1")
STEPS = ("--steps", "10")
pytestmark = pytest.mark.whole


def losses_on_standins(
    where: Path, ranks: int, example: str, *options: str, mode: str = "staged", devices: int = 1, piece: int = 4096
) -> np.ndarray:
    file = where / "standin.json"
    env = {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": unoptimised.flags(),
        "PYTHONPATH": str(ROOT),
        "PYCOLLECTIVE_STAGE_BYTES": str(piece),
    }
    program = ("-m", "tests.standin", mode, str(EXAMPLES / example), "--losses", str(file))
    done = mpirun(ranks, *program, *options, timeout=240, cwd=where, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return np.array(json.loads(file.read_text()))


def test_digits(tmp_path: Path) -> None:
    on_cpus = losses(tmp_path, 2, "train_digits.py", *EPOCH)
    on_standins = losses_on_standins(tmp_path, 2, "train_digits.py", *EPOCH, mode="direct")
    # All bits are equal: a sum of two numbers does not depend on their order.
    np.testing.assert_array_equal(on_standins, on_cpus)


def test_gpt_on_several_devices_of_each_rank(tmp_path: Path) -> None:
    on_cpus = losses(tmp_path, 2, "train_gpt.py", *STEPS, devices=2)
    on_standins = losses_on_standins(tmp_path, 2, "train_gpt.py", *STEPS, devices=2)
    np.testing.assert_allclose(on_standins, on_cpus, rtol=1e-4)
