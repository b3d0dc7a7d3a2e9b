"""What a collective goes over, as primitives see it; and parts of communicators, which nobody makes together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import jax

Key = tuple[int, int]
"""How compiled programs name those who take part: a number of this process, and a fingerprint of what it stands for.

The number leads the handler to them at once. The fingerprint keeps a program that comes from another process (from
``jax.experimental.serialize_executable``, say) off others that have the number here.
"""

Perm = Sequence[tuple[int, int]]
Routes = tuple[tuple[int, ...], tuple[int, ...]]


class Participants(Protocol):
    """What a collective goes over: ranks of a communicator, or the devices of a ``mesh.DeviceGroup``. Hashable."""

    @property
    def key(self) -> Key:
        """By which the transport knows it."""

    @property
    def rank(self) -> int:
        """The place of this rank among the ranks."""

    @property
    def size(self) -> int:
        """How many take part."""

    @property
    def local_axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes along which several devices of one rank lie; empty for one device."""

    @property
    def comm(self) -> Participants:
        """The ranks, of which each device takes part on its own."""

    def routes(self, perm: Perm) -> Routes:
        """For each lane of this rank, where a permutation sends to and receives from."""

    def groups(self, groups: Sequence[Sequence[int]]) -> Participants:
        """Those of this rank's group; each rank is in exactly one."""

    def reversed(self) -> Participants:
        """The same in the opposite order."""


class ParentCommunicator(Participants, Protocol):
    """A communicator, as its parts see it."""

    def check_live(self, where: str) -> None:
        """Raises ValueError, speaking for ``where``, if it was freed."""

    def part(self, members: tuple[int, ...], devices: tuple[jax.Device, ...] | None = None) -> Participants:
        """See ``Communicator``."""

    def key_of(self, members: tuple[int, ...], seats: tuple[Seat, ...] | None, team_size: int) -> Key:
        """See ``Communicator``."""


Seat = tuple[int, int, int]
"""A device of a mesh on this rank: the id of its lane, its team, its number in the team."""


def fingerprint(*facts: Any) -> int:
    """A hash of 64 bits, the same in each run.

    Example:
        >>> fingerprint((0, 1), 1) == fingerprint((0, 1), 1) != fingerprint((0, 1), 0)
        True
    """
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "little", signed=True)


def routes(rank: int, lanes: int, perm: Perm) -> Routes:
    """For each of a rank's lanes where it sends and from where it receives: ``rank * lanes + lane``, -1 for none.

    Args:
        rank: this one.
        lanes: devices of each rank.
        perm: (source, destination) ranks; each lane exchanges with the same lane there.
    """

    def on_each_lane(other: int | None) -> tuple[int, ...]:
        return tuple(-1 if other is None else other * lanes + lane for lane in range(lanes))

    return on_each_lane(dict(perm).get(rank)), on_each_lane({dest: source for source, dest in perm}.get(rank))


def own_group(groups: Sequence[Sequence[int]], rank: int) -> tuple[int, ...]:
    """That with ``rank`` in it."""
    (group,) = (group for group in groups if rank in group)
    return tuple(group)


class SubCommunicator:
    """Some ranks of a communicator, in an order of their own: for primitives, as a communicator.

    It is made without a word to other ranks, for programs are traced by each rank on its own; its MPI communicators are
    made by the first call on it (``native/communicators.h``). It goes with the whole.

    Attributes:
        rank: this one's place among them.
        size: their number.
    """

    def __init__(
        self,
        whole: ParentCommunicator,
        members: tuple[int, ...],
        devices: tuple[jax.Device, ...] | None,
        seats: tuple[Seat, ...] | None,
        lanes: int,
    ) -> None:
        """Keeps what it is.

        Args:
            whole: the communicator.
            members: ranks of it.
            devices: those of a mesh, which pair with the others' by their number in it; None: all, by their index.
            seats: of these devices, each in a team of its own.
            lanes: their number.
        """
        self._whole, self._members, self._devices, self._seats, self._lanes = whole, members, devices, seats, lanes
        self.rank = members.index(whole.rank)
        self.size = len(members)

    def __repr__(self) -> str:
        return f"SubCommunicator({self._members} of {self._whole!r})"

    @property
    def key(self) -> Key:
        """By which the transport knows it.

        Raises:
            ValueError: the communicator was freed.
        """
        self._whole.check_live("Communicator")
        return self._whole.key_of(self._members, self._seats, 1)

    @property
    def local_axes(self) -> tuple[tuple[str, int], ...]:
        """Empty, as a communicator's."""
        return ()

    @property
    def comm(self) -> SubCommunicator:
        """Itself."""
        return self

    def routes(self, perm: Perm) -> Routes:
        """See ``routes``."""
        return routes(self.rank, self._lanes, perm)

    def groups(self, groups: Sequence[Sequence[int]]) -> Participants:
        """This rank's group, for groups of ranks of this part."""
        return self._whole.part(tuple(self._members[rank] for rank in own_group(groups, self.rank)), self._devices)

    def reversed(self) -> Participants:
        """The same ranks in the opposite order."""
        return self._whole.part(self._members[::-1], self._devices)
