"""The end of a rank: an exception ends all ranks; a clean end flushes pending work and waits for the others."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import sys
import termios
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NoReturn

from pycollective.mpi import MPI

_HEAD_START_S, _STEP_S = 0.5, 0.05
"""How much earlier rank 0 speaks than rank 1, and rank r than rank r + 1, when all of them raise: Abort then silences
the others."""


_LONGEST_READ_S = 2.0
"""How long a rank that ends all others waits for its launcher to read what it wrote."""


_PASSING_ON_S = 0.1
"""And for the launcher's part on this host to pass it on."""


_NOTICE_S = 10.0
"""How long a rank that has ended waits for the others before it says so."""


def end_all_on_error() -> None:
    """Installs the exception hook."""
    previous = sys.excepthook
    world = MPI.COMM_WORLD

    def end_all_ranks(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if world.size > 1:
            if world.rank > 0:
                time.sleep(_HEAD_START_S + _STEP_S * min(world.rank, 20))
            sys.stdout.flush()
            sys.stderr.write(f"pycollective: rank {world.rank} of {world.size} raised; ending all ranks.\n")
        previous(kind, error, trace)
        if world.size > 1:
            abort(world)

    sys.excepthook = end_all_ranks


def flush_at_exit(flush: Callable[[], None]) -> None:
    """Installs an exit handler, behind JAX's and mpi4py's own: these run in the opposite order.

    Args:
        flush: waits until the dispatched programs have run.
    """
    atexit.register(flush)


def abort(world: MPI.Intracomm) -> NoReturn:
    """Ends all ranks, once the launcher has read what this one wrote: it may throw away what it has not."""
    deadline = time.monotonic() + _LONGEST_READ_S
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nothing that can be asked
            stream.flush()
            while int.from_bytes(fcntl.ioctl(stream.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder) > 0:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
    time.sleep(_PASSING_ON_S)
    world.Abort(1)
    os._exit(1)  # MPICH's returns when the launcher is slow to end this process


def meet_at_exit(world: MPI.Intracomm, flush: Callable[[], None]) -> None:
    """Lets this rank wait at exit until all have come there, its own work done. All ranks must make this call."""
    atexit.register(_meet, world.Dup(), flush)


def _meet(world: MPI.Intracomm, flush: Callable[[], None]) -> None:
    """Waits until every rank is here, and says so when that takes long.

    MPI_Finalize would wait as well, but in silence and at full speed: a rank that left early, through ``sys.exit``
    say, while others still wait for it in a collective would look like any hang.
    """
    if MPI.Is_finalized():
        return
    flush()
    notice = (
        f"rank {world.rank} of {world.size} has ended and waits for the other ranks to end. "
        "If they do not, look for a collective that this rank did not reach."
    )
    for _ in waits(world.Ibarrier(), 0.05, _NOTICE_S, notice):
        pass


def waits(request: MPI.Request, longest_s: float, notice_s: float, notice: str) -> Iterator[float]:
    """Sleeps until ``request`` is complete, ``longest_s`` at a time at most, and yields the seconds waited so far.

    After ``notice_s`` it says ``notice`` once.
    """
    started = time.monotonic()
    told = False
    while not request.Test():
        waited = time.monotonic() - started
        if waited > notice_s and not told:
            told = True
            sys.stderr.write(f"pycollective: {notice}\n")
            sys.stderr.flush()
        yield waited
        time.sleep(min(longest_s, waited / 10))
