"""Lets MPI go on with what a rank has sent, while the rank waits for others outside of MPI.

A call of MPI may return before its last message has left for another host; MPI then sends it in a later call. JAX's
processes also wait for each other through JAX's own service, where MPI gets no calls: a rank that waits there for one
that waits for its message would wait for ever.
"""

from __future__ import annotations

import threading

from pycollective.transport.mpi import MPI

_BETWEEN_CALLS_S = 0.01


class Progress(threading.Thread):
    """A thread that calls MPI now and then, until :meth:`stop`.

    Args:
        mpi: any communicator of this process.
    """

    def __init__(self, mpi: MPI.Intracomm) -> None:
        super().__init__(name="pycollective-progress", daemon=True)
        self._mpi = mpi
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(_BETWEEN_CALLS_S):
            self._mpi.Iprobe()

    def stop(self) -> None:
        """Ends the thread. It must come before MPI ends."""
        self._done.set()
        self.join()
