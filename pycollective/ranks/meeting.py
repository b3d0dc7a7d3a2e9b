"""Calls that all ranks make outside programs: the first call of a function, ``assert_equal_across``, ``trace``, ...

Each begins with a meeting (:func:`meet`). A meeting combines a value of fixed size of each rank, and shows whether all
ranks make the same call. So two ranks in different calls get an error, and never take a message of one call for one of
another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from pycollective.errors import fail, message
from pycollective.faults import rank_exit
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.out_of_band import Condition, Steps, Wait
from pycollective.ranks.setup import timeout
from pycollective.transport.watch import waiting

T = TypeVar("T")

FIRST_CALL = "the first call of a function"

_LATER_S = 10.0
"""How much later than its limit a wait of this file raises. Before that the monitor reports the wait, with the ranks
that are missing, and ends the job (native/monitor/monitor.h)."""


def digest_of(value: Any) -> bytes:
    """A digest of an object by its text (``repr``).

    It is a SHA-256. Among k different texts two have the same digest with a probability of k^2 / 2^257: of 10^12 texts
    10^-53. Nobody chooses the texts to make digests meet.
    """
    return hashlib.sha256(repr(value).encode()).digest()


class Sameness(NamedTuple):
    """Whether consecutive ranks have the same value, by its digest.

    Attributes:
        rank: the lowest of the ranks.
        digest: the digest of its value.
        other: the lowest rank whose digest is another one; None if there is none.
    """

    rank: int
    digest: bytes
    other: int | None = None

    @staticmethod
    def of(comm: Communicator, value: Any) -> Sameness:
        """That of this rank alone."""
        return Sameness(comm.rank, digest_of(value))

    def followed_by(self, later: Sameness) -> Sameness:
        """That of these ranks and of those that follow them.

        Example:
            >>> a, b, c = Sameness(0, b"x"), Sameness(1, b"y"), Sameness(2, b"x")
            >>> a.followed_by(b.followed_by(c)) == a.followed_by(b).followed_by(c) == Sameness(0, b"x", other=1)
            True
        """
        if self.other is not None:
            return self
        return self._replace(other=later.rank if later.digest != self.digest else later.other)


class OtherCall(NamedTuple):
    """A rank makes another call.

    Attributes:
        what: the call, for messages.
        rank: the lowest rank that makes another call than rank 0; on the ranks that do so rank 0.
    """

    what: str
    rank: int


class _Meeting(NamedTuple):
    """What consecutive ranks bring to a call.

    Attributes:
        rank: the lowest of the ranks.
        what: the call that it makes.
        other: the lowest rank that makes another call, and this call.
        value: the combined value of the ranks, if all make one call.
    """

    rank: int
    what: str
    other: OtherCall | None
    value: Any


def meet(comm: Communicator, what: str, own: T, combine: Callable[[T, T], T]) -> Steps[T | OtherCall]:
    """The first step of each call outside programs. It combines a value of each rank, if all make the same call.

    Args:
        comm: the ranks.
        what: the call, for the messages of other ranks: "a call of trace".
        own: this rank's value, an object that can be pickled.
        combine: combines the value of some ranks with that of the ranks that follow them. It is associative.

    Returns:
        The combined value, the same on all ranks; or another call, on all ranks.
    """

    def both(lower: _Meeting, higher: _Meeting) -> _Meeting:
        other = lower.other
        if other is None:
            differs = higher.what != lower.what
            other = OtherCall(higher.what, higher.rank) if differs else higher.other
        value = None if other is not None else combine(lower.value, higher.value)
        return _Meeting(lower.rank, lower.what, other, value)

    out = comm._out_of_band
    met: _Meeting = yield from out.tell((yield from out.reduce(_Meeting(comm.rank, what, None, own), both)))
    if met.other is None:
        value: T = met.value
        return value
    return met.other if what == met.what else OtherCall(met.what, 0)


def same_call(comm: Communicator, where: str, met: T | OtherCall) -> T:
    """The value of a meeting. It raises RuntimeError on all ranks if one of them makes another call.

    Args:
        comm: the ranks.
        where: the operation, for messages.
        met: the result of :func:`meet`.
    """
    if isinstance(met, OtherCall):
        expected, got = f"the other ranks to call {where} too", f"{met.what} on rank {met.rank}"
        fail(RuntimeError, where, comm, expected, got, "All ranks must make the same calls in the same order.")
    return met


def meet_or_fail(comm: Communicator, where: str, own: T, combine: Callable[[T, T], T], *, what: str = "") -> Steps[T]:
    """As :func:`meet`, but raises as :func:`same_call` does. ``what``: a call of ``where`` by default."""
    return same_call(comm, where, (yield from meet(comm, what or f"a call of {where}", own, combine)))


def first_of(lower: T | None, higher: T | None) -> T | None:
    """Combines what only some ranks bring: that of the lowest rank that brings it."""
    return higher if lower is None else lower


def complete(comm: Communicator, where: str, name: str, key: Hashable, begin: Callable[[], Steps[T]]) -> T:
    """Makes a call outside programs. All ranks must make it; it sleeps until they do, since tracing takes long.

    Args:
        comm: the ranks.
        where: the operation, for messages.
        name: the function that is called, for messages.
        key: see :meth:`OutOfBand.complete`.
        begin: see there.

    Raises:
        RuntimeError: another rank does not make this call within the timeout of ``init``.
    """
    comm._check_live(where)
    sleep_until = waiter(comm, where, f"call {name}")

    def wait(condition: Condition) -> None:
        if not condition():
            with waiting(FIRST_CALL, comm._identity):  # a record for each wait: the rank may compute between two
                sleep_until(condition)

    return comm._out_of_band.complete(key, begin, wait)


def waiter(comm: Communicator, where: str, what: str) -> Wait:
    """A function that sleeps until the function that it is given returns True. The caller records the wait.

    It raises RuntimeError when it has waited for longer than the timeout of ``init``, and no report has ended the job.

    Args:
        comm: the ranks, for messages.
        where: the operation, for messages.
        what: what the other ranks have to do, for messages.
    """
    missing = f"the other ranks to {what} too"
    remedy = "Look for a rank that calls something else, or has ended."
    limit = timeout()

    def wait(has_come: Condition) -> None:
        for waited in rank_exit.poll_until(has_come, 0.01):
            if limit is not None and waited > limit + _LATER_S:
                got = f"no call from some of them for {waited:.0f} s"
                raise RuntimeError(message(where, missing, got, remedy, rank=comm.rank, size=comm.size))

    return wait
