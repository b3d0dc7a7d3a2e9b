"""The clocks of ranks that are threads here: the errors that readings claim, and how many turns follow each other."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pycollective.timeline import clocks
from pycollective.timeline.clocks import Reading, aligned, followers_of, leader_of
from tests.unit.threaded_ranks import results_of


class Ranks:
    """Ranks with clocks of their own, and the messages between them. Each rank runs in a thread."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.random = random.Random(seed)
        # A SimpleQueue is made in one step: two threads that look for one get the same.
        self.queues: dict[Any, queue.SimpleQueue[tuple[bytes, int]]] = defaultdict(queue.SimpleQueue)
        self.offset = [0, *(self.random.randrange(-(10**15), 10**15) for _ in range(size - 1))]
        self.drift = [0, *(self.random.randrange(-(10**5), 10**5) for _ in range(size - 1))]  # in 10^-7
        self.started = time.monotonic_ns()
        self.of_thread = threading.local()

    def clock(self, rank: int, elapsed: int) -> int:
        return self.offset[rank] + elapsed + elapsed * self.drift[rank] // 10**7

    def now_ns(self) -> int:
        return self.clock(self.of_thread.rank, time.monotonic_ns() - self.started)

    def run(self, call: Callable[[Any], Any]) -> list[Any]:
        """What ``call`` returns on each rank."""

        def of_rank(rank: int) -> Any:
            self.of_thread.rank = rank
            return call(OneRank(self, rank))

        results = results_of(self.size, of_rank)
        assert all(waiting.empty() for waiting in self.queues.values())
        return results


class OneRank:
    """The functions of mpi4py's communicator that ``clocks`` calls.

    Attributes:
        turns: the length of the longest chain of turns that led to the last event here.
        given: the number of turns that this rank has given to others.
    """

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size
        self.turns = self.given = 0

    def Send(self, data: Any, dest: int, tag: int) -> None:  # noqa: N802 (mpi4py's name)
        self.given += tag == clocks._TURN
        self.ranks.queues[self.rank, dest, tag].put((data.tobytes(), self.turns))

    def _take(self, data: Any, taken: tuple[bytes, int], tag: int) -> None:
        data[...] = np.frombuffer(taken[0], data.dtype).reshape(data.shape)
        self.turns = max(self.turns, taken[1]) + (tag == clocks._TURN)

    def Recv(self, data: Any, source: int, tag: int) -> None:  # noqa: N802
        if self.rank % 3 == 1:
            time.sleep(1e-4)  # answers come later than questions: the middle of a round trip is wrong
        self._take(data, self.ranks.queues[source, self.rank, tag].get(timeout=60), tag)

    def Irecv(self, data: Any, source: int, tag: int) -> Any:  # noqa: N802
        rank = self

        class Request:
            def Test(self) -> bool:  # noqa: N802
                try:
                    taken = rank.ranks.queues[source, rank.rank, tag].get_nowait()
                except queue.Empty:
                    return False
                rank._take(data, taken, tag)
                return True

        return Request()


def sleep_until(has_come: Callable[[], bool]) -> None:
    while not has_come():
        time.sleep(1e-4)


def levels(size: int, fan_out: int) -> int:
    found = 0
    while fan_out**found < size:
        found += 1
    return found


@pytest.mark.parametrize("fan_out", [2, 3, 16])
@pytest.mark.parametrize("size", [2, 3, 8, 17, 40])
def test_no_clock_is_wrong_by_more_than_its_error(size: int, fan_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(size, seed=size)
    monkeypatch.setattr(clocks, "now_ns", ranks.now_ns)
    monkeypatch.setattr(clocks, "_FAN_OUT", fan_out)
    monkeypatch.setattr(clocks, "_EXCHANGES", 3)

    def readings(mpi: Any) -> tuple[Reading, Reading, int, int, Reading, Reading]:
        begin = clocks.compare(mpi, sleep_until, leaders_first=True)
        turns, given = mpi.turns, mpi.given
        time.sleep(0.01)
        end = clocks.compare(mpi, sleep_until, leaders_first=False)
        return *clocks.to_first(mpi, begin, end, sleep_until), turns, given, begin, end

    found = ranks.run(readings)
    assert max(turns for _, _, turns, _, _, _ in found) <= (fan_out - 1) * levels(size, fan_out)
    for rank, (begin, end, _, given, own_begin, own_end) in enumerate(found):
        assert given == len(followers_of(rank, size)) <= (fan_out - 1) * levels(size, fan_out)
        leader_begin, leader_end = found[leader_of(rank)][:2]
        if rank:
            assert begin.error == own_begin.error + max(leader_begin.error, leader_end.error)
            assert end.error == own_end.error + max(leader_begin.error, leader_end.error)
        for share in (0.0, 0.3, 1.0):  # of the time between the readings
            at = int(begin.at + share * (end.at - begin.at))
            elapsed = round((at - ranks.offset[rank]) * 10**7 / (10**7 + ranks.drift[rank]))
            wrong = int(aligned(np.array([at]), begin, end)[0]) - ranks.clock(0, elapsed)
            assert abs(wrong) <= max(begin.error, end.error) + ROUNDING_NS


ROUNDING_NS = 50
"""Each of at most 6 levels rounds two readings and two conversions."""


def test_the_tree_of_leaders() -> None:
    for size in (1, 2, 15, 16, 17, 255, 1024, 10_240):
        followers = [follower for rank in range(size) for follower in followers_of(rank, size)]
        assert sorted(followers) == [*range(1, size)]
        depth = [0] * size
        for rank in range(1, size):
            depth[rank] = depth[leader_of(rank)] + 1
            assert rank in followers_of(leader_of(rank), size)
        assert max(depth) <= levels(size, 16)
        assert size not in (16, 1024) or max(depth) == levels(size, 16)


@pytest.mark.parametrize(("size", "turns"), [(2, 1), (16, 15), (256, 30), (1024, 33), (4096, 45), (10_240, 47)])
def test_turns_that_follow_each_other(size: int, turns: int) -> None:
    """Before a trace and after it; before it with one leader for all ranks there would be ``size - 1``."""
    ends = [0] * size
    for rank in range(size):  # a leader has a lower number than its followers
        end = ends[rank]
        for follower in reversed(followers_of(rank, size)):
            end = ends[follower] = end + 1
    assert max(ends) == turns <= 15 * levels(size, 16)
    ready = [0] * size
    for rank in reversed(range(size)):
        for follower in followers_of(rank, size):
            ready[rank] = max(ready[rank], ready[follower]) + 1
    assert ready[0] <= 15 * levels(size, 16)
