"""Means of arrays that are sent in a narrower floating-point dtype.

A psum of narrow floats adds in float32, and sends float32 (docs/semantics.md). Here an all-to-all sends the narrow
floats: each device receives its slice of all devices' arrays, and adds these slices in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pycollective.errors import message
from pycollective.parallel.axes import AxisName, axis_size, own_slice, rows_of_slices
from pycollective.parallel.buckets import in_buckets

Array = Any


def checked_wire_dtype(where: str, wire_dtype: Any) -> Any:
    """Returns ``wire_dtype`` as a dtype, or None for None.

    Raises:
        TypeError: it is no floating-point dtype.
    """
    if wire_dtype is None:
        return None
    try:
        dtype = jnp.dtype(wire_dtype)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        remedy = "Pass jnp.bfloat16, say, or leave it out to send all bits."
        expected, got = "wire_dtype to be a floating-point dtype", repr(wire_dtype)
        raise TypeError(message(f"parallel.{where}", expected, got, remedy))
    return dtype


def mean_slices(
    where: str, arrays: Sequence[Array], axis_name: AxisName, wire_dtype: Any, *, by_psum: bool = False
) -> list[Array]:
    """Returns this device's slices of the means over devices.

    Args:
        where: the name of the calling function, for messages.
        arrays: the arrays, of the same shapes on all devices.
        axis_name: the axis.
        wire_dtype: the dtype in which floating-point arrays are sent. The number of bytes is that of a reduce-scatter
            of such numbers. None: each array is sent in its own dtype. Other arrays always are.
        by_psum: whether an allreduce adds the arrays that are sent in their own dtype. Default False: a reduce-scatter.

    Returns:
        For each array the slice. It is float32 for an array that was sent in ``wire_dtype``.

    Example:
        >>> import jax
        >>> x = jnp.array([[1.0, 2.0], [3.0, 6.0]])
        >>> jax.vmap(lambda x: mean_slices("example", [x], "i", jnp.bfloat16)[0], axis_name="i")(x)
        Array([[2.],
               [4.]], dtype=float32)
    """
    devices = axis_size(where, axis_name)
    narrow = [wire_dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]
    rows = [rows_of_slices(x.astype(wire_dtype), devices) for x, yes in zip(arrays, narrow, strict=True) if yes]
    received = iter(in_buckets(lambda x: lax.all_to_all(x, axis_name, 0, 0), rows))
    means = [jnp.mean(next(received).astype(jnp.float32), axis=0) if yes else None for yes in narrow]
    others = [x for x, yes in zip(arrays, narrow, strict=True) if not yes]
    if by_psum:
        sums = [own_slice(x, axis_name, devices) for x in lax.psum(others, axis_name)]
    else:
        sums = in_buckets(lambda x: lax.psum_scatter(x, axis_name), [rows_of_slices(x, devices) for x in others])
    of_others = iter(sums)
    return [next(of_others) / devices if mean is None else mean for mean in means]
