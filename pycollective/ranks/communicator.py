"""A communicator: a group of ranks that call collectives together."""

from __future__ import annotations

import functools
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

from pycollective.errors import fail, integer, message, sequence
from pycollective.jax_support import jax_internals
from pycollective.ordering import dispatch
from pycollective.ranks import accelerators, setup
from pycollective.ranks.communicator_resources import CommunicatorResources, abandon_all, explain_exhaustion, keyval
from pycollective.ranks.out_of_band import OutOfBand
from pycollective.ranks.participants import (
    LaneRoutes,
    Participants,
    Perm,
    PlaceInTeam,
    ProgramKey,
    SubCommunicator,
    fingerprint,
    group_of,
    lane_routes,
    program_fingerprint,
)
from pycollective.transport.chosen import transport
from pycollective.transport.message_constants import PROC_NULL, MessageConstant
from pycollective.transport.mpi import MPI, host_of, register_communicator
from pycollective.transport.native import Part, Whole
from pycollective.transport.watch import waiting


@jax_internals.keep_weakly
class Communicator:
    """A group of ranks that call collectives together.

    Its messages use private duplicates of :attr:`mpi`, so they do not mix with the program's own messages on
    :attr:`mpi`. The constructor makes two duplicates. A program on several devices makes more of them when it needs
    them. There is one object for each MPI communicator, so two objects are equal if their MPI handles are equal.
    Communicators are hashable, and may be static arguments of :func:`jax.jit`.

    Args:
        mpi: an mpi4py intracommunicator. All its ranks must make this call.

    Attributes:
        rank: the rank of this process, from 0.
        size: the number of ranks.
        local_rank: the place of this rank among the ranks on this host, from 0.
        local_size: the number of ranks on this host.
        host_index: the number of this host, from 0; hosts are numbered in the order of their lowest ranks.
        host_count: the number of hosts.
        mpi: the mpi4py communicator, which the program may use for its own messages. Keep this object, or the
            communicator, as long as a library of another language uses its handle.

    Raises:
        TypeError: ``mpi`` is not an mpi4py intracommunicator.
        RuntimeError: the package has not started, and ``mpi`` lacks some ranks.

    Example:
        >>> import pycollective as pc
        >>> comm = pc.world()
        >>> 0 <= comm.rank < comm.size and comm.local_size <= comm.size
        True
    """

    __slots__ = (
        "__weakref__",
        "_identity",
        "_keys",
        "_name",
        "_out_of_band",
        "_parts",
        "_program_key",
        "_resources",
        "_world_ranks",
        "host_count",
        "host_index",
        "local_rank",
        "local_size",
        "mpi",
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
    _out_of_band: OutOfBand  # messages between its ranks that are not part of programs
    _name: str
    _world_ranks: tuple[int, ...]  # the place of each of its ranks in MPI_COMM_WORLD
    _identity: int  # the same on all its ranks, and no other communicator has it
    _program_key: ProgramKey
    _parts: dict[Any, SubCommunicator]
    _keys: dict[Any, ProgramKey]  # the keys of its parts and of groups of devices
    _resources: CommunicatorResources  # what was made for mpi; it outlives this object

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
        return made_for(mpi) or cls._make(mpi, mpi.Get_name() or "unnamed", owned=False)

    @classmethod
    def _make(cls, mpi: MPI.Comm, name: str, *, owned: bool) -> Communicator:
        """Makes the object. All ranks must make this call. ``owned``: :meth:`free` frees ``mpi`` as well."""
        assert isinstance(mpi, MPI.Intracomm)
        # A host name would not do: containers may share one, and a host may have several.
        with explain_exhaustion(), host_of(mpi) as shared:
            place = _place_of_host(mpi, shared)
        lanes = tuple(map(accelerators.lane_id, setup.devices_of_this_rank()))
        world_ranks = tuple(MPI.Group.Translate_ranks(mpi.Get_group(), None, MPI.COMM_WORLD.Get_group()))
        # One for collectives, and for messages under the program's own tags; one for channels, ppermute, messages
        # between devices, out-of-band messages.
        calls, rest = _duplicate(mpi), _duplicate(mpi)
        own_fingerprint = program_fingerprint(world_ranks, mpi.rank, lanes)
        free_tag = 2 * len(lanes) ** 2  # native/calls/communicators.cc uses the smaller and the larger tags
        # The ranks of a communicator make their communicators in one order.
        _made[world_ranks] += 1
        identity = fingerprint(world_ranks, _made[world_ranks], *_losses)
        number = transport().open(Whole(name, own_fingerprint, identity, world_ranks, lanes, calls, rest))
        facts = {
            "rank": mpi.rank,
            "size": mpi.size,
            **place,
            **_place_in_grid(mpi),
            "_out_of_band": OutOfBand(rest, free_tag),
            "_world_ranks": world_ranks,
            "_identity": identity,
            "_program_key": (number, own_fingerprint),
            "_name": name,
            "_keys": {},
        }
        _end_with_mpi()
        resources = CommunicatorResources(mpi, calls, rest, facts, owned=owned)
        mpi.Set_attr(keyval(), resources)
        return cls._of(resources, mpi)

    @classmethod
    def _of(cls, resources: CommunicatorResources, mpi: MPI.Intracomm) -> Communicator:
        """The object of an MPI communicator: the program's own, or a new one if the program has dropped it."""
        known: Communicator | None = resources.object(Communicator)
        if known is None:
            known = object.__new__(CartCommunicator if "dims" in resources.facts else Communicator)
            for name, value in {**resources.facts, "mpi": mpi, "_resources": resources, "_parts": {}}.items():
                object.__setattr__(known, name, value)  # the class is frozen
            resources.register_objects(known, mpi)
        return known

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

    def __repr__(self) -> str:
        end = self._resources.end and f", {self._resources.end}"
        return f"Communicator({self._name}, rank {self.rank} of {self.size}{end})"

    @property
    def name(self) -> str:
        """The name of the communicator in error messages."""
        return self._name

    @property
    def _is_freed(self) -> bool:
        """Whether the communicator is unusable: it was freed, has lost a rank, or the program has ended MPI."""
        return self._resources.end != ""

    @property
    def _key(self) -> ProgramKey:
        """The name of the communicator in compiled programs.

        Raises:
            ValueError: the communicator was freed.
        """
        self._check_live("Communicator")
        return self._program_key

    @property
    def _local_axes(self) -> tuple[tuple[str, int], ...]:
        """Empty: each local device takes part on its own lane, and none together with another."""
        return ()

    @property
    def _comm(self) -> Communicator:
        """The communicator itself; a ``mesh.DeviceGroup`` has its ranks under the same name."""
        return self

    def _check_live(self, where: str) -> None:
        """Raises ValueError, in the name of the operation ``where``, if the communicator is unusable."""
        if self._resources.end:
            what, remedy = _ENDS[self._resources.end]
            got = f"{self._name}, which {what}"
            raise ValueError(message(where, "a live communicator", got, remedy, rank=self.rank, size=self.size))

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Splits the communicator into one for each color. All its ranks must make this call.

        Args:
            color: the ranks with the same color form a new communicator. None: this rank is in no new communicator.
            key: the ranks of a new communicator are ordered by their keys; ranks with equal keys keep their order.
                Default 0.

        Returns:
            The new communicator; None for ``color=None``. When no rank refers any more to it, to its :attr:`mpi` or to
            a program that uses it, a later split of this communicator frees it, as :meth:`free` does.

        Raises:
            ValueError: this communicator was freed.

        Order:
            Outside programs, in the order of the calls.

        Source:
            MPI_Comm_split (MPI standard, 7.4.2).

        Example:
            >>> import pycollective as pc
            >>> even_or_odd = pc.world().split(color=pc.world().rank % 2)
            >>> even_or_odd.size <= pc.world().size
            True
        """
        self._check_live("Communicator.split")
        chosen = MPI.UNDEFINED if color is None else color
        return self._derive(lambda: self.mpi.Split(chosen, key), f"{self._name}/{color}")

    def split_by_host(self) -> Communicator:
        """Splits the communicator into one for each host. All its ranks must make this call.

        Returns:
            The communicator of the ranks on this rank's host, in the order of this communicator.

        Raises:
            ValueError: this communicator was freed.

        Order:
            Outside programs, in the order of the calls.

        Source:
            MPI_Comm_split_type (MPI standard, 7.4.2).

        Example:
            >>> import pycollective as pc
            >>> pc.world().split_by_host().size == pc.world().local_size
            True
        """
        self._check_live("Communicator.split_by_host")
        split = functools.partial(self.mpi.Split, self.host_index, self.rank)
        made = self._derive(split, f"{self._name}/host{self.host_index}")
        assert made is not None
        return made

    def _derive(self, make: Callable[[], MPI.Comm], name: str) -> Communicator | None:
        """Makes a communicator of some of the ranks; None: this rank is in none. All ranks must make this call.

        Args:
            make: the function of MPI that makes it.
            name: its name in messages.
        """
        with waiting("split", self._identity):
            number = self._resources.split()
            with explain_exhaustion():
                part = make()
            if part == MPI.COMM_NULL:
                return None
            made = Communicator._make(part, name, owned=True)
            self._resources.add_split(number, made._resources)
            return made

    def _groups(self, groups: Sequence[Sequence[int]]) -> Participants:
        """This rank's group, with ranks in the order of the group; each rank is in exactly one group."""
        return self._part(group_of(self.rank, groups))

    def _reversed(self) -> Participants:
        """The same ranks in the opposite order."""
        return self._part(tuple(range(self.size))[::-1])

    def _part(self, members: tuple[int, ...], lane_ids: tuple[int, ...] | None = None) -> Participants:
        """A part of the ranks, this one among them. Making it sends no message; each call returns the same object.

        Args:
            members: the ranks, in the order of the part.
            lane_ids: this rank's devices, as ``accelerators.lane_id`` names them; they pair with those of other ranks
                by their place here. Default those of :func:`init`, which pair by their index. Each rank has the same
                number of them.
        """
        if lane_ids is None and members == tuple(range(self.size)):
            return self
        if (members, lane_ids) not in self._parts:
            places = None
            if lane_ids is not None:
                places = tuple(PlaceInTeam(lane_id, team=i, member=0) for i, lane_id in enumerate(lane_ids))
            lanes = len(setup.devices_of_this_rank() if lane_ids is None else lane_ids)
            self._parts[members, lane_ids] = SubCommunicator(self, members, lane_ids, places, lanes)
        return self._parts[members, lane_ids]

    def _key_of(self, members: tuple[int, ...], places: tuple[PlaceInTeam, ...] | None, team_size: int) -> ProgramKey:
        """The name of a part, or of a group of devices, in compiled programs; each call returns the same.

        Args:
            members: the ranks, in the order of the part.
            places: the places of the devices of a mesh in their teams; None: the devices of :func:`init`, each in a
                team of its own.
            team_size: the number of devices in a team.
        """
        if (members, places, team_size) not in self._keys:
            rank = members.index(self.rank)
            lanes = tuple(map(accelerators.lane_id, setup.devices_of_this_rank())) if places is None else places
            world_ranks = tuple(self._world_ranks[member] for member in members)
            own_fingerprint = program_fingerprint(world_ranks, rank, lanes, team_size)
            all_in_order = members == tuple(range(self.size))
            shown = [*map(str, members[:4]), *(["..."] if len(members) > 4 else [])]
            name = self._name if all_in_order else f"{self._name}[{', '.join(shown)}]"
            given = () if all_in_order else members
            part = Part(name, own_fingerprint, self._program_key[0], given, rank, len(members), places, team_size)
            number = transport().open_part(part)
            self._keys[members, places, team_size] = (number, own_fingerprint)
        return self._keys[members, places, team_size]

    def _lane_routes(self, perm: Perm) -> LaneRoutes:
        """The destination and the source of each lane of this rank in a permutation of the ranks."""
        return lane_routes(self.rank, len(setup.devices_of_this_rank()), perm)

    def free(self) -> None:
        """Frees the communicator's MPI resources. All its ranks must make this call.

        If :meth:`split` made the communicator, its :attr:`mpi` is freed as well. If the program frees :attr:`mpi`, the
        communicator is freed, too. A later call of a program that names the communicator raises an error. Messages that
        were sent and never received are lost, with a RuntimeWarning.

        Order:
            Outside programs: it waits for programs that were dispatched before.

        Source:
            MPI_Comm_free (MPI standard, 7.4.3).

        Example:
            >>> import pycollective as pc
            >>> part = pc.world().split(color=0)
            >>> part.free()
        """
        if not self._resources.end:
            dispatch.flush()
            self._resources.release(mpi=self.mpi)


@jax_internals.keep_weakly
class CartCommunicator(Communicator):
    """A communicator whose ranks form a Cartesian grid: :func:`make_cart` makes it.

    It is a :class:`Communicator`, so all collectives and messages take it. Its ranks are the points of the grid in
    row-major order: the last coordinate changes fastest. :meth:`Communicator.split` gives communicators without a grid.

    Args:
        mpi: an mpi4py communicator with a Cartesian topology, such as ``comm.Create_cart(...)``. All its ranks must
            make this call. ``Communicator(mpi)`` gives the same object.

    Attributes:
        dims: the number of ranks along each axis of the grid.
        periods: for each axis, whether it is a ring.
        coords: the coordinates of this rank.

    Raises:
        TypeError: ``mpi`` has no Cartesian topology.

    Source:
        Virtual topologies (MPI standard, 8.5).

    Example:
        >>> import pycollective as pc
        >>> cart = pc.make_cart((0, 1))
        >>> cart.dims == (pc.world().size, 1) and cart.coords == (cart.rank, 0)
        True
    """

    __slots__ = ("coords", "dims", "periods")

    dims: tuple[int, ...]
    periods: tuple[bool, ...]
    coords: tuple[int, ...]

    def __new__(cls, mpi: MPI.Intracomm) -> CartCommunicator:
        if not isinstance(mpi, MPI.Intracomm) or mpi == MPI.COMM_NULL or mpi.Get_topology() != MPI.CART:
            remedy = "Pass comm.Create_cart(dims), or call pycollective.make_cart(dims)."
            fail(TypeError, "CartCommunicator", None, "an mpi4py communicator with a Cartesian topology", mpi, remedy)
        return cast("CartCommunicator", super().__new__(cls, mpi))

    def __repr__(self) -> str:
        return f"Cart{super().__repr__()}"

    def rank_of(self, coords: Sequence[int]) -> int:
        """Returns the rank at these coordinates.

        Args:
            coords: a coordinate for each axis. Along a ring they are taken modulo its length.

        Raises:
            TypeError: a coordinate is no integer.
            ValueError: another number of coordinates than axes, or a coordinate beyond an open edge.

        Source:
            MPI_Cart_rank (MPI standard, 8.5.5).

        Example:
            >>> import pycollective as pc
            >>> cart = pc.make_cart((0, 0), periods=True)
            >>> cart.rank_of(cart.coords) == cart.rank == cart.rank_of([-n + c for n, c in zip(cart.dims, cart.coords)])
            True
        """
        where = "CartCommunicator.rank_of"
        given = tuple(integer(where, self, "a coordinate", coord) for coord in sequence(where, self, "coords", coords))
        inside = [ring or 0 <= coord < n for coord, n, ring in zip(given, self.dims, self.periods, strict=False)]
        if len(given) != len(self.dims) or not all(inside):
            expected = f"{len(self.dims)} coordinates inside the grid {self.dims}"
            fail(ValueError, where, self, expected, given, "shift() has PROC_NULL beyond open edges.")
        rank = 0
        for coord, n in zip(given, self.dims, strict=True):
            rank = rank * n + coord % n
        return rank

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Returns the coordinates of a rank.

        Raises:
            TypeError: ``rank`` is no integer.
            ValueError: ``rank`` is no rank of this communicator.

        Source:
            MPI_Cart_coords (MPI standard, 8.5.5).

        Example:
            >>> import pycollective as pc
            >>> cart = pc.make_cart((0, 0))
            >>> cart.coords_of(cart.rank) == cart.coords and cart.coords_of(0)
            (0, 0)
        """
        where = "CartCommunicator.coords_of"
        left = integer(where, self, "rank", rank)
        if not 0 <= left < self.size:
            fail(ValueError, where, self, f"a rank from 0 to {self.size - 1}", rank, "Ranks count from 0.")
        coords = []
        for n in reversed(self.dims):
            left, coord = divmod(left, n)
            coords.append(coord)
        return tuple(reversed(coords))

    def shift(self, axis: int, displacement: int = 1) -> tuple[int | MessageConstant, int | MessageConstant]:
        """Returns the ranks with which this rank exchanges when arrays move along an axis of the grid.

        Args:
            axis: the axis. Negative numbers count from the last one.
            displacement: how many ranks an array moves up the axis; negative: down. Default 1.

        Returns:
            The rank that sends to this one, and the rank to which this one sends: ``source`` and ``dest`` of
            :func:`sendrecv`. Each is :data:`PROC_NULL` beyond an open edge.

        Raises:
            TypeError: an argument is no integer.
            ValueError: there is no such axis.

        Source:
            MPI_Cart_shift (MPI standard, 8.5.6).

        Example:
            Each rank of an open chain gets the number of the rank before it; rank 0 gets zero:

            >>> import pycollective as pc
            >>> cart = pc.make_cart((0,))
            >>> source, dest = cart.shift(0)
            >>> int(pc.sendrecv(pc.axis_index(cart) + 1, cart, source=source, dest=dest)) == cart.rank
            True
        """
        where = "CartCommunicator.shift"
        along, step = self._axis(where, axis), integer(where, self, "displacement", displacement)
        return self._neighbor(along, -step), self._neighbor(along, step)

    def sub(self, remain_dims: Sequence[bool]) -> CartCommunicator:
        """Splits the grid into grids of fewer axes, such as the rows of a matrix. All its ranks must make this call.

        Args:
            remain_dims: for each axis, whether it stays: ``(False, True)`` gives each rank the communicator of its row.

        Returns:
            The communicator of the ranks that have this rank's coordinates along the axes that do not stay. It is freed
            as a :meth:`Communicator.split` is.

        Raises:
            ValueError: this communicator was freed; not one truth value for each axis; no axis stays.

        Order:
            Outside programs, in the order of the calls.

        Source:
            MPI_Cart_sub (MPI standard, 8.5.7).

        Example:
            >>> import pycollective as pc
            >>> row = pc.make_cart((1, 0)).sub((False, True))
            >>> row.dims == (pc.world().size,)
            True
        """
        where = "CartCommunicator.sub"
        self._check_live(where)
        remain = tuple(bool(stays) for stays in sequence(where, self, "remain_dims", remain_dims))
        if len(remain) != len(self.dims) or not any(remain):
            expected = f"{len(self.dims)} truth values, one of them true"
            fail(ValueError, where, self, expected, remain_dims, "Pass (False, True) for the rows of a matrix.")
        shown = ", ".join(":" if stays else str(coord) for stays, coord in zip(remain, self.coords, strict=True))
        make = functools.partial(MPI.Cartcomm(self.mpi).Sub, remain)
        return cast("CartCommunicator", self._derive(make, f"{self._name}[{shown}]"))

    def _axis(self, where: str, axis: int) -> int:
        """Returns the axis, counted from 0."""
        ndim = len(self.dims)
        number = integer(where, self, "axis", axis)
        if not -ndim <= number < ndim:
            fail(ValueError, where, self, f"an axis of a grid of {ndim}", axis, "Axes count from 0, as in dims.")
        return number % ndim

    def _neighbor(self, axis: int, step: int) -> int | MessageConstant:
        """Returns the rank at a distance along an axis; PROC_NULL beyond an open edge."""
        coord = self.coords[axis] + step
        if not self.periods[axis] and not 0 <= coord < self.dims[axis]:
            return PROC_NULL
        return self._rank_along(axis, coord)

    def _line(self, axis: int) -> Participants:
        """The ranks that have this rank's other coordinates, in the order of the axis. Making it sends no message."""
        return self._part(tuple(self._rank_along(axis, coord) for coord in range(self.dims[axis])))

    def _rank_along(self, axis: int, coord: int) -> int:
        """Returns the rank with this coordinate along an axis and this rank's other coordinates."""
        return self.rank_of([*self.coords[:axis], coord, *self.coords[axis + 1 :]])


_made: Counter[tuple[int, ...]] = Counter()
"""How many communicators of these ranks of MPI_COMM_WORLD this process has made since a rank was lost."""

_losses: list[int] = []
"""The number of times that ranks were lost, if they were. It tells communicators of the same ranks apart."""

_ENDS = {
    "freed": ("was freed", "Keep it until its last use."),
    "lost": ("has lost a rank", "Make it anew from pycollective.world()."),
    "finalized": (
        "ended with MPI.Finalize()",
        "Use it before that; without that call, mpi4py ends MPI with the process.",
    ),
}
"""How a communicator may have ended, and what to do about it."""


def lose_all(losses: int) -> None:
    """Makes all communicators unusable, without a call of MPI, since a rank has failed.

    All remaining ranks must make this call.

    Args:
        losses: the number of such calls so far, including this one; the same on all ranks.
    """
    abandon_all("lost")
    _made.clear()
    _losses[:] = [losses]


def _place_of_host(mpi: MPI.Intracomm, shared: MPI.Intracomm) -> dict[str, int]:
    """The facts of a communicator about hosts. All its ranks must make this call.

    Args:
        mpi: the ranks.
        shared: those of this host, in the same order.
    """
    is_first = array("i", [shared.rank == 0])
    hosts_so_far, host_count = array("i", [0]), array("i", [0])
    mpi.Scan(is_first, hosts_so_far, op=MPI.SUM)  # the hosts whose lowest rank is this one or a lower one
    mpi.Allreduce(is_first, host_count, op=MPI.SUM)
    shared.Bcast(hosts_so_far)
    return {
        "local_rank": shared.rank,
        "local_size": shared.size,
        "host_index": hosts_so_far[0] - 1,
        "host_count": host_count[0],
    }


def _place_in_grid(mpi: MPI.Intracomm) -> dict[str, Any]:
    """The facts of a communicator with a Cartesian topology about its grid; none for any other communicator."""
    if mpi.Get_topology() != MPI.CART:
        return {}
    dims, periods, coords = MPI.Cartcomm(mpi).Get_topo()
    return {"dims": tuple(dims), "periods": tuple(map(bool, periods)), "coords": tuple(coords)}


def _duplicate(mpi: MPI.Intracomm) -> MPI.Intracomm:
    with explain_exhaustion():
        duplicate = register_communicator(mpi.Dup())
    duplicate.Set_errhandler(MPI.ERRORS_RETURN)
    return duplicate


@functools.cache
def _end_with_mpi() -> None:
    """Makes all communicators unusable at MPI_Finalize, which first deletes the attributes of ``COMM_SELF``."""
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: abandon_all("finalized")), True)


def made_for(mpi: MPI.Intracomm) -> Communicator | None:
    """The :class:`Communicator` that was made for an MPI communicator; None if none was."""
    resources = mpi.Get_attr(keyval())
    return Communicator._of(resources, mpi) if isinstance(resources, CommunicatorResources) else None
