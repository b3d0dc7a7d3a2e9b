"""What a collective goes over, as primitives see it."""

from __future__ import annotations

from typing import Protocol

from pycollective.communicator import Communicator


class Members(Protocol):
    """What a collective goes over: the ranks of a Communicator, or the devices of a ``mesh.Group``. Hashable."""

    @property
    def number(self) -> int:
        """By which the transport knows it."""

    @property
    def size(self) -> int:
        """How many take part."""

    @property
    def local_axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes along which several devices of one rank lie; empty for one device."""

    @property
    def comm(self) -> Communicator:
        """The ranks."""

    def routes(self, perm: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each lane of this rank, where a permutation sends to and receives from."""
