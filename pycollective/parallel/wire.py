"""Means of arrays that are sent in a narrower floating-point dtype.

A psum of narrow floats sends float32, in which it adds (docs/semantics.md). So each device receives a slice of all
devices' arrays by an all-to-all, and adds the slices itself.
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


def floating(where: str, wire_dtype: Any) -> Any:
    """Returns the dtype, or None; raises TypeError if it has no floating point."""
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
    """Returns this device's slices of the means over devices: in float32 of those that travel in ``wire_dtype``.

    Args:
        where: the function that asks, for messages.
        arrays: the arrays, of the same shapes on all devices.
        axis_name: the axis.
        wire_dtype: the dtype in which those with a floating point travel, as many bytes as in a reduce-scatter of such
            numbers. All others travel as they are, and so do all with None.
        by_psum: whether the others are added up on all devices, instead of by a reduce-scatter.

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
