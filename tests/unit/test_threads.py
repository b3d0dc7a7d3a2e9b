"""A rank's share of its host's cores, on hosts with more cores than this one."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pycollective.ranks import xla_threads


class Neighbours:
    """The ranks of a host, of which each may use the same cores."""

    rank = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def allgather(self, told: Any) -> list[Any]:
        return [told] * self.number


@pytest.mark.parametrize(("cores", "ranks", "variable"), [(8, 2, "4"), (6, 4, "1"), (64, 4, "16"), (8, 1, None)])
def test_what_xla_is_told(cores: int, ranks: int, variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr(xla_threads, "devices_have_started", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    with xla_threads.shared_cores(Neighbours(ranks)):  # type: ignore[arg-type]
        assert os.environ.get("NPROC") == variable
    assert "NPROC" not in os.environ


def test_the_users_number_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "3")
    monkeypatch.setattr(xla_threads, "devices_have_started", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    with xla_threads.shared_cores(Neighbours(2)):  # type: ignore[arg-type]
        assert os.environ["NPROC"] == "3"
    assert os.environ["NPROC"] == "3"
