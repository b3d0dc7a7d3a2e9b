"""A communicator: a group of ranks that call collectives together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from pycollective.errors import message
from pycollective.ordering import dispatch
from pycollective.ranks import accelerators, setup
from pycollective.ranks.out_of_band import OutOfBand
from pycollective.ranks.participants import (
    Key,
    Participants,
    Perm,
    Routes,
    Seat,
    SubCommunicator,
    fingerprint,
    own_group,
    routes,
)
from pycollective.transport import native
from pycollective.transport.mpi import MPI, host_of

_FOR_OTHER_MODULES = frozenset(
    [
        "check_live",
        "comm",
        "groups",
        "is_freed",
        "key",
        "key_of",
        "local_axes",
        "out_of_band",
        "part",
        "reversed",
        "routes",
    ]
)
"""What a communicator has that is not for users; completion does not show it."""


class Communicator:
    """A group of ranks that call collectives together.

    Its traffic goes over private duplicates of :attr:`mpi`, so nothing the program sends on :attr:`mpi` itself can mix
    with it: two that are made with it, and others where programs on several devices need them. There is one object per
    MPI communicator, so communicators are equal when their MPI handles are; they are hashable and may be static
    arguments of :func:`jax.jit`.

    Args:
        mpi: an intracommunicator of mpi4py. All its ranks must make this call.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks.
        local_rank: rank among those on this host.
        local_size: number of ranks on this host.
        host_index: of this host, hosts being numbered in the order of their lowest rank.
        host_count: number of hosts.
        mpi: the mpi4py communicator, free for the program's own traffic.

    Raises:
        TypeError: ``mpi`` is not an mpi4py intracommunicator.
        RuntimeError: the package has not started, and ``mpi`` does not have all ranks.

    Example:
        >>> import pycollective as pc
        >>> comm = pc.world()
        >>> 0 <= comm.rank < comm.size and comm.local_size <= comm.size
        True
    """

    __slots__ = (
        "_calls",
        "_freed",
        "_key",
        "_keys",
        "_name",
        "_owned",
        "_parts",
        "_rest",
        "_world_ranks",
        "host_count",
        "host_index",
        "local_rank",
        "local_size",
        "mpi",
        "out_of_band",
        "rank",
        "size",
    )

    mpi: MPI.Intracomm
    rank: int
    size: int
    local_rank: int
    local_size: int
    host_index: int
    host_count: int
    out_of_band: OutOfBand  # what its ranks tell each other outside programs
    _name: str
    _world_ranks: tuple[int, ...]  # of its ranks, in order
    _key: Key
    _calls: MPI.Intracomm  # for collectives, and messages under the program's own tags
    _rest: MPI.Intracomm  # for the making of other channels, ppermute, messages between devices, and `control`
    _parts: dict[Any, SubCommunicator]
    _keys: dict[Any, Key]  # of its parts and of groups of devices
    _owned: bool  # free() frees mpi too
    _freed: bool

    def __new__(cls, mpi: MPI.Intracomm) -> Communicator:
        if not isinstance(mpi, MPI.Intracomm) or mpi == MPI.COMM_NULL:
            raise TypeError(
                message("Communicator", "an mpi4py intracommunicator", repr(mpi), "Pass mpi4py.MPI.COMM_WORLD, say.")
            )
        if not setup.has_started() and MPI.Comm.Compare(mpi, MPI.COMM_WORLD) not in (MPI.IDENT, MPI.CONGRUENT):
            raise RuntimeError(
                message(
                    "Communicator",
                    "a package that has started, which all ranks do together",
                    f"a communicator of {mpi.size} ranks before that",
                    "Call pycollective.init() on all ranks first, or pycollective.init(comm) for these alone.",
                    rank=MPI.COMM_WORLD.rank,
                    size=MPI.COMM_WORLD.size,
                )
            )
        setup.start(mpi, None, None, None)
        known = mpi.Get_attr(_keyval())
        if isinstance(known, Communicator):
            return known
        return cls._make(mpi, mpi.Get_name() or "unnamed", owned=False)

    @classmethod
    def _make(cls, mpi: MPI.Comm, name: str, *, owned: bool) -> Communicator:
        """The collective part of the constructor. ``owned``: :meth:`free` frees ``mpi`` too."""
        assert isinstance(mpi, MPI.Intracomm)
        self = object.__new__(cls)
        set_ = object.__setattr__  # the class is frozen
        set_(self, "mpi", mpi)
        set_(self, "rank", mpi.rank)
        set_(self, "size", mpi.size)
        # Not by host name: containers may share one, and one host may have several.
        with host_of(mpi) as shared:
            hosts = mpi.allgather(shared.bcast(mpi.rank))
        local = [rank for rank in range(mpi.size) if hosts[rank] == hosts[mpi.rank]]
        leaders = sorted(set(hosts))
        set_(self, "local_rank", local.index(mpi.rank))
        set_(self, "local_size", len(local))
        set_(self, "host_index", leaders.index(hosts[mpi.rank]))
        set_(self, "host_count", len(leaders))

        lanes = tuple(map(accelerators.lane_id, setup.devices_of_this_rank()))
        world_ranks = tuple(MPI.Group.Translate_ranks(mpi.Get_group(), None, MPI.COMM_WORLD.Get_group()))
        calls, rest = _duplicate(mpi), _duplicate(mpi)
        mark = fingerprint(world_ranks, mpi.rank, lanes)
        set_(self, "_calls", calls)
        set_(self, "_rest", rest)
        free_tag = 2 * len(lanes) ** 2  # native/communicators.cc uses the tags below and above
        set_(self, "out_of_band", OutOfBand(rest, free_tag))
        set_(self, "_world_ranks", world_ranks)
        set_(self, "_key", (native.add_communicator(name, mark, lanes, calls, rest), mark))
        set_(self, "_name", name)
        set_(self, "_parts", {})
        set_(self, "_keys", {})
        set_(self, "_owned", owned)
        set_(self, "_freed", False)
        mpi.Set_attr(_keyval(), self)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(message("Communicator", "no change", f"{name} = {value!r}", "Communicators are frozen."))

    def __delattr__(self, name: str) -> None:
        raise AttributeError(message("Communicator", "no change", f"del {name}", "Communicators are frozen."))

    def __copy__(self) -> Communicator:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            message("Communicator", "an object that other processes can use", repr(self), "Make one on each rank.")
        )

    def __dir__(self) -> list[str]:
        shown = [name for name in super().__dir__() if not name.startswith("_") or name.startswith("__")]
        return [name for name in shown if name not in _FOR_OTHER_MODULES]

    def __repr__(self) -> str:
        freed = ", freed" if self._freed else ""
        return f"Communicator({self._name}, rank {self.rank} of {self.size}{freed})"

    @property
    def name(self) -> str:
        """How error messages call it."""
        return self._name

    @property
    def is_freed(self) -> bool:
        """Whether :meth:`free` was called."""
        return self._freed

    @property
    def key(self) -> Key:
        """By which compiled programs name it.

        Raises:
            ValueError: it was freed.
        """
        self.check_live("Communicator")
        return self._key

    @property
    def local_axes(self) -> tuple[tuple[str, int], ...]:
        """Empty: of several local devices each has its own lane, and none works with another."""
        return ()

    @property
    def comm(self) -> Communicator:
        """Itself: the ranks of a ``mesh.DeviceGroup`` have the same name there."""
        return self

    def check_live(self, where: str) -> None:
        """Raises ValueError, speaking for ``where``, if the communicator was freed."""
        if self._freed:
            raise ValueError(
                message(
                    where,
                    "a live communicator",
                    f"{self._name}, which was freed",
                    "Keep it until its last use.",
                    rank=self.rank,
                    size=self.size,
                )
            )

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Cuts the communicator into one for each color. All its ranks must make this call.

        Args:
            color: ranks with the same one end up together; None: this rank in none.
            key: order of the ranks in the new communicator; ties in the order of the old.

        Returns:
            The new communicator, or None for ``color=None``.

        Source: MPI_Comm_split (MPI standard, 7.4.2).

        Example:
            >>> import pycollective as pc
            >>> even_or_odd = pc.world().split(color=pc.world().rank % 2)
            >>> even_or_odd.size <= pc.world().size
            True
        """
        self.check_live("Communicator.split")
        part = self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
        if color is None:
            return None
        return Communicator._make(part, f"{self._name}/{color}", owned=True)

    def split_by_host(self) -> Communicator:
        """The ranks on this rank's host, in the order of this communicator. All its ranks must make this call.

        Example:
            >>> import pycollective as pc
            >>> pc.world().split_by_host().size == pc.world().local_size
            True
        """
        self.check_live("Communicator.split_by_host")
        part = self.mpi.Split(self.host_index, self.rank)
        return Communicator._make(part, f"{self._name}/host{self.host_index}", owned=True)

    def groups(self, groups: Sequence[Sequence[int]]) -> Participants:
        """This rank's group, ranks in the group's order; each rank is in exactly one."""
        return self.part(own_group(groups, self.rank))

    def reversed(self) -> Participants:
        """The same ranks in the opposite order."""
        return self.part(tuple(range(self.size))[::-1])

    def part(self, members: tuple[int, ...], devices: tuple[jax.Device, ...] | None = None) -> Participants:
        """Some of the ranks, this one among them: the same object each time. No rank speaks with others for it.

        Args:
            members: ranks, in the order of the part.
            devices: of this rank, which pair with those of other ranks by their place herein; default those of
                :func:`init`, by their index. Of as many on each rank.
        """
        if devices is None and members == tuple(range(self.size)):
            return self
        if (members, devices) not in self._parts:
            seats = devices and tuple((accelerators.lane_id(device), i, 0) for i, device in enumerate(devices))
            lanes = len(devices or setup.devices_of_this_rank())
            self._parts[members, devices] = SubCommunicator(self, members, devices, seats, lanes)
        return self._parts[members, devices]

    def key_of(self, members: tuple[int, ...], seats: tuple[Seat, ...] | None, team_size: int) -> Key:
        """How programs name a part, or a group of devices: the same each time.

        Args:
            members: ranks, in the order of the part.
            seats: of the devices of a mesh; None for those of :func:`init`, each for itself.
            team_size: how many of them work together.
        """
        if (members, seats, team_size) not in self._keys:
            rank = members.index(self.rank)
            lanes = tuple(map(accelerators.lane_id, setup.devices_of_this_rank())) if seats is None else seats
            world_ranks = tuple(self._world_ranks[member] for member in members)
            mark = fingerprint(world_ranks, rank, lanes, team_size)
            all_in_order = members == tuple(range(self.size))
            shown = [*map(str, members[:4]), *(["..."] if len(members) > 4 else [])]
            name = self._name if all_in_order else f"{self._name}[{', '.join(shown)}]"
            given = () if all_in_order else members
            number = native.add_part(name, mark, self._key[0], given, rank, len(members), seats, team_size)
            self._keys[members, seats, team_size] = (number, mark)
        return self._keys[members, seats, team_size]

    def routes(self, perm: Perm) -> Routes:
        """For each lane of this rank where it sends and from where it receives; see ``members.routes``."""
        return routes(self.rank, len(setup.devices_of_this_rank()), perm)

    def free(self) -> None:
        """Gives the communicator's MPI resources back. All its ranks must make this call.

        Programs that name it end in an error from now on. Waits for those already dispatched. The MPI communicator
        goes too if :meth:`split` made it.
        """
        if self._freed:
            return
        dispatch.flush()
        native.free_communicator(self._key[0])
        object.__setattr__(self, "_freed", True)
        self.mpi.Delete_attr(_keyval())
        self._calls.Free()
        self._rest.Free()
        if self._owned:
            self.mpi.Free()


def _duplicate(mpi: MPI.Intracomm) -> MPI.Intracomm:
    duplicate = mpi.Dup()
    duplicate.Set_errhandler(MPI.ERRORS_RETURN)
    return duplicate


@functools.cache
def _keyval() -> int:
    """The attribute that leads from an MPI communicator to its :class:`Communicator`."""
    return MPI.Comm.Create_keyval(nopython=False)


def known(mpi: MPI.Intracomm) -> Communicator | None:
    """The :class:`Communicator` that was made for an MPI communicator, if one was."""
    found = mpi.Get_attr(_keyval())
    return found if isinstance(found, Communicator) else None
