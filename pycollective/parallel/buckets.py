"""Collectives on many arrays in few calls.

Small arrays are concatenated into buckets, and each bucket is one call. An array that has half a bucket's bytes or more
is a call of its own, since its copy would cost more than a call. The arrays of a bucket have one dtype, and by JAX's
types they vary along the same axes: otherwise an array that is the same along an axis would vary along it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pycollective.jax_support import jax_internals
from pycollective.parallel.axes import AxisName, Sliced, gather

Array = Any

_BUCKET_BYTES = 1 << 20
"""The largest number of bytes of a bucket of several arrays: a bucket of this size stays in a core's cache."""


def in_buckets(call: Callable[[Array], Array], arrays: Sequence[Array]) -> list[Array]:
    """Applies a function to each array, with one call for each bucket of arrays.

    Args:
        call: the function. It must treat each index of its operand's last axis independently of the others.
        arrays: the arrays. They may differ in dtype and in the length of the last axis.

    Returns:
        The function's result for each array.

    Example:
        >>> in_buckets(lambda x: x.sum(axis=0), [jnp.ones((2, 3)), jnp.full((2, 1), 5.0)])
        [Array([2., 2., 2.], dtype=float32), Array([10.], dtype=float32)]
    """
    results: list[Array] = [None] * len(arrays)
    for places in _indices_by_bucket(arrays):
        joined = arrays[places[0]] if len(places) == 1 else jnp.concatenate([arrays[i] for i in places], axis=-1)
        ends = np.cumsum([arrays[i].shape[-1] for i in places])
        for i, part in zip(places, jnp.split(call(joined), ends[:-1].tolist(), axis=-1), strict=True):
            results[i] = part
    return results


def gather_whole(slices: Sequence[Array], cuts: Sequence[Sliced], axis_name: AxisName) -> list[Array]:
    """Gathers whole arrays, which are cut like ``cuts``, from the devices' slices: the same arrays on all devices."""
    rows = in_buckets(lambda x: gather(x, axis_name), list(map(jnp.ravel, slices)))
    return [cut.whole(row.reshape(row.shape[0], *x.shape)) for cut, row, x in zip(cuts, rows, slices, strict=True)]


def _indices_by_bucket(arrays: Sequence[Array]) -> list[list[int]]:
    """Returns for each bucket the indices of its arrays."""
    buckets: list[list[int]] = []
    open_buckets: dict[Any, tuple[list[int], int]] = {}  # by dtype and axes: indices, and bytes so far
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
