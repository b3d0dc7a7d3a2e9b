"""The offset of each rank's clock from rank 0's clock.

The ranks are a tree of few levels, in which each rank has a leader. With F = ``_FAN_OUT`` the leader of a rank is the
rank without its lowest digit that is not 0, in numbers to the base F. So up to F ranks have rank 0 as their leader, and
rank r reaches rank 0 over at most ceil(log_F(ranks)) leaders. The followers of a leader have their turns one after
another, those of different leaders at the same time: at most (F - 1) ceil(log_F(ranks)) turns follow each other.

In its turn a rank asks its leader for the time many times, by a message and its answer, and takes the answer with the
shortest round trip. The error of this reading is at most half of the round trip. The clocks of hosts drift, so each
rank makes a reading before and one after a trace, and interpolates the offset linearly between them.

The offset to rank 0's clock comes from the readings of the rank and of its leaders (:func:`to_first`). Before a trace
a leader makes its reading first, after a trace its followers do. So the readings of a rank lie between those of its
leader. There the leader's offset is interpolated and never extrapolated, so the errors of the levels add up.

Source: D. L. Mills, "Internet time synchronization: the network time protocol", IEEE Transactions on Communications 39
(1991): the offset by the exchange of the least delay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pycollective.transport.mpi import MPI

Array = np.ndarray[Any, np.dtype[np.int64]]

_EXCHANGES = 200

_FAN_OUT = 16
"""The larger, the more turns follow each other; the smaller, the more levels, each of which adds its error."""

_TURN, _QUESTION, _ANSWER, _READINGS = range(4, 8)  # tags; timeline/leave.py has those before


class Reading(NamedTuple):
    """The offset between this rank's clock and that of its leader, or of rank 0, at one moment.

    Attributes:
        at: the moment by this rank's clock, in nanoseconds.
        offset: the other clock minus this rank's clock, in nanoseconds.
        error: the largest error of the offset, in nanoseconds.
    """

    at: int
    offset: int
    error: int


def now_ns() -> int:
    """This rank's clock, which the recorder reads as well: CLOCK_MONOTONIC."""
    return time.monotonic_ns()


def leader_of(rank: int) -> int:
    """The rank with whose clock a rank compares its own; that of rank 0 is itself.

    Example:
        >>> [leader_of(rank) for rank in (0, 1, 15, 16, 17, 32, 256, 290)]
        [0, 0, 0, 0, 16, 0, 0, 288]
    """
    step = 1
    while rank and rank % (step * _FAN_OUT) == 0:
        step *= _FAN_OUT
    return rank - rank % (step * _FAN_OUT)


def followers_of(rank: int, size: int) -> list[int]:
    """The ranks whose leader is ``rank``; those with the fewest followers come first.

    Example:
        >>> followers_of(0, 40) == [*range(1, 16), 16, 32], followers_of(16, 19), followers_of(17, 19)
        (True, [17, 18], [])
    """
    found: list[int] = []
    step = 1
    while step < size and rank % (step * _FAN_OUT) == 0:
        found += range(rank + step, min(size, rank + step * _FAN_OUT), step)
        step *= _FAN_OUT
    return found


def compare(mpi: MPI.Intracomm, wait: Callable[[Callable[[], bool]], None], *, leaders_first: bool) -> Reading:
    """Compares this rank's clock with its leader's. All ranks must make this call.

    Args:
        mpi: a communicator without other messages.
        wait: a function that calls its argument until this returns True; it may sleep. Each rank waits for its turn:
            ranks that compare with one leader at the same time would disturb each other.
        leaders_first: whether a leader makes its own reading before those of its followers, or after them.
    """
    followers = followers_of(mpi.rank, mpi.size)
    if leaders_first:
        reading = _own_turn(mpi, wait)
        for follower in reversed(followers):
            _answer(mpi, follower)
        return reading
    for follower in followers:
        _answer(mpi, follower)
    return _own_turn(mpi, wait)


def _answer(mpi: MPI.Intracomm, follower: int) -> None:
    """Gives a follower its turn."""
    question, answer = np.zeros(1, np.int64), np.zeros(1, np.int64)
    mpi.Send(question, follower, _TURN)
    for _ in range(_EXCHANGES):
        mpi.Recv(question, follower, _QUESTION)
        answer[0] = now_ns()
        mpi.Send(answer, follower, _ANSWER)


def _own_turn(mpi: MPI.Intracomm, wait: Callable[[Callable[[], bool]], None]) -> Reading:
    if mpi.rank == 0:
        return Reading(now_ns(), 0, 0)
    leader = leader_of(mpi.rank)
    question, answer = np.zeros(1, np.int64), np.zeros(1, np.int64)
    wait(mpi.Irecv(question, leader, _TURN).Test)
    readings = []
    for _ in range(_EXCHANGES):
        asked = now_ns()
        mpi.Send(question, leader, _QUESTION)
        mpi.Recv(answer, leader, _ANSWER)
        answered = now_ns()
        middle = (asked + answered) // 2
        readings.append(Reading(middle, int(answer[0]) - middle, (answered - asked) // 2 + 1))
    return min(readings, key=lambda reading: reading.error)


def to_first(
    mpi: MPI.Intracomm, begin: Reading, end: Reading, wait: Callable[[Callable[[], bool]], None]
) -> tuple[Reading, Reading]:
    """Converts the two readings of each rank's clock to readings against rank 0's. All ranks must make this call.

    Args:
        mpi: a communicator without other messages.
        begin: the reading before the trace.
        end: the reading after the trace.
        wait: see :func:`compare`.
    """
    if mpi.rank != 0:
        of_leader = np.zeros((2, 3), np.int64)
        wait(mpi.Irecv(of_leader, leader_of(mpi.rank), _READINGS).Test)
        begin, end = through(begin, end, *(Reading(*map(int, reading)) for reading in of_leader))
    for follower in reversed(followers_of(mpi.rank, mpi.size)):
        mpi.Send(np.array([begin, end], np.int64), follower, _READINGS)
    return begin, end


def through(begin: Reading, end: Reading, leaders_begin: Reading, leaders_end: Reading) -> tuple[Reading, Reading]:
    """Converts two readings against a leader's clock to readings against rank 0's clock.

    Args:
        begin: this rank's reading before the trace.
        end: its reading after the trace.
        leaders_begin: the leader's reading before the trace, against rank 0's clock, which comes before ``begin``.
        leaders_end: the leader's reading after the trace, which comes after ``end``.

    Example:
        >>> leaders = Reading(0, 100, 1), Reading(1000, 110, 3)  # the leader's clock loses 1 %
        >>> through(Reading(500, 0, 2), Reading(700, -200, 2), *leaders)
        (Reading(at=500, offset=105, error=5), Reading(at=700, offset=-95, error=5))
    """
    error = max(leaders_begin.error, leaders_end.error)  # that of each offset between them

    def converted(reading: Reading) -> Reading:
        by_leader = np.array([reading.at + reading.offset])
        by_first = int(aligned(by_leader, leaders_begin, leaders_end)[0])
        return Reading(reading.at, by_first - reading.at, reading.error + error)

    return converted(begin), converted(end)


def aligned(times: Array, begin: Reading, end: Reading) -> Array:
    """Converts times of a rank's clock to times of rank 0's clock, in nanoseconds.

    Args:
        times: times of the rank's clock, int64.
        begin: the reading before the trace.
        end: the reading after the trace.

    Example:
        >>> begin, end = Reading(0, 100, 1), Reading(1000, 110, 1)  # this clock loses 1 %
        >>> aligned(np.array([0, 500, 1000]), begin, end).tolist()
        [100, 605, 1110]
    """
    drift = (end.offset - begin.offset) / max(1, end.at - begin.at)
    return times + begin.offset + np.rint((times - begin.at) * drift).astype(np.int64)
