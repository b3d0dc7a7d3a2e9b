"""The watch of a rank for the failure of another one, while it trains or waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pycollective.transport import failures
from pycollective.transport.mpi import MPI

_INTERVAL_S = 0.02
"""How often a rank looks; a look takes some 30 us, and asks no other rank."""


@contextmanager
def watching(comm: MPI.Intracomm) -> Iterator[None]:
    """Inside, the failure of any rank of ``comm`` ends all calls of this rank with an error, on whichever communicator.

    It does so as well if another rank has revoked ``comm``. A rank may wait for one that lives but has given up, on a
    communicator that the latter does not know, since its making has failed there. So each rank must end its own calls.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_INTERVAL_S):
            if failures.has_failed(comm):
                comm.Revoke()
                failures.revoke_all()  # again and again: a communicator may be new

    thread = threading.Thread(target=watch, name="pycollective-elastic", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
