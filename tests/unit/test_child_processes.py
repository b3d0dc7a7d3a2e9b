"""Which process is a rank, and which is a child of a rank."""

from __future__ import annotations

import json
import multiprocessing.process
import os

import pytest

import pycollective as pc
from pycollective.launch import child_processes
from pycollective.launch.child_processes import Parent, parent_rank, refuse_child


def mark(**launched_as: str) -> dict[str, str]:
    content = {"pid": os.getppid(), "name": "rank 1 of 2", "launched_as": launched_as}
    return {"PYCOLLECTIVE_RANK": json.dumps(content)}


def test_the_rank_itself() -> None:
    comm = pc.init()
    content = json.loads(os.environ["PYCOLLECTIVE_RANK"])
    assert (content["pid"], content["name"]) == (os.getpid(), f"rank {comm.rank} of {comm.size}")
    assert parent_rank() is None
    refuse_child("init")


@pytest.mark.parametrize(
    "variables",
    [
        {"PMI_RANK": "1", "PMI_FD": "9"},
        {"PMI_RANK": "1", "PMI_PORT": "h:9"},
        {"PMIX_NAMESPACE": "a", "PMIX_RANK": "1"},
        {"OMPI_COMM_WORLD_RANK": "1"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"},
        {"FLUX_JOB_ID": "f1", "FLUX_TASK_RANK": "1"},
    ],
)
def test_a_program_with_the_variables_of_a_rank(variables: dict[str, str]) -> None:
    assert parent_rank({**mark(**variables), **variables, "HOME": "/"}) == Parent(os.getppid(), "rank 1 of 2")
    for name, value in variables.items():  # a launcher has started the program as another rank
        assert parent_rank({**mark(**variables), **variables, name: f"{value}0"}) is None
    assert parent_rank({**mark(**variables)}) is None


def test_programs_beside_a_launcher() -> None:
    assert parent_rank({}) is None
    assert parent_rank(mark()) is None  # started by a program of one process
    assert parent_rank({**mark(), "PMI_RANK": "1"}) is None  # a rank of a job that it started


def test_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes._State, "marked", os.getppid())
    assert parent_rank(mark()) == Parent(os.getppid(), "rank 1 of 2")


def test_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOLLECTIVE_RANK", mark()["PYCOLLECTIVE_RANK"])
    monkeypatch.setattr(multiprocessing.process, "parent_process", object)  # as in its children
    expected = r"expected a rank, got process \d+, a child of rank 1 of 2\. Leave collectives to the rank, and put"
    with pytest.raises(RuntimeError, match=rf"pycollective\.init: {expected}"):
        pc.init()
    monkeypatch.delenv("PYCOLLECTIVE_RANK")
    refuse_child("init")  # the process that started it is no rank
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(RuntimeError, match="a child of a rank"):
        refuse_child("init")
