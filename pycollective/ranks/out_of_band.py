"""What the ranks of a communicator tell each other outside programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycollective.transport.mpi import MPI


class OutOfBand:
    """Messages beside those of programs, under a tag that these do not use.

    Args:
        mpi: a communicator that belongs to this package.
        tag: of the messages.
    """

    def __init__(self, mpi: MPI.Intracomm, tag: int) -> None:
        self._mpi = mpi
        self._tag = tag
        self._ended = 0  # calls of `allgather`

    def allgather(self, own: Any, wait: Callable[[Callable[[], bool]], None]) -> list[Any]:
        """``own`` of every rank, in the order of the ranks. All must make this call; one that raised may make it again.

        Args:
            own: anything that can be pickled; the same where the call is made rebind, since some ranks may know it.
            wait: returns when what it is given returns True, and may raise.

        Source: J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
        systems", IEEE Transactions on Parallel and Distributed Systems 8 (1997): the concatenation, in
        ceil(log2(ranks)) rounds.
        """
        rank, size = self._mpi.rank, self._mpi.size
        known = [own]  # of this rank and those behind it
        while (distance := len(known)) < size:
            part = self._ended, known[: size - distance]
            sent = self._mpi.isend(part, (rank - distance) % size, self._tag)
            known += self._receive((rank + distance) % size, wait)
            wait(sent.Test)
        self._ended += 1
        return [known[(other - rank) % size] for other in range(size)]

    def _receive(self, source: int, wait: Callable[[Callable[[], bool]], None]) -> list[Any]:
        received: list[list[Any]] = []

        def has_come() -> bool:
            message = self._mpi.improbe(source, self._tag)
            if message is not None:
                call, part = message.recv()
                if call == self._ended:  # else of one that has ended here, and that rank made again
                    received.append(part)
            return bool(received)

        wait(has_come)
        return received[0]
