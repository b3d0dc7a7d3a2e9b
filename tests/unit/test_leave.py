"""How ranks, which are threads here, leave a trace: who hears of errors, the parts on rank 0, who speaks with whom."""

from __future__ import annotations

import pickle
import queue
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from pycollective.timeline import leave
from tests.unit.test_report import part
from tests.unit.threaded_ranks import results_of

SIZES = [1, 2, 3, 7, 16, 23]


class Sent:
    """A message that MPI keeps until it is received, as it keeps large ones."""

    def __init__(self, value: Any) -> None:
        self.data = pickle.dumps(value)
        self.is_received = False

    def Test(self) -> bool:  # noqa: N802 (mpi4py's name)
        return self.is_received

    def recv(self) -> Any:
        self.is_received = True
        return pickle.loads(self.data)


class Ranks:
    """Ranks and the messages between them. Each rank runs in a thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        # A SimpleQueue is made in one step: two threads that look for one get the same.
        self.queues: dict[Any, queue.SimpleQueue[Sent]] = defaultdict(queue.SimpleQueue)
        self.messages: list[tuple[int, int]] = []

    def run(self, call: Callable[[Any], Any]) -> list[Any]:
        """What ``call`` returns on each rank."""

        def of_rank(rank: int) -> Any:
            time.sleep(random.Random(rank).random() / 100)
            return call(OneRank(self, rank))

        return results_of(self.size, of_rank)


class OneRank:
    """The functions of mpi4py's communicator that ``leave`` calls."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def isend(self, value: Any, dest: int, tag: int) -> Sent:
        sent = Sent(value)
        self.ranks.messages.append((self.rank, dest))
        self.ranks.queues[self.rank, dest, tag].put(sent)
        return sent

    def improbe(self, source: int, tag: int) -> Sent | None:
        try:
            return self.ranks.queues[source, self.rank, tag].get_nowait()
        except queue.Empty:
            return None


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "a rank waits for ever"
        time.sleep(0.0001)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", [0, 200, 1 << 24])
def test_all_parts_come_to_rank_0_in_order(size: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leave, "BATCH_BYTES", batch)
    ranks = Ranks(size)

    def of_rank(mpi: Any) -> Any:
        assert leave.errors(mpi, wait) == []
        parts = leave.gather(mpi, part(mpi.rank, [(mpi.rank, mpi.rank + 1)] * 3), wait)
        return parts, leave.result(mpi, "full" if mpi.rank == 0 else None, wait)

    results = ranks.run(of_rank)
    assert [own.rank for own in results[0][0]] == [*range(size)]
    assert [own.times[0, 0] for own in results[0][0]] == [1000 * rank for rank in range(size)]
    assert [result for _, result in results] == ["full"] * size
    assert not any(parts for parts, _ in results[1:])
    # Each edge of the tree has a message for each step; rank 0 has few edges.
    assert len({source for source, dest in ranks.messages if dest == 0}) <= (size - 1).bit_length()
    if batch == 1 << 24:
        assert len(ranks.messages) == 4 * (size - 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_raise_keep_nobody_waiting(size: int, seed: int) -> None:
    """All others hear of an error, though no rank that has raised receives a message; rank 0 hears whose it is."""
    raised = {*random.Random(seed).sample(range(size), min(size, 1 + seed % 3))}

    def of_rank(mpi: Any) -> Any:
        if mpi.rank in raised:
            leave.tell_error(mpi, f"rank {mpi.rank} raised")
            return []
        return leave.errors(mpi, wait)

    results = Ranks(size).run(of_rank)
    expected = {f"rank {rank} raised" for rank in raised}
    assert all(told and {*told} <= expected for rank, told in enumerate(results) if rank not in raised)


def test_a_warning_has_few_of_many_errors() -> None:
    def of_rank(mpi: Any) -> list[str]:
        if mpi.rank % 2 == 0:
            return leave.errors(mpi, wait)
        leave.tell_error(mpi, "no luck")
        return []

    assert Ranks(64).run(of_rank)[0] == ["no luck"] * 8
