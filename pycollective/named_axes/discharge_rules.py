"""For each of jax.lax's collectives the rule that computes it by our primitives over a group of devices.

A rule takes the group of devices, the operands, and the parameters of the equation without its axes. It returns the
results. The blocks of a primitive are in the order of the mesh. The blocks of jax.lax are in the order in which the
program names the axes. If a rank has one device, ``axis_index_groups`` become communicators. If it has several devices,
the groups may differ between lanes. Then each device gathers the arrays of all devices and takes those of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from pycollective.named_axes.mesh import DeviceGroup
from pycollective.primitives import dtypes, exchanges, ragged, reductions
from pycollective.primitives.blocks import cut, join
from pycollective.transport.gathered_rows import with_slices

Array = jax.Array
Rule = Callable[..., Sequence[Any]]
Groups = tuple[tuple[int, ...], ...] | None


def wrong_parameters(size: int, name: str, params: dict[str, Any]) -> tuple[str, str, str] | None:
    """Checks the parameters of a collective over ``size`` devices, as far as JAX leaves these checks to XLA.

    Returns:
        The parts of an error message (expected, got, remedy), or None if the parameters are right.
    """
    groups = params.get("axis_index_groups")
    if groups is not None and sorted(i for members in groups for i in members) != list(range(size)):
        return f"axis_index_groups with each of {size} devices once", f"{name} with {groups}", "List every device once."
    if groups is not None and name not in ("psum", "pmax", "pmin") and len({len(members) for members in groups}) > 1:
        return "axis_index_groups of one size", f"{name} with {groups}", "The shape of the result depends on it."
    ends = list(zip(*params.get("perm", ()), strict=True))
    if any(len({i % size for i in side}) < len(side) or not set(side) <= set(range(-size, size)) for side in ends):
        return (
            f"numbers from 0 to {size - 1}, each once as source and once as destination",
            f"{name} with perm={params['perm']}",
            "Use two calls.",
        )
    if name == "pbroadcast" and not 0 <= params["source"] < size:
        return f"source from 0 to {size - 1}", f"{name} with source={params['source']}", "Name a device of the axis."
    return None


def _int_vector(values: Sequence[int]) -> Array:
    """Returns a small vector, made from scalars, since the jaxprs of some equations may not have array constants."""
    return lax.concatenate([lax.full((1,), value, jnp.int32) for value in values], 0)


def _own_group(group: DeviceGroup, groups: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Returns for each device whether it is in this device's group, and the device's place in its own group.

    Both arrays have shape (size,).
    """
    group_of = {member: i for i, members in enumerate(groups) for member in members}
    place_of = {member: place for members in groups for place, member in enumerate(members)}
    ids = _int_vector([group_of[device] for device in range(group.size)])
    places = _int_vector([place_of[device] for device in range(group.size)])
    return ids == ids[group.index()], places


def _own_members(group: DeviceGroup, groups: Sequence[Sequence[int]]) -> Array:
    """Returns the devices of this device's group, in its order; shape (size of a group,). Groups have equal sizes."""
    taken, places = _own_group(group, groups)
    at = taken[None, :] & (places[None, :] == lax.iota(jnp.int32, len(groups[0]))[:, None])
    return jnp.sum(jnp.where(at, lax.iota(jnp.int32, group.size)[None, :], 0), axis=1, dtype=jnp.int32)


def _own_place(group: DeviceGroup, groups: Sequence[Sequence[int]]) -> Array:
    """Returns this device's place in its group."""
    return _own_group(group, groups)[1][group.index()]


def _gathered(group: DeviceGroup, x: Array) -> Array:
    """Returns the arrays of all devices, in the axis order of the program; shape (size, ...)."""
    return _to_program_axes(group, reductions.allgather(x, comm=group))


def _to_program_axes(group: DeviceGroup, blocks: Array) -> Array:
    """Reorders blocks from the axis order of the mesh to the axis order of the program."""
    if group.is_in_mesh_order:
        return blocks
    grid = blocks.reshape(*group.shape, *blocks.shape[1:])
    axes = group.program_axes
    return grid.transpose(*axes, *range(len(axes), grid.ndim)).reshape(blocks.shape)


def _to_mesh_axes(group: DeviceGroup, blocks: Array) -> Array:
    """Reorders blocks from the axis order of the program to the axis order of the mesh."""
    if group.is_in_mesh_order:
        return blocks
    axes = group.program_axes
    grid = blocks.reshape(*(group.shape[axis] for axis in axes), *blocks.shape[1:])
    back = [axes.index(i) for i in range(len(axes))]
    return grid.transpose(*back, *range(len(axes), grid.ndim)).reshape(blocks.shape)


def _reduction(op: str, reduce: Callable[..., Array]) -> Rule:
    """Makes the rule of a reduction. ``reduce`` is the same reduction over axes of one array."""

    def over_groups(group: DeviceGroup, xs: Sequence[Array], groups: tuple[tuple[int, ...], ...]) -> list[Array]:
        if group.local == 1:
            return reductions.allreduce_all(xs, comm=group._comm._groups(groups), op=op)

        def one(x: Array) -> Array:
            taken = _own_group(group, groups)[0].reshape(-1, *[1] * x.ndim)
            own = lax.broadcast(x, (group.size,))
            neutral = jnp.zeros_like(own) if op == "sum" else own  # its own value does not change an extreme
            return reduce(jnp.where(taken, _gathered(group, x), neutral), axis=0, dtype=x.dtype)

        return list(map(one, xs))

    def rule(
        group: DeviceGroup, *operands: Array, axis_index_groups: Groups = None, positional: tuple[int, ...] = ()
    ) -> list[Array]:
        if positional:
            operands = tuple(reduce(x, axis=positional, dtype=x.dtype) for x in operands)
        if axis_index_groups is not None:
            return over_groups(group, operands, axis_index_groups)
        if _makes_no_call(group):
            return [dtypes.narrow(dtypes.wide(x, op), x) for x in operands]
        return reductions.allreduce_all(operands, comm=group, op=op)

    return rule


def _makes_no_call(group: DeviceGroup) -> bool:
    """Returns whether a reduction is over an axis of one device: "model", for example, if the model is not cut.

    But in a job of one rank all calls are made, so that their checks for NaNs and their times exist there as well.
    """
    return group.size == 1 < group.mesh.comm.size


def _max(x: Array, axis: Any, dtype: Any) -> Array:
    return jnp.max(x, axis=axis).astype(dtype)


def _min(x: Array, axis: Any, dtype: Any) -> Array:
    return jnp.min(x, axis=axis).astype(dtype)


def _wire_sum(group: DeviceGroup, *operands: Array, op: str) -> list[Array]:
    return reductions.allreduce_all(operands, comm=group, op=op)


_psum, _pmax, _pmin = _reduction("sum", jnp.sum), _reduction("max", _max), _reduction("min", _min)


def _all_gather(
    group: DeviceGroup, x: Array, *, all_gather_dimension: int, tiled: bool, axis_index_groups: Groups = None
) -> list[Array]:
    if axis_index_groups is None:
        blocks = _gathered(group, x)
    elif group.local == 1:
        blocks = reductions.allgather(x, comm=group._comm._groups(axis_index_groups))
    else:
        blocks = _gathered(group, x)[_own_members(group, axis_index_groups)]
    return [join(blocks, all_gather_dimension) if tiled else jnp.moveaxis(blocks, 0, all_gather_dimension)]


def _reduce_scatter(
    group: DeviceGroup, x: Array, *, scatter_dimension: int, tiled: bool, axis_index_groups: Groups = None
) -> list[Array]:
    size = group.size if axis_index_groups is None else len(axis_index_groups[0])
    blocks = cut(x, scatter_dimension, size) if tiled else jnp.moveaxis(x, scatter_dimension, 0)
    if axis_index_groups is None:
        return [reductions.reduce_scatter(_to_mesh_axes(group, blocks), comm=group, op="sum")]
    if group.local == 1:
        return [reductions.reduce_scatter(blocks, comm=group._comm._groups(axis_index_groups), op="sum")]
    (total,) = _psum(group, blocks, axis_index_groups=axis_index_groups)
    return [total[_own_place(group, axis_index_groups)]]


def _all_to_all(
    group: DeviceGroup, x: Array, *, split_axis: int, concat_axis: int, tiled: bool, axis_index_groups: Groups = None
) -> list[Array]:
    del tiled  # jax.lax reshapes before and after the equation, so both forms are the same here
    blocks = cut(x, split_axis, group.size if axis_index_groups is None else len(axis_index_groups[0]))
    if axis_index_groups is None:
        received = _to_program_axes(group, exchanges.alltoall(_to_mesh_axes(group, blocks), comm=group))
    elif group.local == 1:
        received = exchanges.alltoall(blocks, comm=group._comm._groups(axis_index_groups))
    else:
        members, place = _own_members(group, axis_index_groups), _own_place(group, axis_index_groups)
        received = _gathered(group, blocks)[members, place]
    return [join(received, concat_axis)]


def _ppermute(group: DeviceGroup, x: Array, *, perm: Sequence[tuple[int, int]]) -> list[Array]:
    # As in JAX, negative numbers count from the end.
    devices = group.by_program_axes
    pairs = tuple((devices[source % group.size], devices[dest % group.size]) for source, dest in perm)
    return [exchanges.ppermute(x, comm=group, perm=pairs)]


def _pbroadcast(group: DeviceGroup, x: Array, *, source: int) -> list[Array]:
    return [reductions.bcast(x, comm=group, root=group.by_program_axes[source])]


def _ragged_all_to_all(
    group: DeviceGroup,
    operand: Array,
    output: Array,
    input_offsets: Array,
    send_sizes: Array,
    output_offsets: Array,
    recv_sizes: Array,
    *,
    axis_index_groups: Groups = None,
) -> list[Array]:
    if group.local == 1:
        slices = ragged.slices_of(input_offsets, send_sizes, output_offsets, recv_sizes)
        if axis_index_groups is not None:
            ranks = group._comm._groups(axis_index_groups)
            return [ragged.ragged_alltoall(output, operand, slices, comm=ranks)]
        blocks = _to_mesh_axes(group, jnp.moveaxis(slices.reshape(4, group.size, -1), 1, 0))
        slices = jnp.moveaxis(blocks, 0, 1).reshape(slices.shape)
        return [ragged.ragged_alltoall(output, operand, slices, comm=group)]
    # The sizes are only known at run time, so each device gathers all operands. This is correct, but not fast.
    del recv_sizes  # they equal the senders' send_sizes
    groups = axis_index_groups or (tuple(range(group.size)),)
    members, place = _own_members(group, groups), _own_place(group, groups)
    each = input_offsets.shape[0] // members.shape[0]  # the number of slices from one device to another

    def of_senders(x: Array) -> Array:
        return _gathered(group, x)[members]

    def for_this_device(x: Array) -> Array:
        return lax.dynamic_slice_in_dim(of_senders(x), place * each, each, axis=1)

    parts = map(for_this_device, (input_offsets, send_sizes, output_offsets))
    return [with_slices(output, list(of_senders(operand)), *parts)]


def _unchanged(_: DeviceGroup, *operands: Array, **__: Any) -> list[Array]:
    return list(operands)


def _axis_index(group: DeviceGroup) -> list[Array]:
    return [jnp.asarray(group.index(), jnp.int32)]


_OPS = {"psum": "sum", "psum_invariant": "sum", "pmax": "max", "pmin": "min"}


def as_one_equation(group: DeviceGroup, eqn: JaxprEqn, params: dict[str, Any]) -> JaxprEqn | None:
    """Returns the one equation that the rule of a reduction makes; None if it makes others, or several.

    Most collectives of a training step are such reductions. JAX need not trace their rules.

    Args:
        group: the devices.
        eqn: the equation of JAX's collective.
        params: its parameters without its axes.
    """
    op = _OPS.get(eqn.primitive.name)
    if op is None or any(value is not None for value in params.values()) or _makes_no_call(group):
        return None
    return reductions.allreduce_equation(eqn, comm=group, op=op)


RULES: dict[str, Rule] = {
    "psum": _psum,
    "psum_invariant": _psum,
    "pmax": _pmax,
    "pmin": _pmin,
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "pbroadcast": _pbroadcast,
    "ragged_all_to_all": _ragged_all_to_all,
    "axis_index": _axis_index,
    "pvary": _unchanged,
    "wire_sum": _wire_sum,
}
"""The rules, by the name of JAX's primitive; ``wire_sum`` is the primitive of ``collectives/wire_dtype.py``."""

WITHOUT_COMMUNICATION = ("axis_index", "pvary")
"""The primitives that name an axis and need no other device."""
