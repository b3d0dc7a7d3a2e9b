"""Ends the job, with a report, when a rank waits too long inside one MPI call."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time

from pycollective.faults import rank_exit
from pycollective.transport.chosen import transport
from pycollective.transport.native import Waiting


class Watchdog(threading.Thread):
    """A thread that looks at the longest wait inside MPI from time to time.

    The handlers run without the interpreter's lock, so this thread runs while the main thread is inside MPI.

    Args:
        timeout: the seconds that one MPI call may last.
        rank: the rank of this process in MPI_COMM_WORLD.
        size: the size of MPI_COMM_WORLD.
    """

    def __init__(self, timeout: float, rank: int, size: int) -> None:
        super().__init__(name="pycollective-watchdog", daemon=True)
        self._timeout = timeout
        self._place = f"rank {rank} of {size}"

    def run(self) -> None:
        while True:
            time.sleep(min(1.0, self._timeout / 4))
            waiting = transport().longest_wait()
            if waiting is not None and waiting.waited_ns > self._timeout * 1e9:
                self._report(waiting)
                time.sleep(rank_exit.GRACE_S)
                rank_exit.abort()

    def _report(self, waiting: Waiting) -> None:
        sys.stderr.write(
            f"pycollective.{waiting.operation.decode()}: expected an answer from the other ranks within "
            f"{self._timeout:g} s, got none for {waiting.waited_ns / 1e9:.1f} s ({self._place}, communicator "
            f"{waiting.communicator.decode()}, {waiting.nbytes} bytes). Ending all ranks; this rank's stacks follow. "
            "Look for a rank that did not make this call.\n"
        )
        sys.stderr.flush()
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
