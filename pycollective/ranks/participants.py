"""The participants of a collective, as primitives see them; and parts of communicators, which a rank makes alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from pycollective.jax_support import jax_internals
from pycollective.transport import native

ProgramKey = tuple[int, int]
"""The name of participants in compiled programs: a number of this process, and a fingerprint of the participants.

The handler finds the participants by the number. The fingerprint is for a program that comes from another process (by
``jax.experimental.serialize_executable``, say): its number may stand for other participants here, and the fingerprint
shows that.
"""

Perm = Sequence[tuple[int, int]]
"""A permutation: pairs of a source and a destination."""

LaneRoutes = tuple[tuple[int, ...], tuple[int, ...]]
"""For each lane of a rank its destination, and for each lane its source: ``rank * lanes + lane``, or -1 for none."""


class Participants(Protocol):
    """The participants of a collective: ranks of a communicator, or devices of a ``mesh.DeviceGroup``. Hashable.

    A user has communicators too, so what is for the modules of this package alone begins with an underscore.
    """

    @property
    def _key(self) -> ProgramKey:
        """The name of the participants in compiled programs."""

    @property
    def rank(self) -> int:
        """The place of this rank among the ranks."""

    @property
    def size(self) -> int:
        """The number of participants."""

    @property
    def _local_axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes along which several devices of one rank take part together; empty for one."""

    @property
    def _comm(self) -> Participants:
        """The ranks, as participants that each device calls on its own."""

    def _lane_routes(self, perm: Perm) -> LaneRoutes:
        """The destination and the source of each lane of this rank in a permutation."""

    def _groups(self, groups: Sequence[Sequence[int]]) -> Participants:
        """The participants of this rank's group; each rank is in exactly one group."""

    def _reversed(self) -> Participants:
        """The same participants in the opposite order."""


class ParentCommunicator(Participants, Protocol):
    """A communicator, as its parts see it."""

    def _check_live(self, where: str) -> None:
        """Raises ValueError in the name of the operation ``where`` if the communicator was freed."""

    def _part(self, members: tuple[int, ...], lane_ids: tuple[int, ...] | None = None) -> Participants:
        """See ``Communicator``."""

    def _key_of(self, members: tuple[int, ...], places: tuple[PlaceInTeam, ...] | None, team_size: int) -> ProgramKey:
        """See ``Communicator``."""


class PlaceInTeam(NamedTuple):
    """The place of a device in a team, the local devices that make a call together.

    Attributes:
        lane_id: the device, as ``accelerators.lane_id`` names it.
        team: the number of the team on this rank.
        member: the number of the device in the team.
    """

    lane_id: int
    team: int
    member: int


def fingerprint(*facts: Any) -> int:
    """Returns a hash of 64 bits, which is the same in each run.

    Example:
        >>> fingerprint((0, 1), 1) == fingerprint((0, 1), 1) != fingerprint((0, 1), 0)
        True
    """
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "little", signed=True)


def program_fingerprint(*facts: Any) -> int:
    """Returns a hash of participants, as this rank sees them, and of the build of the native library.

    The attributes of a call may mean something else in another build, so its programs are refused.
    """
    return fingerprint(native.build_id(), *facts)


def lane_routes(rank: int, lanes: int, perm: Perm) -> LaneRoutes:
    """The destination and the source of each lane of a rank, if lanes exchange with the same lane of other ranks.

    Args:
        rank: the rank.
        lanes: the number of lanes of each rank.
        perm: pairs of ranks.

    Example:
        >>> lane_routes(0, 2, [(0, 1)])
        ((2, 3), (-1, -1))
    """

    def on_each_lane(other: int | None) -> tuple[int, ...]:
        return tuple(-1 if other is None else other * lanes + lane for lane in range(lanes))

    return on_each_lane(dict(perm).get(rank)), on_each_lane({dest: source for source, dest in perm}.get(rank))


def group_of(rank: int, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The group that ``rank`` is in."""
    (group,) = (group for group in groups if rank in group)
    return tuple(group)


@jax_internals.keep_weakly
class SubCommunicator:
    """Some ranks of a communicator, in an order of their own. Primitives use it as they use a communicator.

    Making one sends no message to other ranks, since each rank traces programs on its own. The first call on it makes
    its MPI communicators (``native/calls/communicators.h``). Freeing the parent frees it.

    Attributes:
        rank: the place of this rank in the part.
        size: the number of ranks in the part.
    """

    def __init__(
        self,
        parent: ParentCommunicator,
        members: tuple[int, ...],
        lane_ids: tuple[int, ...] | None,
        places: tuple[PlaceInTeam, ...] | None,
        lanes: int,
    ) -> None:
        """Keeps the arguments.

        Args:
            parent: the communicator.
            members: ranks of the communicator, in the order of the part.
            lane_ids: this rank's devices of a mesh, as ``accelerators.lane_id`` names them; they pair with those of
                other ranks by their place in the mesh. None: all devices of ``init``, which pair by their index.
            places: the places of these devices, each in a team of its own.
            lanes: the number of devices.
        """
        self._parent, self._members, self._lane_ids = parent, members, lane_ids
        self._places, self._lanes = places, lanes
        self.rank = members.index(parent.rank)
        self.size = len(members)

    def __repr__(self) -> str:
        return f"SubCommunicator({self._members} of {self._parent!r})"

    @property
    def _key(self) -> ProgramKey:
        """The name of the part in compiled programs.

        Raises:
            ValueError: the communicator was freed.
        """
        self._parent._check_live("Communicator")
        return self._parent._key_of(self._members, self._places, 1)

    @property
    def _local_axes(self) -> tuple[tuple[str, int], ...]:
        """Empty: each device takes part on its own, as in a communicator."""
        return ()

    @property
    def _comm(self) -> SubCommunicator:
        """The part itself."""
        return self

    def _lane_routes(self, perm: Perm) -> LaneRoutes:
        """The destination and the source of each lane of this rank in a permutation of the part's ranks."""
        return lane_routes(self.rank, self._lanes, perm)

    def _groups(self, groups: Sequence[Sequence[int]]) -> Participants:
        """This rank's group, for groups of ranks of this part."""
        return self._parent._part(tuple(self._members[rank] for rank in group_of(self.rank, groups)), self._lane_ids)

    def _reversed(self) -> Participants:
        """The same ranks in the opposite order."""
        return self._parent._part(self._members[::-1], self._lane_ids)
