"""The layout of an array that is cut among devices, and the exchanges that change it.

Each dimension has a stack of cuts. The first is among the devices of one group; the blocks may be cut again among those
of another group, and so on. A block has ceil(n / P) entries, where n is the length before the cut. The last blocks end
with padding. An exchange among the devices of one group undoes the last cut of a dimension, and cuts another one:

    0: [Cut(x, 6)], 1: []           device r of 3 has rows 2 r and 2 r + 1
    0: [],          1: [Cut(x, 5)]  device r of 3 has columns 2 r and 2 r + 1, and device 2 has one column of padding
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pycollective.collectives.jax_collectives import all_to_all, axis_size
from pycollective.fft.spec import Group, block_length

Array = Any


class Cut(NamedTuple):
    """A cut of a dimension.

    Attributes:
        group: the devices among which the dimension is cut.
        length: the length of the dimension before the cut.
    """

    group: Group
    length: int


@dataclass(frozen=True)
class CutArray:
    """An array that is cut along some dimensions.

    Attributes:
        operand: this device's block, before ``waiting``.
        cuts: for each dimension its cuts, from the outermost to the innermost.
        waiting: a function of the block that is still to be called. It treats all entries along cut dimensions alike,
            so that an exchange in pieces can call it with each piece.
    """

    operand: Array
    cuts: tuple[tuple[Cut, ...], ...]
    waiting: Callable[[Array], Array] = lambda block: block

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of this device's block."""
        shape: tuple[int, ...] = jax.eval_shape(self.waiting, self.operand).shape
        return shape

    @property
    def block(self) -> Array:
        """This device's block."""
        return self.waiting(self.operand)

    def size(self, axis: int) -> int:
        """Returns the number of devices of a dimension's last cut."""
        return axis_size(self.cuts[axis][-1].group)

    def is_whole(self, axis: int) -> bool:
        """Returns whether a dimension is not cut."""
        return not self.cuts[axis]

    def then(self, function: Callable[[Array], Array]) -> CutArray:
        """Applies a function along dimensions that are not cut."""
        return replace(self, waiting=lambda block: function(self.waiting(block)))


def whole_lengths(block: Array, groups: list[Group | None]) -> CutArray:
    """Returns the array of whose dimensions each is cut among the devices of its group, or not cut.

    The lengths of the array are those of all blocks together.
    """
    cuts = [
        () if group is None else (Cut(group, n * axis_size(group)),)
        for n, group in zip(block.shape, groups, strict=True)
    ]
    return CutArray(block, tuple(cuts))


def fit(x: Array, axis: int, length: int) -> Array:
    """Returns ``x`` with this length along ``axis``: without its last entries, or with zeros after them."""
    if x.shape[axis] >= length:
        return lax.slice_in_dim(x, 0, length, axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)


def move_cut(x: CutArray, source: int, target: int, pieces: int = 1) -> CutArray:
    """Undoes the last cut of ``source``, and cuts ``target`` among the same devices.

    Args:
        x: the array.
        source: a dimension that is cut.
        target: another dimension.
        pieces: the number of exchanges. Each exchanges a part of the entries along ``source``. What ``x`` still has to
            compute of a part does not depend on the exchange of the part before it.
    """
    *outer, (group, length) = x.cuts[source]
    size, own = axis_size(group), x.shape[source]
    target_length = size * block_length(x.shape[target], size)

    def exchange(part: Array) -> Array:
        """Returns an array with the same part of all devices' blocks along ``source``."""
        part = fit(x.waiting(part), target, target_length)
        return all_to_all(part, group, split_axis=target, concat_axis=source, tiled=True)

    pieces = max(1, min(pieces, own))
    if pieces == 1:
        moved = exchange(x.operand)
    else:
        bounds = [own * k // pieces for k in range(pieces + 1)]
        parts = [exchange(lax.slice_in_dim(x.operand, *ends, axis=source)) for ends in itertools.pairwise(bounds)]
        before, after = parts[0].shape[:source], parts[0].shape[source + 1 :]
        parts = [part.reshape(*before, size, part.shape[source] // size, *after) for part in parts]
        moved = jnp.concatenate(parts, source + 1).reshape(*before, size * own, *after)
    cuts = list(x.cuts)
    cuts[source] = tuple(outer)
    cuts[target] = (*cuts[target], Cut(group, x.shape[target]))
    return CutArray(fit(moved, source, length), tuple(cuts))


def arrange(x: CutArray, groups: list[Group | None], pieces: int = 1) -> CutArray:
    """Exchanges until each dimension is cut among the devices of its group alone.

    Args:
        x: the array. Dimension 0 has length 1 and no group.
        groups: for each dimension its group, or None. They are the groups of the cuts of ``x``.
        pieces: the number of exchanges that each change is made of.
    """
    goals = {group: axis for axis, group in enumerate(groups) if group is not None}
    while misplaced := _misplaced(x, goals):
        ready = [axis for axis in misplaced if x.is_whole(goals[x.cuts[axis][-1].group])]
        if ready:
            axis = ready[0]
            x = move_cut(x, axis, goals[x.cuts[axis][-1].group], pieces)
            continue
        # The groups are in each other's places, so one leaves its place for a dimension that no other group needs.
        needed = {goals[cut.group] for axis in misplaced for cut in x.cuts[axis]}
        axis = next(axis for axis in misplaced if axis in needed)
        x = move_cut(x, axis, max(set(range(len(groups))) - needed, key=lambda other: x.shape[other]), pieces)
    return x


def _misplaced(x: CutArray, goals: dict[Group, int]) -> list[int]:
    """Returns the dimensions with a last cut that belongs elsewhere, or that has another cut around it."""
    return [axis for axis, cuts in enumerate(x.cuts) if cuts and (len(cuts) > 1 or goals[cuts[-1].group] != axis)]
