"""Messages between the ranks of a communicator that are not part of programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycollective.transport.mpi import MPI


class OutOfBand:
    """Messages between ranks under a tag that no program uses.

    Args:
        mpi: an MPI communicator that belongs to this package.
        tag: the tag of the messages.
    """

    def __init__(self, mpi: MPI.Intracomm, tag: int) -> None:
        self._mpi = mpi
        self._tag = tag
        self._completed = 0  # the number of calls of `allgather` that have ended

    def allgather(self, own: Any, wait: Callable[[Callable[[], bool]], None]) -> list[Any]:
        """Returns ``own`` of every rank, in the order of the ranks. All ranks must make this call.

        A rank on which ``wait`` raised may make the call again.

        Args:
            own: an object that can be pickled. A call that is made again must bring the same object, since some ranks
                may have received it.
            wait: returns when the function that it is given returns True; may raise.

        Source: J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
        systems", IEEE Transactions on Parallel and Distributed Systems 8 (1997): the concatenation, in
        ceil(log2(ranks)) rounds.
        """
        rank, size = self._mpi.rank, self._mpi.size
        known = [own]  # from this rank and the ranks that follow it
        while (distance := len(known)) < size:
            part = self._completed, known[: size - distance]
            sent = self._mpi.isend(part, (rank - distance) % size, self._tag)
            known += self._receive((rank + distance) % size, wait)
            wait(sent.Test)
        self._completed += 1
        return [known[(other - rank) % size] for other in range(size)]

    def _receive(self, source: int, wait: Callable[[Callable[[], bool]], None]) -> list[Any]:
        received: list[list[Any]] = []

        def has_come() -> bool:
            message = self._mpi.improbe(source, self._tag)
            if message is not None:
                call, part = message.recv()
                if call == self._completed:  # else it belongs to a call that has ended here and that rank made again
                    received.append(part)
            return bool(received)

        wait(has_come)
        return received[0]
