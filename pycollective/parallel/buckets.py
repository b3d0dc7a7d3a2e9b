"""Collectives of many slices in few calls.

An array with rows, one for each device, may stand beside others of its dtype that vary along the same axes, by JAX's
types: else what is the same along an axis would vary along it beside a part. Small ones do, so they travel together.
A large one goes alone, since a copy would cost more than a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pycollective.jax_support import jax_internals
from pycollective.parallel.axes import AxisName, gather, whole

Array = Any

_BUCKET_BYTES = 1 << 20
"""The most bytes that small arrays have together: such a bucket stays in a core's cache."""


def in_buckets(call: Callable[[Array], Array], arrays: Sequence[Array]) -> list[Array]:
    """Applies a function of arrays to ``arrays``, in as few calls as buckets have room for.

    Args:
        call: the function. It does the same for each column of its operand, the last axis.
        arrays: they may differ in dtype and in the length of the last axis.

    Returns:
        What the function gives for each array.

    Example:
        >>> in_buckets(lambda x: x.sum(axis=0), [jnp.ones((2, 3)), jnp.full((2, 1), 5.0)])
        [Array([2., 2., 2.], dtype=float32), Array([10.], dtype=float32)]
    """
    results: list[Array] = [None] * len(arrays)
    for places in _places_of_buckets(arrays):
        joined = arrays[places[0]] if len(places) == 1 else jnp.concatenate([arrays[i] for i in places], axis=-1)
        ends = np.cumsum([arrays[i].shape[-1] for i in places])
        for i, part in zip(places, jnp.split(call(joined), ends[:-1].tolist(), axis=-1), strict=True):
            results[i] = part
    return results


def gather_whole(slices: Sequence[Array], shapes: Sequence[tuple[int, ...]], axis_name: AxisName) -> list[Array]:
    """Returns the arrays of these shapes of which each device has a slice, the same on all devices."""
    rows = in_buckets(lambda x: gather(x, axis_name), slices)
    return [whole(x, shape) for x, shape in zip(rows, shapes, strict=True)]


def _places_of_buckets(arrays: Sequence[Array]) -> list[list[int]]:
    """Returns the places of the arrays of each bucket."""
    buckets: list[list[int]] = []
    open_buckets: dict[Any, tuple[list[int], int]] = {}  # by dtype and axes: places, and bytes so far
    for i, x in enumerate(arrays):
        nbytes = x.size * x.dtype.itemsize
        like = x.dtype, jax_internals.varying_axes(x)
        places, filled = open_buckets.get(like, ([], 0))
        if 2 * nbytes >= _BUCKET_BYTES:
            buckets.append([i])
            continue
        if not places or filled + nbytes > _BUCKET_BYTES:
            buckets.append(places := [])
            filled = 0
        places.append(i)
        open_buckets[like] = places, filled + nbytes
    return buckets
