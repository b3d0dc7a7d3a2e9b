"""An error of one rank before its ``init`` ends all ranks: some may wait in ``init`` already.

``import mpi4py.MPI`` starts MPI, so a rank with an error would wait in ``MPI_Finalize`` for the ranks that wait for it.
``import pycollective`` installs this. It starts neither MPI nor JAX. :mod:`rank_exit` takes over at ``init``.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from pycollective.faults import exit_status
from pycollective.launch.child_processes import parent_rank, wait_until_read
from pycollective.launch.started_by import is_rank
from pycollective.transport import mpi_start

__all__ = ["install", "disable", "wait_for_lower_ranks"]

_HEAD_START_S, _STEP_S = 0.5, 0.05
"""When all ranks raise: the delay of rank 1's error after rank 0's, and of rank r + 1's after rank r's. The first rank
ends the others, which print nothing."""


class _State:
    """What this process knows.

    Attributes:
        pid: the process that has the hook; a forked child has another number.
        is_disabled: whether :mod:`rank_exit` has taken over.
    """

    pid = 0
    is_disabled = False


def install() -> None:
    """Installs a hook for exceptions and an exit handler, if a launcher has started this process as a rank.

    The start of MPI is watched from then on (:mod:`mpi_start`), and a child of a rank does not start it.
    """
    mpi_start.install()
    if not is_rank(os.environ) or parent_rank() is not None:
        return
    _State.pid = os.getpid()
    exit_status.record()
    previous = sys.excepthook

    def raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        exit_status.set_status(1)
        _end_all(1, "raised", partial(previous, kind, error, trace))

    sys.excepthook = raised
    atexit.register(_end)


def disable() -> None:
    """Disables the hooks of this module."""
    _State.is_disabled = True


def wait_for_lower_ranks(rank: int) -> None:
    """Sleeps for a time that grows with the rank, so that one rank alone prints an error that all ranks have."""
    if rank > 0:
        time.sleep(_HEAD_START_S + _STEP_S * min(rank, 20))


def _end() -> None:
    status = exit_status.status()
    if status:
        _end_all(status, f"exited with code {status}", lambda: None)


def _end_all(status: int, what: str, show: Callable[[], object]) -> None:
    """Shows an error. If MPI runs with several ranks, it then ends all of them."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    is_mine = not _State.is_disabled and os.getpid() == _State.pid
    if not is_mine or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.size == 1:
        show()
        return
    world = mpi.COMM_WORLD
    wait_for_lower_ranks(world.rank)
    sys.stderr.write(f"pycollective: rank {world.rank} of {world.size} {what} before init; ending all ranks.\n")
    show()
    wait_until_read()
    exit_status.force_exit_after_timeout()
    world.Abort(status)
