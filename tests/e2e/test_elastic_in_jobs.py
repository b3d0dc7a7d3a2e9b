"""``pc.elastic.run``: ranks go on without those that were killed, where MPI can; else a sentence says that it cannot.

The program is elastic_training.py. What it ends with is compared with a training without MPI.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycollective.launch.find_mpi import ELASTIC_LAUNCH
from tests import unoptimised
from tests.e2e.launch import EXAMPLES, is_open_mpi, losses, mpirun

TRAINING = str(Path(__file__).with_name("elastic_training.py"))
STEPS = 20

pytestmark = pytest.mark.library


def start(
    ranks: int, *arguments: str, ulfm: bool = True, devices: int = 1, **env: str
) -> subprocess.CompletedProcess[str]:
    fast = {"JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": unoptimised.flags()}
    options = ["--with-ft", "ulfm"] if ulfm and is_open_mpi() else []
    return mpirun(ranks, TRAINING, *arguments, timeout=120, env={**fast, **env}, options=options)


@pytest.fixture
def ulfm() -> None:
    if not is_open_mpi():
        pytest.skip("LOUD: ranks go on after a failure under Open MPI alone, whose environment runs these tests")


def survivors(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What the ranks that are left have printed, by their places at the start. They have trained to the right end."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = sorted((line for line in lines if "w" in line), key=lambda line: line["start"])
    for line in found:
        assert line["size"] == line["returned"] == len(found)
        assert line["step"] == STEPS
        np.testing.assert_allclose(line["w"], line["want"], rtol=1e-4)
    return found


@pytest.mark.usefixtures("ulfm")
@pytest.mark.parametrize("way", ["axis", "communicator", "effect", "eager", "messages", "gather"])
def test_a_killed_rank(way: str) -> None:
    done = start(3, way, "kill", "2:7")
    left = survivors(done)
    assert [line["start"] for line in left] == [0, 1]
    assert all(line["from"] == [0, 5] for line in left)
    assert done.stderr.count("rank 2 of 3 failed; 2 ranks go on from commit 1.") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("ulfm")
def test_the_lowest_rank_with_several_devices() -> None:
    left = survivors(start(3, "devices", "kill", "0:7", devices=2))
    assert [line["start"] for line in left] == [1, 2]


@pytest.mark.usefixtures("ulfm")
def test_calls_that_ranks_compare_in_a_ring() -> None:
    survivors(start(3, "axis", "kill", "1:7", PYCOLLECTIVE_SHARED_MEMORY="off"))


@pytest.mark.usefixtures("ulfm")
@pytest.mark.parametrize("others", [[], ["1:trace"]], ids=["compiled together", "another rank traces"])
def test_in_the_first_call_before_any_commit(others: list[str]) -> None:
    left = survivors(start(3, "axis", "kill", "2:0", *others))
    assert all(line["from"] == [0, 0] for line in left)


@pytest.mark.usefixtures("ulfm")
def test_in_the_midst_of_a_commit() -> None:
    left = survivors(start(3, "axis", "kill", "2:commit"))
    assert len({tuple(line["from"]) for line in left}) == 1
    assert left[0]["from"] in ([0, 5], [0, 0])


@pytest.mark.usefixtures("ulfm")
def test_one_failure_after_another() -> None:
    done = start(3, "axis", "kill", "1:6", "2:12")
    (left,) = survivors(done)
    assert left["from"] == [0, 5, 10]
    assert done.stderr.count("rank 1 of 3 failed; 2 ranks go on from commit 1.") == 1
    # By its number in MPI_COMM_WORLD: in the world of the two that were left it was rank 1.
    assert done.stderr.count("rank 2 of 3 failed, after rank 1; 1 rank goes on from commit 2.") == 1


@pytest.mark.usefixtures("ulfm")
def test_a_failure_in_the_midst_of_what_follows_another() -> None:
    done = start(3, "axis", "kill", "2:7", "1:again")
    survivors(done)
    assert "ranks 1, 2 of 3 failed; 1 rank goes on from commit 1." in done.stderr


@pytest.mark.usefixtures("ulfm")
def test_after_the_training_has_returned() -> None:
    assert len(survivors(start(3, "axis", "kill", "2:end"))) == 2


@pytest.mark.usefixtures("ulfm")
def test_a_rank_that_waits_for_one_that_lives() -> None:
    left = survivors(start(3, "axis", "split", "2:7"))
    for line in left:
        assert "expected a live communicator, got world/0, which has lost a rank" in line["part"]


@pytest.mark.usefixtures("ulfm")
def test_a_rank_that_notices_late() -> None:
    """Rank 0 waits for rank 1 longer than a monitor lets ranks wait for one that has ended."""
    survivors(start(3, "axis", "kill", "2:7", "1:slow"))


@pytest.mark.usefixtures("ulfm")
def test_a_stopped_rank_ends_the_job() -> None:
    """The report kills it. For MPI it has failed then, but nobody says that the others go on."""
    done = start(3, "axis", "late", "1:stopped", PYCOLLECTIVE_TIMEOUT="5", PYCOLLECTIVE_RECORDS="off")
    assert done.returncode not in (0, 124, 137)
    assert "got none for" in done.stderr
    assert "Look at rank 1: the others wait for it." in done.stderr
    assert "go on" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("ulfm")
@pytest.mark.parametrize("ranks", [2, 3])  # of one rank mpiexec would report success
def test_too_few_ranks_are_left(ranks: int) -> None:
    last = ranks - 1
    done = start(ranks, "axis", "most", f"{last}:7")
    assert done.returncode not in (0, 124, 137)
    want = f"expected min_ranks={ranks} ranks or more, got {last}, since rank {last} of {ranks} failed"
    assert want in done.stderr


def test_an_exception_ends_all() -> None:
    done = start(3, "axis", "raise")
    assert done.returncode not in (0, 124, 137)
    assert "pycollective: rank 1 of 3 raised; ending all ranks." in done.stderr
    assert done.stderr.count("ValueError: no luck") == 1
    assert done.stderr.count("Traceback") == 1


def test_where_mpi_cannot() -> None:
    done = start(2, "axis", "nothing", ulfm=False)
    survivors(done)
    assert done.stderr.count(f"a rank that fails ends the job. {ELASTIC_LAUNCH} goes on.") == 1
    assert "pycollective run --restarts N" in done.stderr


def test_where_mpi_cannot_but_must() -> None:
    done = start(2, "axis", "required", ulfm=False)
    assert done.returncode not in (0, 124, 137)
    assert "pycollective.elastic.run: expected an MPI that goes on when a rank fails, got" in done.stderr


def test_the_example(tmp_path: Path) -> None:
    undisturbed = losses(tmp_path, 2, "train_elastic.py", "--steps", "25")
    assert len(undisturbed) == 25
    if is_open_mpi():
        options = ["--with-ft", "ulfm"]
        file = tmp_path / "killed.json"
        fast = {"JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": unoptimised.flags()}
        example = [str(EXAMPLES / "train_elastic.py"), "--steps", "25", "--kill", "15", "--losses", str(file)]
        done = mpirun(3, *example, timeout=240, env=fast, options=options)
        assert done.returncode == 0, done.stderr
        assert "on 2 ranks" in done.stdout
        np.testing.assert_allclose(json.loads(file.read_text()), undisturbed, rtol=1e-3)
