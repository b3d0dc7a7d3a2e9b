"""Which process is a rank."""

from __future__ import annotations

import json
import os

import pytest

import pycollective as pc
from pycollective.launch import processes
from pycollective.launch.processes import Parent, parent_rank, refuse_child


def mark(**launched_as: str) -> dict[str, str]:
    told = {"pid": os.getppid(), "name": "rank 1 of 2", "launched_as": launched_as}
    return {"PYCOLLECTIVE_RANK": json.dumps(told)}


def test_the_rank_itself() -> None:
    comm = pc.init()
    told = json.loads(os.environ["PYCOLLECTIVE_RANK"])
    assert (told["pid"], told["name"]) == (os.getpid(), f"rank {comm.rank} of {comm.size}")
    assert parent_rank() is None
    refuse_child("init")


@pytest.mark.parametrize(
    "place", [{"PMI_RANK": "1", "PMI_FD": "9"}, {"PMIX_NAMESPACE": "a", "PMIX_RANK": "1"}, {"SLURM_PROCID": "1"}]
)
def test_a_program_in_the_place_of_a_rank(place: dict[str, str]) -> None:
    assert parent_rank({**mark(**place), **place, "HOME": "/"}) == Parent(os.getppid(), "rank 1 of 2")
    other = {name: f"{value}0" for name, value in place.items()}
    assert parent_rank({**mark(**place), **other}) is None  # which a launcher has started
    assert parent_rank({**mark(**place)}) is None


def test_programs_beside_a_launcher() -> None:
    assert parent_rank({}) is None
    assert parent_rank(mark()) is None  # started by a program of one process
    assert parent_rank({**mark(), "PMI_RANK": "1"}) is None  # a job that it started


def test_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes._Own, "rank", os.getppid())
    assert parent_rank(mark()) == Parent(os.getppid(), "rank 1 of 2")


def test_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOLLECTIVE_RANK", mark()["PYCOLLECTIVE_RANK"])
    monkeypatch.setattr(processes, "parent_process", object)  # made by multiprocessing
    expected = r"expected a rank, got process \d+, a child of rank 1 of 2\. Leave collectives to the rank, and put"
    with pytest.raises(RuntimeError, match=rf"pycollective\.init: {expected}"):
        pc.init()
    monkeypatch.delenv("PYCOLLECTIVE_RANK")
    refuse_child("init")  # its maker is no rank
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(RuntimeError, match="a child of a rank"):
        refuse_child("init")
