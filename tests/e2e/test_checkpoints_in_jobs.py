"""An interrupted training goes on from its checkpoint, on the same or another number of ranks and devices."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.launch import EXAMPLES, losses, mpirun

SMALL = ["--layers", "2", "--width", "32", "--batch-size", "8"]
GPT = ["train_gpt.py", *SMALL, "--steps", "8", "--save-every", "4", "--checkpoints", "saved"]
# On 4 devices each has a fourth of Adam's state, then half of each layer and a half of that, then half of the layers.
OTHER_LAYOUTS = [(1, 4, "--data 2 --model 2 --zero 3"), (2, 1, "--stage 2")]
pytestmark = pytest.mark.whole


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    whole = losses(tmp_path, 2, *GPT, "--zero", "2", devices=2)
    steps = sorted(int(path.name) for path in (tmp_path / "saved").iterdir())
    assert len(steps) == 2
    kept = len(whole) * steps[0] // steps[1]
    for ranks, devices, layout in OTHER_LAYOUTS:
        # The training looks as if it had been killed after the checkpoint before the last.
        shutil.rmtree(tmp_path / "saved" / str(steps[-1]))
        resumed = losses(tmp_path, ranks, *GPT, *layout.split(), devices=devices)
        np.testing.assert_allclose(resumed, whole, rtol=1e-4, err_msg=layout)
        assert sorted(int(path.name) for path in (tmp_path / "saved").iterdir()) == steps
        np.testing.assert_array_equal(resumed[:kept], whole[:kept])  # these losses were read
        assert (resumed[kept:] != whole[kept:]).any()  # these steps were trained again, with sums in another order

    # A checkpoint of other settings is refused.
    done = mpirun(1, str(EXAMPLES / GPT[0]), *GPT[1:], "--seed", "7", timeout=60, cwd=tmp_path)
    assert done.returncode != 0
    assert "expected the settings of the checkpoint" in done.stderr
    assert "'seed': 0" in done.stderr
    assert "'seed': 7" in done.stderr
    assert "Traceback" not in done.stderr
