"""Named axes cut from ranks x local devices.

Devices are numbered ``rank * local devices + local index``. A mesh lays that row of numbers out in row-major order,
as :class:`jax.sharding.Mesh` does, so each rank's devices must form a box in it. At most one axis is then cut both
ways; the axes before it lie across ranks, those after it inside each rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import jax
import numpy as np
from jax import lax

from pycollective import errors
from pycollective.named_axes.names import AxisName
from pycollective.ordering import jaxprs
from pycollective.ranks import accelerators
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.participants import LaneRoutes, Participants, Perm, PlaceInTeam, ProgramKey, group_of
from pycollective.ranks.setup import devices_of_this_rank
from pycollective.ranks.world import given_or_world


@dataclass(frozen=True)
class Axis:
    """One named axis: ``size = ranks * local``; the index is ``rank part * local + local part``.

    Attributes:
        name: as programs call it.
        ranks: how many parts of it lie on different ranks.
        local: how many devices of one rank lie along it.
    """

    name: AxisName
    ranks: int
    local: int

    @property
    def size(self) -> int:
        """Number of devices along the axis."""
        return self.ranks * self.local

    @property
    def local_name(self) -> str:
        """The name of the local part in the program that XLA runs on this rank's devices: the axis's own.

        So results lie as the user's own meshes say. Only a discharged program means the local part by it.
        """
        return str(self.name)


@dataclass(frozen=True)
class Mesh:
    """Named axes over the devices of all ranks; see :func:`make_mesh`.

    Attributes:
        comm: the ranks.
        devices: of this rank, in order.
        axes: outermost first.
    """

    comm: Communicator
    devices: tuple[jax.Device, ...]
    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        # Found here, while all ranks trace: at run time the others of its team would wait for such a device.
        unknown = [device for device in self.devices if device not in devices_of_this_rank()]
        if unknown:
            errors.fail(
                ValueError,
                "Mesh",
                self.comm,
                "a device of pycollective.init(devices=...)",
                unknown,
                "Name it in init, before anything else uses the package.",
            )

    def __repr__(self) -> str:
        shape = ", ".join(f"{axis.name!r}: {axis.size}" for axis in self.axes)
        return f"Mesh({{{shape}}}, {len(self.devices)} device(s) on each of {self.comm.size} rank(s))"

    @cached_property
    def shape(self) -> dict[AxisName, int]:
        """Size by axis name."""
        return {axis.name: axis.size for axis in self.axes}

    @cached_property
    def local_mesh(self) -> jax.sharding.Mesh:
        """This rank's devices, by the local names of the axes that have more than one of them (or of the last)."""
        axes = [axis for axis in self.axes if axis.local > 1] or self.axes[-1:]
        grid = np.array(self.devices, dtype=object).reshape([axis.local for axis in axes])
        return jax.sharding.Mesh(grid, tuple(axis.local_name for axis in axes))

    @cached_property
    def abstract_mesh(self) -> jax.sharding.AbstractMesh:
        """The axes at their full sizes, as a program sees them."""
        return jaxprs.abstract_mesh(self.shape)

    def index(self, name: AxisName) -> Any:
        """The calling device's index along an axis: a Python number where the rank alone decides it, else traced."""
        parts = np.unravel_index(self.comm.rank, [axis.ranks for axis in self.axes])
        for axis, part in zip(self.axes, parts, strict=True):
            if axis.name == name:
                index = int(part) * axis.local
                return index + lax.axis_index(axis.local_name) if axis.local > 1 else index
        raise KeyError(name)

    def over(self, names: Sequence[AxisName]) -> DeviceGroup:
        """The devices that differ from a device along ``names`` alone."""
        return DeviceGroup(self, tuple(names))


def _rows(sizes: Sequence[int], along: Sequence[int]) -> Any:
    """Numbers of a grid of ``sizes`` in row-major order: one row for each line along the axes ``along``."""
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    others = [i for i in range(len(sizes)) if i not in along]
    return grid.transpose([*others, *along]).reshape(-1, math.prod(sizes[i] for i in along))


class DeviceGroup:
    """The devices along some axes of a mesh, over which one collective goes; for primitives, as a communicator.

    Its devices are numbered in the order of the mesh: ``rank of comm * local devices + member``. Groups along the same
    axes of equal meshes are equal. Making one speaks with nobody.

    Attributes:
        mesh: the mesh.
        comm: the ranks along the axes, in row-major order; a device pairs with that of the same place in the mesh.
        local: number of local devices along the axes.
        size: number of devices along the axes.
    """

    def __init__(self, mesh: Mesh, names: tuple[AxisName, ...]) -> None:
        self.mesh = mesh
        self._names = names
        along = [i for i, axis in enumerate(mesh.axes) if axis.name in names]
        self._axes = tuple(mesh.axes[i] for i in along)
        ranks = _rows([axis.ranks for axis in mesh.axes], along)
        self._members = group_of(mesh.comm.rank, ranks.tolist())
        # Each row is a team: its devices meet in shared memory; each is a member, and calls on its own lane.
        self._teams = _rows([axis.local for axis in mesh.axes], along).tolist()
        self.local = len(self._teams[0])
        # A program on one device of each rank needs no place for it.
        self.comm = mesh.comm.part(self._members, mesh.devices if len(mesh.devices) > 1 else None)
        self.rank = self.comm.rank
        self.size = self.comm.size * self.local
        self._places = {device: (t, m) for t, team in enumerate(self._teams) for m, device in enumerate(team)}

    def __repr__(self) -> str:
        return f"Group({', '.join(map(repr, self._names))} of {self.mesh!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceGroup) and (self.mesh, self._names) == (other.mesh, other._names)

    def __hash__(self) -> int:
        return hash((self.mesh, self._names))

    @property
    def key(self) -> ProgramKey:
        """By which compiled programs name it.

        Raises:
            ValueError: the communicator of the mesh was freed.
        """
        self.mesh.comm.check_live("Mesh")
        if self.local == 1:
            return self.comm.key
        places = [
            PlaceInTeam(accelerators.lane_id(device), *self._places[i]) for i, device in enumerate(self.mesh.devices)
        ]
        return self.mesh.comm.key_of(self._members, tuple(places), self.local)

    @cached_property
    def local_axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes along which several devices of one rank lie; empty for one device."""
        return tuple((axis.local_name, axis.local) for axis in self._axes if axis.local > 1)

    def lane_routes(self, perm: Perm) -> LaneRoutes:
        """For each device of the mesh on this rank where it sends and from where: ``rank * devices + place``, or -1.

        Args:
            perm: (source, destination) numbers of devices, in the order of the mesh.
        """
        if self.local == 1:
            return self.comm.lane_routes(perm)
        to, back = dict(perm), {dest: source for source, dest in perm}

        def at(number: int | None, team: int) -> int:
            if number is None:
                return -1
            rank, member = divmod(number, self.local)
            return int(rank * len(self.mesh.devices) + self._teams[team][member])

        places = [self._places[i] for i in range(len(self.mesh.devices))]
        numbers = [(self.comm.rank * self.local + member, team) for team, member in places]
        return tuple(at(to.get(own), team) for own, team in numbers), tuple(
            at(back.get(own), team) for own, team in numbers
        )

    def groups(self, groups: Sequence[Sequence[int]]) -> Participants:
        """The ranks of this rank's group; for one device of each rank alone."""
        assert self.local == 1, "groups of devices need not be alike on all lanes"
        return self.comm.groups(groups)

    def reversed(self) -> Participants:
        """The ranks in the opposite order; for one device of each rank alone."""
        assert self.local == 1, "prefixes go over ranks"
        return self.comm.reversed()

    def index(self) -> Any:
        """The calling device's number in the program's order: a Python number if the rank decides it, else traced."""
        index: Any = 0
        for name in self._names:
            index = index * self.mesh.shape[name] + self.mesh.index(name)
        return index

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, in the order of the mesh."""
        return tuple(axis.size for axis in self._axes)

    @cached_property
    def program_axes(self) -> tuple[int, ...]:
        """For each name of the program its place among :attr:`shape`."""
        return tuple([axis.name for axis in self._axes].index(name) for name in self._names)

    @property
    def in_order(self) -> bool:
        """Whether the program names the axes in the order of the mesh."""
        return self.program_axes == tuple(range(len(self.shape)))

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """``numbers[i]``: the device that is the program's ``i``-th, the last of the names counting fastest."""
        return tuple(np.arange(self.size).reshape(self.shape).transpose(self.program_axes).reshape(-1).tolist())


def make_mesh(
    axis_shapes: Sequence[int],
    axis_names: Sequence[AxisName],
    *,
    comm: Communicator | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Cuts the devices of all ranks into named axes, in row-major order. All ranks must make this call.

    Args:
        axis_shapes: number of devices along each axis; one may be -1 for what is left.
        axis_names: names of the axes.
        comm: the ranks; default the world.
        devices: of this rank, as many on each; default all of :func:`pycollective.init`.

    Returns:
        A mesh for :func:`pycollective.shard_map`.

    Raises:
        ValueError: the shapes do not multiply to ``ranks * local devices``; a name comes twice; an axis would cut a
            rank's devices so that they form no box.

    Source: :func:`jax.make_mesh`.

    Example:
        >>> import pycollective as pc
        >>> mesh = pc.make_mesh((-1, 1), ("data", "model"))
        >>> mesh.shape["data"] >= pc.world().size and mesh.shape["model"] == 1
        True
    """
    comm = given_or_world("make_mesh", comm)
    own = devices_of_this_rank() if devices is None else tuple(devices)
    names = tuple(axis_names)
    total = comm.size * len(own)

    def fail(expected: str, got: Any, remedy: str) -> NoReturn:
        errors.fail(ValueError, "make_mesh", comm, expected, got, remedy)

    if len(set(own)) < len(own):
        fail("each device once", own, "Name each device of this rank once.")
    if len(names) != len(axis_shapes) or len(set(names)) != len(names):
        fail("a name of its own for each axis", f"shapes {tuple(axis_shapes)}, names {names}", "Name each axis once.")
    sizes = [errors.integer("make_mesh", comm, "each size", size) for size in axis_shapes]
    if sizes.count(-1) == 1:
        rest = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = total // rest if rest else 0
    if math.prod(sizes) != total or any(size < 1 for size in sizes):
        fail(
            f"axes of {total} devices ({comm.size} ranks x {len(own)} local)",
            f"shape {tuple(axis_shapes)}",
            "Change the shape, the number of ranks, or JAX_NUM_CPU_DEVICES.",
        )
    axes: list[Axis] = []
    left = len(own)  # of this rank's devices, still to be laid out; innermost axis first
    for name, size in zip(reversed(names), reversed(sizes), strict=True):
        local = math.gcd(size, left) if left < size else size
        if left % local or (local < size and local != left):
            fail(
                f"each rank's {len(own)} devices to fill whole axes from the innermost, and a divisor of the next",
                f"shape {tuple(sizes)} of {names}",
                "Choose inner sizes whose product divides the number of local devices, or is divided by it.",
            )
        axes.append(Axis(name, size // local, local))
        left //= local
    return Mesh(comm, own, tuple(reversed(axes)))


def line(name: AxisName, comm: Communicator, devices: Sequence[jax.Device]) -> Mesh:
    """One axis over all ranks and ``devices`` of each."""
    return Mesh(comm, tuple(devices), (Axis(name, comm.size, len(devices)),))
