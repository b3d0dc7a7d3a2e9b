"""What a strategy asks of a named axis: its size, and arrays that are cut along it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pycollective.errors import message
from pycollective.jax_support.jax_internals import all_gather_invarying
from pycollective.named_axes.names import has_types as has_types
from pycollective.named_axes.names import names_of as names_of
from pycollective.named_axes.names import varies as varies

Array = Any
AxisName = Hashable
"""The name of an axis, or a tuple of names, which are one axis then: the first name counts slowest."""


def axis_size(where: str, axis_name: AxisName) -> int:
    """Returns the number of devices along an axis.

    Raises:
        NameError: no function around binds the axis.
    """
    try:
        return int(lax.psum(1, axis_name))
    except NameError:
        error = message(
            f"parallel.{where}",
            f"a call where the axis {axis_name!r} is bound",
            "one where it is not",
            f"Call it inside pc.jit(axis_name={axis_name!r}), pc.pmap, pc.shard_map or jax.vmap.",
        )
        raise NameError(error) from None


def in_order(names: Iterable[Hashable]) -> tuple[Hashable, ...]:
    """Returns names in an order that is the same on all ranks, as that of a set is not: programs are compared."""
    return tuple(sorted(names, key=str))


def vary(x: Array, names: Iterable[Hashable]) -> Array:
    """Returns ``x``, of a type that varies along these names as well. JAX must have types for them."""
    lacking = in_order(name for name in names if not varies(x, name))
    return lax.pcast(x, lacking, to="varying") if lacking else x


def shapes_of(tree: Any) -> Any:
    """Returns a tree of the shapes and dtypes of arrays, or of what has such."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def slice_length(size: int, devices: int) -> int:
    """Returns the number of elements of a slice: ``size`` elements are cut into one slice for each device."""
    return -(-size // devices)


def rows_of_slices(x: Array, devices: int) -> Array:
    """Returns an array of shape (devices, elements of a slice) with the elements of ``x``, and zeros at the end."""
    length = slice_length(x.size, devices)
    return jnp.pad(jnp.ravel(x), (0, devices * length - x.size)).reshape(devices, length)


def own_slice(x: Array, axis_name: AxisName, devices: int) -> Array:
    """Returns this device's slice of ``x``, a vector."""
    rows = rows_of_slices(x, devices)
    return lax.dynamic_index_in_dim(rows, lax.axis_index(axis_name), keepdims=False)


def whole(rows: Array, shape: tuple[int, ...]) -> Array:
    """Returns the array of this shape of which ``rows`` are the slices."""
    return rows.reshape(-1)[: math.prod(shape)].reshape(shape)


def gather(x: Array, axis_name: AxisName) -> Array:
    """Stacks ``x`` of all devices along a new axis in front. By JAX's types the result is the same on all devices."""
    return all_gather_invarying(x, axis_name) if varies(x, axis_name) else lax.all_gather(x, axis_name)


def name_of(path: Any) -> str:
    """Returns how messages name a leaf of a tree."""
    return jax.tree_util.keystr(path) or "the only leaf"
