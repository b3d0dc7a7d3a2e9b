"""An interrupted training goes on from its checkpoint, on the same or another number of ranks and devices."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.launch import EXAMPLES, losses, mpirun

DIGITS = ["train_digits.py", "--epochs", "2", "--checkpoints", "saved"]
GPT = ["train_gpt.py", "--steps", "20", "--save-every", "10", "--checkpoints", "saved"]
pytestmark = pytest.mark.whole


@pytest.mark.parametrize(
    ("arguments", "first", "then"),
    [
        (DIGITS, (2, 1, []), (1, 1, [])),
        (GPT, (2, 2, ["--model-parallel", "4"]), (1, 2, ["--model-parallel", "2"])),
    ],
    ids=["digits", "gpt"],
)
def test_another_number_of_ranks_goes_on(
    arguments: list[str], first: tuple[int, int, list[str]], then: tuple[int, int, list[str]], tmp_path: Path
) -> None:
    whole = losses(tmp_path, first[0], *arguments, *first[2], devices=first[1])
    steps = sorted(int(path.name) for path in (tmp_path / "saved").iterdir())
    assert len(steps) == 2
    # The training looks as if it had been killed after the checkpoint before the last.
    shutil.rmtree(tmp_path / "saved" / str(steps[-1]))
    resumed = losses(tmp_path, then[0], *arguments, *then[2], devices=then[1])
    np.testing.assert_allclose(resumed, whole, rtol=1e-4)
    again = sorted(int(path.name) for path in (tmp_path / "saved").iterdir())
    assert again == steps
    kept = len(whole) * steps[0] // steps[1]
    np.testing.assert_array_equal(resumed[:kept], whole[:kept])  # these losses were read
    assert (resumed[kept:] != whole[kept:]).any()  # these steps were trained again, with sums in another order


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    losses(tmp_path, 1, *DIGITS, "--epochs", "1")
    done = mpirun(2, str(EXAMPLES / DIGITS[0]), *DIGITS[1:], "--epochs", "1", "--seed", "7", timeout=60, cwd=tmp_path)
    assert done.returncode != 0
    assert "expected the settings of the checkpoint" in done.stderr
    assert "'seed': 0" in done.stderr
    assert "'seed': 7" in done.stderr
    assert "Traceback" not in done.stderr
