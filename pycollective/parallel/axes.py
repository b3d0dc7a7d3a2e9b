"""The size of a named axis, and arrays that are cut into slices along it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pycollective.collectives.replicated import gather as gather
from pycollective.errors import message
from pycollective.named_axes.names import has_types as has_types
from pycollective.named_axes.names import in_order as in_order
from pycollective.named_axes.names import names_of as names_of
from pycollective.named_axes.names import varies as varies
from pycollective.named_axes.names import vary as vary

Array = Any
AxisName = Hashable
"""The name of an axis, or a tuple of names. A tuple stands for one axis over all of them; the last counts fastest."""


def axis_size(where: str, axis_name: AxisName) -> int:
    """Returns the number of devices along an axis.

    Raises:
        NameError: no transform around the call binds the axis.
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


def typed(names: Iterable[Hashable]) -> set[Hashable]:
    """Returns the axes for which JAX has types.

    The call adds no equation to the surrounding program, which the ranks compare.
    """
    found: set[Hashable] = set()

    def ask() -> int:
        found.update(name for name in in_order(names) if has_types(name))
        return 0

    jax.eval_shape(ask)
    return found


def shapes_of(tree: Any) -> Any:
    """Returns the shapes and dtypes of a tree of arrays or of :class:`jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def slice_length(size: int, devices: int) -> int:
    """Returns the number of elements of one device's slice of ``size`` elements, rounded up."""
    return -(-size // devices)


def rows_of_slices(x: Array, devices: int) -> Array:
    """Returns the slices of ``x`` as rows, of shape (devices, slice length). Zeros fill the last slices."""
    length = slice_length(x.size, devices)
    return jnp.pad(jnp.ravel(x), (0, devices * length - x.size)).reshape(devices, length)


def own_slice(x: Array, axis_name: AxisName, devices: int) -> Array:
    """Returns this device's slice of ``x``, a vector."""
    rows = rows_of_slices(x, devices)
    return lax.dynamic_index_in_dim(rows, lax.axis_index(axis_name), keepdims=False)


def whole(rows: Array, shape: tuple[int, ...]) -> Array:
    """Returns the array of this shape from the slices of all devices, the inverse of :func:`rows_of_slices`."""
    return rows.reshape(-1)[: math.prod(shape)].reshape(shape)


def name_of(path: Any) -> str:
    """Returns the name of a leaf of a tree in error messages."""
    return jax.tree_util.keystr(path) or "the only leaf"
