"""The time of a call that all ranks make."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from pycollective.transport.mpi import MPI

_MOST_SETTLING = 8


def meet(ranks: MPI.Intracomm) -> None:
    """Waits until all ranks are here. All ranks must make this call.

    MPI's own barrier polls. Where ranks share a core, it takes that core from those that still do what is timed. This
    one gives the core away.

    Args:
        ranks: the ranks.
    """
    all_are_here = ranks.Ibarrier().Test
    while not all_are_here():
        os.sched_yield()


def slowest_s(ranks: MPI.Intracomm, call: Callable[[], object]) -> float:
    """The seconds from when the first rank begins a call until all have done it. All ranks must call, and get the same.

    Where ranks share a core, one may do all of it before another one begins, who then takes no longer than alone.

    Args:
        ranks: the ranks.
        call: what is timed.
    """
    meet(ranks)
    started = time.perf_counter()
    call()
    meet(ranks)
    own = time.perf_counter() - started
    return float(ranks.allreduce(own, MPI.MAX))


def settled_s(seconds_of_next: Callable[[], float], least: int = 2) -> float:
    """Repeats a measurement until it gets no faster, or eight times, and returns the last.

    The first calls take memory from the system, which a later one finds in the process.

    Args:
        seconds_of_next: makes a measurement, whose result is the same on all ranks.
        least: how often at least.

    Example:
        >>> settled_s(iter([8.0, 2.0, 1.9, 1.0]).__next__)
        1.9
    """
    last = math.inf
    for i in range(_MOST_SETTLING):
        seconds = seconds_of_next()
        if i + 1 >= least and seconds > 0.9 * last:
            return seconds
        last = seconds
    return last
