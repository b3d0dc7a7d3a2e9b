"""Ranks in one thread, which take turns in a random order, and the messages between them, which are counted.

A rank that has to wait raises, and makes its call again at its next turn; sometimes it does so though the wait is over.
So each call is left and made again at all its waits.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pycollective.ranks.out_of_band import Condition, OutOfBand, Steps

TAG = 7


class MustWait(Exception):  # noqa: N818 (it ends a turn, and is no error)
    """A rank waits for another one."""


class Message(NamedTuple):
    """A message on its way; ``depth``: how many messages, one after another, led to it, itself included."""

    data: bytes
    depth: int


class Taken(NamedTuple):
    """A message that a rank has taken out of MPI."""

    mpi: SimulatedMpi
    message: Message

    def recv(self) -> Any:
        own = self.mpi
        own.depth = max(own.depth, self.message.depth)
        own.network.received[own.rank] += len(self.message.data)
        return pickle.loads(self.message.data)


class Sent(NamedTuple):
    """A message that needs its memory until the other rank has taken it, as MPI sends large ones."""

    queue: deque[Message]
    message: Message

    def Test(self) -> bool:  # noqa: N802 (mpi4py's name)
        return not any(self.message is waiting for waiting in self.queue)


@dataclass
class Network:
    """What travels between the ranks.

    Attributes:
        size: the number of ranks.
        delay: the probability that a rank that looks for a message does not see it yet, and that it leaves a call whose
            wait is over.
        random: the source of the random numbers.
    """

    size: int
    delay: float
    random: random.Random
    queues: dict[tuple[int, int], deque[Message]] = field(default_factory=lambda: defaultdict(deque))
    messages: Counter[int] = field(default_factory=Counter)  # sent, by rank
    sent: Counter[int] = field(default_factory=Counter)  # bytes, by rank
    received: Counter[int] = field(default_factory=Counter)


@dataclass
class SimulatedMpi:
    """The functions of mpi4py's communicator that ``OutOfBand`` calls."""

    network: Network
    rank: int
    depth: int = 0

    @property
    def size(self) -> int:
        return self.network.size

    def isend(self, value: Any, dest: int, tag: int) -> Sent:
        assert tag == TAG
        assert 0 <= dest < self.size
        assert dest != self.rank
        message = Message(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), self.depth + 1)
        queue = self.network.queues[self.rank, dest]
        queue.append(message)
        self.network.messages[self.rank] += 1
        self.network.sent[self.rank] += len(message.data)
        return Sent(queue, message)

    def improbe(self, source: int, tag: int) -> Taken | None:
        assert tag == TAG
        queue = self.network.queues[source, self.rank]
        if not queue or self.network.random.random() < self.network.delay:
            return None
        return Taken(self, queue.popleft())


@dataclass
class Rank:
    """A rank of a communicator, as ``ranks.meeting`` sees it."""

    mpi: SimulatedMpi
    _out_of_band: OutOfBand

    @property
    def rank(self) -> int:
        return self.mpi.rank

    @property
    def size(self) -> int:
        return self.mpi.size

    def turn(self, key: Hashable, begin: Callable[[], Steps[Any]]) -> Any:
        """Makes a call, or goes on with it. Raises MustWait where the rank would sleep."""
        return self._out_of_band.complete(key, begin, self._go_or_wait)

    def _go_or_wait(self, condition: Condition) -> None:
        network = self.mpi.network
        if not condition() or network.random.random() < network.delay:
            raise MustWait


def ranks_of(size: int, *, seed: int = 0, delay: float = 0.3) -> list[Any]:
    """Simulated ranks; Any, since they stand for communicators."""
    network = Network(size, delay, random.Random(f"{size} {seed}"))
    found = []
    for rank in range(size):
        mpi: Any = SimulatedMpi(network, rank)
        found.append(Rank(mpi, OutOfBand(mpi, TAG)))
    return found


def call_all(ranks: Sequence[Any], calls: Callable[[Any], tuple[Hashable, Callable[[], Steps[Any]]]]) -> list[Any]:
    """Each rank makes its call, of which ``calls`` returns the arguments. Returns results, or the errors."""
    network = ranks[0].mpi.network
    begun = [calls(rank) for rank in ranks]
    results: dict[int, Any] = {}
    for _ in range(1000 * len(ranks)):
        waiting = [rank for rank in ranks if rank.rank not in results]
        if not waiting:
            return [results[rank.rank] for rank in ranks]
        rank = network.random.choice(waiting)
        try:
            results[rank.rank] = rank.turn(*begun[rank.rank])
        except MustWait:
            pass
        except Exception as error:
            results[rank.rank] = error
    raise AssertionError(f"ranks {sorted(set(range(len(ranks))) - set(results))} wait for ever")
