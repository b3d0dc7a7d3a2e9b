"""examples/train_gpt.py has the losses of one process on any layout. Layouts that cannot be are refused."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pycollective.planning import Estimator, Layout
from pycollective.planning.by_formulas.step_record import Steps
from pycollective.planning.example import profile as example
from tests import unoptimised
from tests.e2e.launch import EXAMPLES, mpirun

pytestmark = pytest.mark.whole

SMALL = ["--steps", "10", "--layers", "2", "--width", "32", "--batch-size", "8"]

# Several layouts are trained by one start of the ranks: a start takes longer than ten steps.
RUN = f"""
import json, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import train_gpt
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    train_gpt.main()
"""

# By ranks and devices of each. Together they have each strategy, and beside each other one that it could disturb.
LAYOUTS: dict[tuple[int, int], dict[str, str]] = {
    (2, 1): {
        "context": "--context 2",
        "1f1b": "--stage 2 --cuts 1,3 --step-times times.json",
        "interleaved": "--stage 2 --schedule interleaved --microbatches 4 --cuts 1,1,1,1",
        "remat, model": "--model 2 --remat",
        "remat, zero 3": "--zero 3 --remat",
        "remat, interleaved": "--stage 2 --schedule interleaved --microbatches 2 --remat",
    },
    (2, 2): {
        "model inside each rank": "--model 2",
        "zero 2 over data and context": "--data 2 --context 2 --zero 2",
        "zero 3 and model": "--data 2 --model 2 --zero 3",
        "context and model": "--context 2 --model 2",
    },
    (4, 1): {
        "gpipe and data": "--stage 2 --schedule gpipe --zero 1",
        "zero-bubble": "--stage 4 --schedule zero-bubble --microbatches 8",
        "1f1b and model": "--stage 2 --model 2",
    },
}
# With the layout whose losses they almost have.
NARROW: dict[tuple[int, int], dict[str, str]] = {(2, 2): {"model inside each rank": "--model 2 --wire-dtype bfloat16"}}
# Devices that train apart: the losses depend on how many there are, and on nothing else.
APART: dict[tuple[int, int], dict[str, str]] = {
    (2, 1): {"apart": "--local-steps 4"},
    (2, 2): {"apart, model": "--local-steps 4 --data 2 --model 2"},
    (4, 1): {"apart, stages": "--local-steps 4 --data 2 --stage 2"},
}


def train(
    tmp_path: Path, ranks: int, devices: int, layouts: dict[str, str], start: Sequence[str] = (), **variables: str
) -> dict[str, np.ndarray]:
    """Returns the losses of each layout. ``start``: arguments of Python before the program."""
    arguments = [[*SMALL, *options.split(), "--losses", f"{i}.json"] for i, options in enumerate(layouts.values())]
    env = {"JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": unoptimised.flags(), **variables}
    (tmp_path / "run.py").write_text(RUN)
    done = mpirun(ranks, *start, "run.py", json.dumps(arguments), timeout=400, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    return {name: np.array(json.loads((tmp_path / f"{i}.json").read_text())) for i, name in enumerate(layouts)}


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return train(tmp_path_factory.mktemp("one"), 1, 1, {"one": ""})["one"]


@pytest.fixture(scope="module")
def of_two_apart(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return train(tmp_path_factory.mktemp("two"), 1, 2, {"two": "--local-steps 4"})["two"]


@pytest.mark.parametrize(("ranks", "devices"), LAYOUTS)
def test_losses_are_those_of_one_process(
    tmp_path: Path, of_one_process: np.ndarray, of_two_apart: np.ndarray, ranks: int, devices: int
) -> None:
    together, apart = LAYOUTS[ranks, devices], APART[ranks, devices]
    narrow = {f"{name}, 16 bits": (name, options) for name, options in NARROW.get((ranks, devices), {}).items()}
    got = train(tmp_path, ranks, devices, together | apart | {name: options for name, (_, options) in narrow.items()})
    assert of_one_process[-1] < 0.9 * of_one_process[0]
    assert abs(of_two_apart - of_one_process)[:5].max() > 1e-4
    for name, losses in got.items():
        want = of_two_apart if name in apart else of_one_process
        np.testing.assert_allclose(losses, want, rtol=5e-3 if name in narrow else 1e-4, err_msg=name)
        assert name not in narrow or (losses != got[narrow[name][0]]).any()
    if (ranks, devices) == (2, 1):
        seconds, memory = Steps.load(tmp_path / "times.json")
        assert len(seconds) == 10
        assert min(seconds) > 0
        assert memory is not None
        assert memory > 0


def test_on_standins_for_gpus(tmp_path: Path, of_one_process: np.ndarray) -> None:
    variables = {"PYTHONPATH": str(EXAMPLES.parent), "PYCOLLECTIVE_STAGE_BYTES": "4096"}
    staged = train(tmp_path, 2, 2, {"staged": ""}, ("-m", "tests.standin", "staged"), **variables)["staged"]
    np.testing.assert_allclose(staged, of_one_process, rtol=1e-4)


# By options: cuts of a pipeline, and a layout. Each of them has something of its own in memory.
IN_MEMORY = {
    "--data 2": Layout(2, 1, 1, 1),
    "--model 2 --remat": Layout(1, 2, 1, 1, remat=True),
    "--stage 2 --schedule gpipe --microbatches 2 --cuts 3,3": Layout(1, 1, 1, 2, schedule="gpipe", microbatches=2),
    "--stage 2 --schedule 1f1b --microbatches 4 --cuts 3,3": Layout(1, 1, 1, 2, schedule="1f1b", microbatches=4),
}


def test_the_memory_of_a_layout_is_what_was_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    network = ["--layers", "4", "--width", "256", "--batch-size", "16"]
    files = [tmp_path / f"{i}.json" for i in range(len(IN_MEMORY))]
    options = [options.split() for options in IN_MEMORY]
    arguments = [
        [*network, *of_layout, "--steps", "3", "--step-times", str(file)]
        for of_layout, file in zip(options, files, strict=True)
    ]
    done = mpirun(2, "-c", RUN, json.dumps(arguments), timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    described = runpy.run_path(str(EXAMPLES / "train_gpt.py"))["network"](network)
    for (words, layout), file in zip(IN_MEMORY.items(), files, strict=True):
        took = Steps.load(file).memory
        assert took is not None
        predicted = Estimator(described, example).estimate(layout).memory
        assert 0.85 < predicted / took < 1.15, (words, predicted, took)


REFUSED = {
    "--data 2": "expected --data x --context x --model x --stage to be the 4 devices, got 2 x 1 x 1 x 1",
    "--batch-size 6": r"expected --batch-size to be a multiple of 4 \(--data\) x 1 \(--microbatches\), got 6",
    "--model 4 --width 30": "expected --model to be a divisor of 4 heads and --width a multiple of them, got 4 and 30",
    "--microbatches 4": "expected --stage above 1 for --schedule or --microbatches, got 1",
    "--stage 4 --layers 3 --schedule interleaved": "expected at most 5 parts of the network, got 8",
    "--stage 2 --cuts 2,2,1": "expected --cuts with a number for each of 2 stages or chunks, got 2,2,1",
    "--stage 2 --schedule interleaved --cuts 2,3": "for each of 4 stages or chunks, got 2,3",
    "--stage 2 --cuts 5,0": "expected --cuts of 5 parts, one or more for each of 2 stages or chunks, got 5,0",
    "--stage 2 --zero 3": "expected --zero 0, 1 or 2 with stages, got 3",
    "--zero 1 --local-steps 5": "expected --zero 0 with --local-steps, got 1",
    "--local-steps -1": "expected numbers of devices, stages, microbatches from 1 on, and of local steps from 0 on",
}

SAY = f"""
import json, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import train_gpt
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments.split()
    try:
        train_gpt.main()
    except SystemExit as end:
        print("end", end, flush=True)
"""


def test_layouts_that_cannot_be_are_refused_in_a_sentence() -> None:
    done = mpirun(4, "-c", SAY, json.dumps(list(REFUSED)), timeout=120, env={"JAX_NUM_CPU_DEVICES": "1"})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("end ")]
    said = [line for line in lines if line != "end 1"]
    assert len(lines) == 4 * len(said) == 4 * len(REFUSED)  # rank 0 says it, and the others end with it
    for sentence, line in zip(REFUSED.values(), said, strict=True):
        assert re.search(sentence, line), line
