"""The watch of a rank for the failure of another one, while it trains or waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pycollective.transport import failures
from pycollective.transport.mpi import MPI

_INTERVAL_S = 0.02
"""The seconds between two checks. A check takes about 30 us and does not communicate."""


@contextmanager
def watching(comm: MPI.Intracomm) -> Iterator[None]:
    """Inside, the failure of any rank of ``comm`` ends all calls of this rank with an error, on whichever communicator.

    If another rank has revoked ``comm``, that ends all calls, too. A rank may wait for a rank that is alive but has met
    the failure elsewhere, on a communicator that does not exist there because its creation has failed. So each rank
    must end its own calls.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_INTERVAL_S):
            if failures.has_failed(comm):
                comm.Revoke()
                failures.revoke_all()  # repeated, since the program may have made another communicator

    thread = threading.Thread(target=watch, name="pycollective-elastic", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
