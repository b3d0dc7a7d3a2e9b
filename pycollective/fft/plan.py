"""The order in which the dimensions of a cut array are transformed, and where cuts are in the meantime.

A dimension is transformed when it is whole. So a transform takes turns. It transforms the dimensions of this device's
block that are whole. Then it exchanges blocks: another dimension is whole, and one that is done is cut instead. If no
other dimension has an entry for each device, a complex transform leaves the dimension cut (``along_cut.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp

from pycollective.fft.along_cut import LONGEST, transform_along_cut
from pycollective.fft.layout import Cut, CutArray, move_cut
from pycollective.fft.spec import Group, block_length

Array = Any


@dataclass(frozen=True)
class Transform:
    """A transform of an array whose dimension 0 is none of the user's: it has length 1.

    That dimension is cut if no other one can be. Then one device computes what otherwise all do.

    Attributes:
        lengths: for each transformed dimension its length in the transform; None: its length in the array.
        last: the dimension of real numbers, or None.
        inverse: whether the transform is the inverse one.
        norm: as in :func:`jax.numpy.fft.fftn`.
        goals: for each dimension the devices among which the result will be cut, or None.
        pieces: the number of exchanges that each change of the layout consists of.
    """

    lengths: dict[int, int | None]
    last: int | None
    inverse: bool
    norm: str | None
    goals: list[Group | None]
    pieces: int

    def __call__(self, x: CutArray) -> CutArray:
        """Transforms all dimensions, and leaves the cuts where they are then."""
        pending = set(self.lengths)
        while pending:
            axes = self._may_be_next(x, pending)
            if whole := {axis for axis in axes if x.is_whole(axis)}:
                x = x.then(partial(self._transform, axes=whole))
                pending -= whole
                continue
            axis = self._next(x, axes, pending)
            if self._stays_cut(x, axis):
                x = self._along_cut(x, axis)
                pending.remove(axis)
                continue
            while not x.is_whole(axis):
                x = move_cut(x, axis, self._target(x, axis, pending), self.pieces)
        return x

    def _may_be_next(self, x: CutArray, pending: set[int]) -> set[int]:
        """Returns the dimensions that may be transformed. That of real numbers is the first, in an inverse the last."""
        if self.last not in pending:
            return pending
        if not self.inverse:
            return pending if x.is_whole(self.last) else {self.last}
        return pending if all(map(x.is_whole, pending)) or len(pending) == 1 else pending - {self.last}

    def _next(self, x: CutArray, axes: set[int], pending: set[int]) -> int:
        """Returns a dimension whose cut can go where it belongs in the result, if there is one."""
        ready = [
            axis for axis in axes if any(self._is_goal(x, axis, other, pending) for other in range(1, len(x.cuts)))
        ]
        return max(ready or axes)

    def _is_goal(self, x: CutArray, axis: int, target: int, pending: set[int]) -> bool:
        return self.goals[target] == x.cuts[axis][-1].group and target not in pending and x.is_whole(target)

    def _target(self, x: CutArray, axis: int, pending: set[int]) -> int:
        """Returns the dimension to cut instead of ``axis``, if possible without padding and further exchanges."""

        def cost(target: int) -> tuple[bool, bool, bool, bool, int]:
            elsewhere = not self._is_goal(x, axis, target, pending)
            length = x.shape[target]
            return elsewhere, length < x.size(axis), target in pending, not x.is_whole(target), -length

        return min(set(range(len(x.cuts))) - {axis}, key=cost)

    def _stays_cut(self, x: CutArray, axis: int) -> bool:
        cut, *inner = x.cuts[axis]
        n = self.lengths[axis] or cut.length
        return (
            axis != self.last
            and not inner
            and all(x.shape[other] < x.size(axis) for other in range(len(x.cuts)) if other != axis)
            and x.shape[axis] == block_length(n, x.size(axis))
            and x.shape[axis] * x.size(axis) <= LONGEST
        )

    def _along_cut(self, x: CutArray, axis: int) -> CutArray:
        group = x.cuts[axis][0].group
        length = self.lengths[axis] or x.cuts[axis][0].length
        block = transform_along_cut(x.block, axis, group, length, inverse=self.inverse, norm=self.norm)
        return CutArray(block, (*x.cuts[:axis], (Cut(group, length),), *x.cuts[axis + 1 :]))

    def _transform(self, block: Array, axes: set[int]) -> Array:
        """Transforms dimensions of this device's block that are whole."""
        ordered = sorted(axes, key=lambda axis: (axis == self.last, axis))
        lengths = [self.lengths[axis] or block.shape[axis] for axis in ordered]
        if self.inverse and self.last in axes and self.lengths[self.last] is None:
            lengths[-1] = 2 * (block.shape[self.last] - 1)
        name = ("i" if self.inverse else "") + ("r" if self.last in axes else "") + "fftn"
        return getattr(jnp.fft, name)(block, lengths, ordered, self.norm)
