"""Messages between the ranks of a communicator that are not part of programs.

The ranks are a binomial tree. The parent of a rank is the rank without its lowest bit that is set, so rank 0 is the
root, and the ranks of a subtree have consecutive numbers:

    0 ── 1
    ├─── 2 ── 3
    ├─── 4 ── 5
    │    └─── 6 ── 7
    └─── 8 ── ...

A value goes up the tree (:meth:`OutOfBand.reduce`) or down (:meth:`OutOfBand.tell`), in at most ceil(log2(ranks))
messages one after another. Each goes over n - 1 edges, so a rank sends one message up on average, and one down.

A call is a generator. It yields what it waits for, and makes the same steps on all ranks. So a rank may leave a call
whose wait has raised, and go on with it later (:meth:`OutOfBand.complete`): each message is sent and received once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar

from pycollective.errors import message
from pycollective.transport.mpi import MPI

T = TypeVar("T")

Condition = Callable[[], bool]
"""Whether a wait is over; once true, always true."""

Steps = Generator[Condition, None, T]
"""A call, or a part of one: it yields the conditions for which it waits."""

Wait = Callable[[Condition], None]
"""A function that returns when a condition holds; it may raise before."""


def parent_of(rank: int) -> int:
    """The parent of a rank other than rank 0."""
    return rank & (rank - 1)


def children_of(rank: int, size: int) -> Iterator[int]:
    """The children of a rank, in the order of the ranks, which is that of the sizes of their subtrees.

    Example:
        >>> [*children_of(0, 7)], [*children_of(4, 7)], [*children_of(5, 7)]
        ([1, 2, 4], [5, 6], [])
    """
    bit = 1
    while not rank & bit and rank + bit < size:
        yield rank + bit
        bit <<= 1


class _Call(NamedTuple):
    """A call that has begun and has not ended.

    Attributes:
        key: what the call is, with what this rank brings to it.
        steps: its steps that are left.
        awaited: the condition that comes before the next step, at most one.
    """

    key: Hashable
    steps: Steps[Any]
    awaited: list[Condition]


class OutOfBand:
    """Messages between ranks under a tag that no program uses.

    Args:
        mpi: an MPI communicator that belongs to this package.
        tag: the tag of the messages.
    """

    def __init__(self, mpi: MPI.Intracomm, tag: int) -> None:
        self._mpi = mpi
        self._tag = tag
        self._call: _Call | None = None
        self._ended = 0  # the number of calls that have ended
        self._step = 0  # the number of steps of the call so far
        self._sent: list[MPI.Request] = []  # messages of the call that may still need their memory
        self._left: list[MPI.Request] = []  # such messages of calls that have ended by an error

    def complete(self, key: Hashable, begin: Callable[[], Steps[T]], wait: Wait) -> T:
        """Makes a call, or goes on with it, and returns its result. All ranks must make it.

        If ``wait`` raises, the call stays begun. The rank may make it again: with an equal key it goes on. With another
        key the rank first ends the call that has begun, since other ranks may have its messages, and then makes this
        one. If the call that has begun ends by an error, this error is raised.

        Args:
            key: what the call is, with what this rank brings to it.
            begin: returns the steps. They must be the same on all ranks.
            wait: returns when the function that it is given returns True; may raise.
        """
        if self._call is not None and self._call.key != key:
            self._end(self._call, wait)
        if self._call is None:
            self._call = _Call(key, begin(), [])
        result: T = self._end(self._call, wait)
        return result

    def _end(self, call: _Call, wait: Wait) -> Any:
        while True:
            if call.awaited:
                wait(call.awaited[0])  # if this raises, the call stays begun
                call.awaited.clear()
            try:
                call.awaited.append(next(call.steps))
            except BaseException as end:
                self._call = None
                self._ended += 1
                self._step = 0
                if isinstance(end, StopIteration):
                    self._left = [sent for sent in self._left if not sent.Test()]
                    return end.value
                self._left += self._sent
                self._sent = []
                raise

    # Steps ----------------------------------------------------------------------------------------------------

    def reduce(self, own: T, combine: Callable[[T, T], T]) -> Steps[T]:
        """Combines the values of all ranks, in the order of the ranks.

        Args:
            own: this rank's value, an object that can be pickled.
            combine: combines the value of some ranks with that of the ranks that follow them. It is associative.

        Returns:
            The combined value of this rank's subtree: on rank 0 that of all ranks.
        """
        self._step += 1
        value = own
        for child in children_of(self._mpi.rank, self._mpi.size):
            value = combine(value, (yield from self._receive(child)))
        if self._mpi.rank != 0:
            self._send(value, parent_of(self._mpi.rank))
            yield self._have_left
        return value

    def tell(self, value: Any) -> Steps[Any]:
        """Returns rank 0's ``value`` on all ranks; the values of other ranks do not count."""
        self._step += 1
        if self._mpi.rank != 0:
            value = yield from self._receive(parent_of(self._mpi.rank))
        for child in [*children_of(self._mpi.rank, self._mpi.size)][::-1]:  # the largest subtree first
            self._send(value, child)
        yield self._have_left
        return value

    def hand(self, value: T, source: int) -> Steps[T | None]:
        """Returns the ``value`` of the rank ``source`` on rank 0, and None on the other ranks."""
        self._step += 1
        if self._mpi.rank == 0:
            return value if source == 0 else (yield from self._receive(source))
        if self._mpi.rank == source:
            self._send(value, 0)
            yield self._have_left
        return None

    def _send(self, value: Any, dest: int) -> None:
        self._sent.append(self._mpi.isend((self._ended, self._step, value), dest, self._tag))

    def _have_left(self) -> bool:
        """Whether the messages of this call need their memory no longer. MPI may need this rank until then."""
        self._sent = [sent for sent in self._sent if not sent.Test()]
        return not self._sent

    def _receive(self, source: int) -> Steps[Any]:
        found: list[tuple[int, int, Any]] = []

        def has_come() -> bool:
            # The wait may have raised after this was true. Another message is one of a later step.
            if not found and (come := self._mpi.improbe(source, self._tag)) is not None:
                call, step, value = come.recv()
                if call >= self._ended:  # else it belongs to a call that has ended here by an error
                    found.append((call, step, value))
            return bool(found)

        yield has_come
        call, step, value = found[0]
        if (call, step) != (self._ended, self._step):
            expected = f"rank {source} in step {self._step} of call {self._ended} outside programs"
            got = f"a message of step {step} of its call {call}"
            remedy = f"Look at the error by which a call of rank {source} has ended."
            raise RuntimeError(message("Communicator", expected, got, remedy, rank=self._mpi.rank, size=self._mpi.size))
        return value
