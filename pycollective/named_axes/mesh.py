"""Meshes: the devices of all ranks laid out along named axes, and groups of devices along some of the axes.

A device's number is ``rank * local devices + local index``. A mesh lays the numbers out in row-major order, as
:class:`jax.sharding.Mesh` does with its devices. The devices of each rank must form a box in the mesh. So at most one
axis has both several ranks and several devices of a rank. The axes before it have devices of different ranks only, and
the axes after it devices of one rank only.
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
from pycollective.jax_support import jax_internals, jaxprs
from pycollective.named_axes.names import AxisName
from pycollective.ranks import accelerators
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.participants import LaneRoutes, Participants, Perm, PlaceInTeam, ProgramKey, group_of
from pycollective.ranks.setup import devices_of_this_rank
from pycollective.ranks.world import given_or_world


@dataclass(frozen=True)
class Axis:
    """One named axis: ``size = ranks * local``.

    A device's index along it is ``rank part * local + local part``.

    Attributes:
        name: the name that programs use.
        ranks: the number of parts of the axis that lie on different ranks.
        local: the number of devices of one rank along the axis.
    """

    name: AxisName
    ranks: int
    local: int

    @property
    def size(self) -> int:
        """The number of devices along the axis."""
        return self.ranks * self.local

    @property
    def local_name(self) -> str:
        """The name of the axis in the program of this rank's devices, where its size is ``local``.

        It is the axis's own name, so that the meshes of results have the names of the user's own meshes. Only in a
        discharged program does the name mean the local part of the axis.
        """
        return str(self.name)


@jax_internals.keep_weakly
@dataclass(frozen=True)
class Mesh:
    """Named axes over the devices of all ranks; see :func:`make_mesh`.

    Attributes:
        comm: the ranks.
        lane_ids: the ids of this rank's devices (``accelerators.lane_id``), in the order of the mesh. JAX's new devices
            after ``jax.extend.backend.clear_backends`` have the same ids.
        axes: the axes, outermost first.
    """

    comm: Communicator
    lane_ids: tuple[int, ...]
    axes: tuple[Axis, ...]

    def __repr__(self) -> str:
        shape = ", ".join(f"{axis.name!r}: {axis.size}" for axis in self.axes)
        return f"Mesh({{{shape}}}, {len(self.lane_ids)} device(s) on each of {self.comm.size} rank(s))"

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """This rank's devices, in the order of the mesh."""
        own = {accelerators.lane_id(device): device for device in devices_of_this_rank()}
        return tuple(own[lane_id] for lane_id in self.lane_ids)

    @cached_property
    def shape(self) -> dict[AxisName, int]:
        """The size of each axis, by its name."""
        return {axis.name: axis.size for axis in self.axes}

    @property
    def local_mesh(self) -> jax.sharding.Mesh:
        """This rank's devices as a mesh of JAX. An axis with devices of different ranks only has the size 1."""
        grid = np.array(self.devices, dtype=object).reshape([axis.local for axis in self.axes])
        return jax.sharding.Mesh(grid, tuple(axis.local_name for axis in self.axes))

    @cached_property
    def abstract_mesh(self) -> jax.sharding.AbstractMesh:
        """The axes at their full sizes, as a program sees them, without devices."""
        return jaxprs.abstract_mesh(self.shape)

    def index(self, name: AxisName) -> Any:
        """Returns the calling device's index along an axis: an int if the rank determines it, else a traced number."""
        parts = np.unravel_index(self.comm.rank, [axis.ranks for axis in self.axes])
        for axis, part in zip(self.axes, parts, strict=True):
            if axis.name == name:
                index = int(part) * axis.local
                return index + lax.axis_index(axis.local_name) if axis.local > 1 else index
        raise KeyError(name)

    def group_along(self, names: Sequence[AxisName]) -> DeviceGroup:
        """Returns for each device the group of devices that differ from it only along ``names``."""
        return DeviceGroup(self, tuple(names))


def _lines_of_grid(sizes: Sequence[int], along: Sequence[int]) -> Any:
    """Numbers the places of a grid in row-major order, and returns one row for each line of the grid.

    Args:
        sizes: the lengths of the grid's axes.
        along: the axes along which a line runs. With several axes a line has all places along them.

    Example:
        >>> _lines_of_grid([2, 3], [0]).tolist()
        [[0, 3], [1, 4], [2, 5]]
    """
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    others = [i for i in range(len(sizes)) if i not in along]
    return grid.transpose([*others, *along]).reshape(-1, math.prod(sizes[i] for i in along))


@jax_internals.keep_weakly
class DeviceGroup:
    """The devices along some axes of a mesh, which take part in one collective. Primitives take it as a communicator.

    A device's number in the group is ``rank in comm * local + member``, where ``member`` counts the group's devices of
    one rank in the order of the mesh. So the numbers follow the order of the mesh. Groups along the same axes of equal
    meshes are equal. A rank makes a group without communication.

    Attributes:
        mesh: the mesh.
        local: the number of local devices along the axes.
        size: the number of devices along the axes.
    """

    def __init__(self, mesh: Mesh, names: tuple[AxisName, ...]) -> None:
        self.mesh = mesh
        self._names = names
        along = [i for i, axis in enumerate(mesh.axes) if axis.name in names]
        self._axes = tuple(mesh.axes[i] for i in along)
        ranks = _lines_of_grid([axis.ranks for axis in mesh.axes], along)
        self._ranks = group_of(mesh.comm.rank, ranks.tolist())
        # A team is this rank's part of one group. Its members, the devices, meet in shared memory.
        self._teams = _lines_of_grid([axis.local for axis in mesh.axes], along).tolist()
        self.local = len(self._teams[0])
        # The ranks along the axes, in row-major order. A device communicates with the devices at the same local place
        # of the mesh on these ranks. In a program on one device of each rank it may be any device, so there are no ids.
        self._comm = mesh.comm._part(self._ranks, mesh.lane_ids if len(mesh.lane_ids) > 1 else None)
        self.rank = self._comm.rank
        self.size = self._comm.size * self.local
        self._team_and_member = {i: (t, m) for t, team in enumerate(self._teams) for m, i in enumerate(team)}

    def __repr__(self) -> str:
        return f"DeviceGroup({', '.join(map(repr, self._names))} of {self.mesh!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceGroup) and (self.mesh, self._names) == (other.mesh, other._names)

    def __hash__(self) -> int:
        return hash((self.mesh, self._names))

    @property
    def _key(self) -> ProgramKey:
        """The key that stands for the group in compiled programs.

        Raises:
            ValueError: the communicator of the mesh was freed.
        """
        self.mesh.comm._check_live("Mesh")
        if self.local == 1:
            return self._comm._key
        places = tuple(PlaceInTeam(lane, *self._team_and_member[i]) for i, lane in enumerate(self.mesh.lane_ids))
        return self.mesh.comm._key_of(self._ranks, places, self.local)

    @cached_property
    def _local_axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes along which several devices of one rank lie; empty for one device."""
        return tuple((axis.local_name, axis.local) for axis in self._axes if axis.local > 1)

    def _lane_routes(self, perm: Perm) -> LaneRoutes:
        """Returns the destination and the source of each of this rank's devices.

        Args:
            perm: pairs of numbers of devices in this group, (source, destination).

        Returns:
            Two tuples of ``rank * devices of a rank + place among them``; -1 for none.
        """
        if self.local == 1:
            return self._comm._lane_routes(perm)
        to, back = dict(perm), {dest: source for source, dest in perm}

        def at(number: int | None, team: int) -> int:
            if number is None:
                return -1
            rank, member = divmod(number, self.local)
            return int(rank * len(self.mesh.lane_ids) + self._teams[team][member])

        places = [self._team_and_member[i] for i in range(len(self.mesh.lane_ids))]
        numbers = [(self._comm.rank * self.local + member, team) for team, member in places]
        return tuple(at(to.get(own), team) for own, team in numbers), tuple(
            at(back.get(own), team) for own, team in numbers
        )

    def _groups(self, groups: Sequence[Sequence[int]]) -> Participants:
        """Returns the ranks of this rank's group. Only for groups with one device of each rank."""
        assert self.local == 1, "the devices of one rank may be in different groups"
        return self._comm._groups(groups)

    def _reversed(self) -> Participants:
        """Returns the ranks in the opposite order. Only for groups with one device of each rank."""
        assert self.local == 1, "prefix reductions go over ranks"
        return self._comm._reversed()

    def index(self) -> Any:
        """Returns the calling device's index along the axes, in the program's order of the axes.

        It is an int if the rank determines it, else a traced number.
        """
        index: Any = 0
        for name in self._names:
            index = index * self.mesh.shape[name] + self.mesh.index(name)
        return index

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, in the order of the mesh."""
        return tuple(axis.size for axis in self._axes)

    @cached_property
    def program_axes(self) -> tuple[int, ...]:
        """For each axis that the program names, in its order, the place of that axis in :attr:`shape`."""
        return tuple([axis.name for axis in self._axes].index(name) for name in self._names)

    @property
    def is_in_mesh_order(self) -> bool:
        """Whether the program names the axes in the order of the mesh."""
        return self.program_axes == tuple(range(len(self.shape)))

    @cached_property
    def by_program_axes(self) -> tuple[int, ...]:
        """The numbers of the group's devices, in the order of :meth:`index`: the program's last axis counts fastest."""
        return tuple(np.arange(self.size).reshape(self.shape).transpose(self.program_axes).reshape(-1).tolist())


def make_mesh(
    axis_shapes: Sequence[int],
    axis_names: Sequence[AxisName],
    *,
    comm: Communicator | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Lays the devices of all ranks out along named axes, in row-major order. All ranks must make this call.

    ``numbers = arange(ranks * local devices).reshape(axis_shapes)``, where a device's number is ``rank * local devices
    + local index``. So the last axis counts fastest.

    Args:
        axis_shapes: the number of devices along each axis. One of them may be -1, for all remaining devices.
        axis_names: the name of each axis.
        comm: the communicator whose ranks take part. Default None: the world.
        devices: this rank's devices. All ranks must pass the same number. Default: all devices of
            :func:`pycollective.init`.

    Returns:
        A mesh for :func:`pycollective.shard_map`.

    Raises:
        ValueError: the product of the shapes is not ``ranks * local devices``; a name or a device comes twice; or the
            devices of a rank would not form a box in the mesh.

    Order:
        No communication. Ranks compare their meshes with the first call of a function over them.

    Source:
        :func:`jax.make_mesh`.

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
    left = len(own)  # the number of this rank's devices that no axis has yet; the loop begins with the innermost axis
    for name, size in zip(reversed(names), reversed(sizes), strict=True):
        local = math.gcd(size, left) if left < size else size
        if left % local or (local < size and local != left):
            fail(
                f"each rank's {len(own)} devices to fill whole axes from the innermost, and a divisor of the next",
                f"shape {tuple(sizes)} of {names}",
                "Choose inner sizes whose product is a divisor or a multiple of the number of local devices.",
            )
        axes.append(Axis(name, size // local, local))
        left //= local
    return _mesh(comm, own, tuple(reversed(axes)))


def one_axis_mesh(name: AxisName, comm: Communicator, devices: Sequence[jax.Device]) -> Mesh:
    """Returns a mesh of one axis over ``devices`` of each rank."""
    return _mesh(comm, devices, (Axis(name, comm.size, len(devices)),))


def _mesh(comm: Communicator, devices: Sequence[jax.Device], axes: tuple[Axis, ...]) -> Mesh:
    own = set(map(accelerators.lane_id, devices_of_this_rank()))
    unknown = [device for device in devices if accelerators.lane_id(device) not in own]
    if unknown:  # at run time the other devices of its team would wait for such a device without end
        errors.fail(
            ValueError,
            "Mesh",
            comm,
            "a device of pycollective.init(devices=...)",
            unknown,
            "Name it in init, before anything else uses the package.",
        )
    return Mesh(comm, tuple(map(accelerators.lane_id, devices)), axes)
