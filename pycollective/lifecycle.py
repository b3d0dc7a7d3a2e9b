"""The end of a rank: an exception ends all ranks, and pending work is flushed before MPI is finalised."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from types import TracebackType

from pycollective.mpi import MPI

_HEAD_START_S = 0.05
"""How much earlier rank r speaks than rank r + 1 when all of them raise: its Abort then silences the others."""


def install(flush: Callable[[], None]) -> None:
    """Installs the exception hook and the flush at exit.

    Args:
        flush: waits until the dispatched programs have run.
    """
    previous = sys.excepthook
    world = MPI.COMM_WORLD

    def end_all_ranks(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if world.size > 1:
            time.sleep(_HEAD_START_S * min(world.rank, 20))
            sys.stdout.flush()
            sys.stderr.write(f"pycollective: rank {world.rank} of {world.size} raised; ending all ranks.\n")
        previous(kind, error, trace)
        if world.size > 1:
            sys.stderr.flush()
            world.Abort(1)

    sys.excepthook = end_all_ranks
    # Runs before JAX's and mpi4py's own exit handlers, which were registered earlier.
    atexit.register(flush)
