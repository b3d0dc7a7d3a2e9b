"""The offset of each rank's clock from rank 0's clock.

Each rank asks rank 0 for the time many times, by a message and its answer, and takes the answer with the shortest round
trip. The error of this reading is at most half of the round trip. The clocks of hosts drift, so each rank makes a
reading before and one after a trace, and interpolates the offset linearly between them.

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

_TURN, _QUESTION, _ANSWER = range(3)  # tags


class Reading(NamedTuple):
    """The offset between this rank's clock and rank 0's at one moment.

    Attributes:
        at: the moment by this rank's clock, in nanoseconds.
        offset: rank 0's clock minus this rank's clock, in nanoseconds.
        error: the largest error of the offset, in nanoseconds.
    """

    at: int
    offset: int
    error: int


def now_ns() -> int:
    """This rank's clock, which the recorder reads as well: CLOCK_MONOTONIC."""
    return time.monotonic_ns()


def compare(mpi: MPI.Intracomm, wait: Callable[[Callable[[], bool]], None]) -> Reading:
    """Compares this rank's clock with rank 0's. All ranks must make this call.

    Args:
        mpi: a communicator without other messages.
        wait: a function that calls its argument until this returns True; it may sleep. Each rank waits for its turn,
            since only one rank at a time compares its clock: otherwise ranks would disturb each other.
    """
    answer = np.zeros(1, np.int64)
    question = np.zeros(1, np.int64)
    if mpi.rank == 0:
        for other in range(1, mpi.size):
            mpi.Send(question, other, _TURN)
            for _ in range(_EXCHANGES):
                mpi.Recv(question, other, _QUESTION)
                answer[0] = now_ns()
                mpi.Send(answer, other, _ANSWER)
        return Reading(now_ns(), 0, 0)
    wait(mpi.Irecv(question, 0, _TURN).Test)
    readings = []
    for _ in range(_EXCHANGES):
        asked = now_ns()
        mpi.Send(question, 0, _QUESTION)
        mpi.Recv(answer, 0, _ANSWER)
        answered = now_ns()
        middle = (asked + answered) // 2
        readings.append(Reading(middle, int(answer[0]) - middle, (answered - asked) // 2 + 1))
    return min(readings, key=lambda reading: reading.error)


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
