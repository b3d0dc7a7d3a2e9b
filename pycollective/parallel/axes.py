"""The size of a named axis, and arrays that are cut into slices along it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.collectives.replicated import gather as gather
from pycollective.errors import message
from pycollective.named_axes.names import has_types as has_types
from pycollective.named_axes.names import in_order as in_order
from pycollective.named_axes.names import names_of as names_of
from pycollective.named_axes.names import varies as varies
from pycollective.named_axes.names import vary as vary

Array = Any
Shape = tuple[int, ...]
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


class Sliced(NamedTuple):
    """How an array is cut: its first dimensions are kept, the others are flattened and cut into equal slices.

    Attributes:
        shape: the shape of the whole array.
        kept: the number of first dimensions that are not cut. Layers that are stacked for :func:`jax.lax.scan` keep
            one.
    """

    shape: Shape
    kept: int = 0

    @property
    def size(self) -> int:
        """The number of elements that are divided among the devices, for each index of the kept dimensions."""
        return math.prod(self.shape[self.kept :])

    def slice_shape(self, devices: int) -> Shape:
        """Returns the shape of a slice."""
        return (*self.shape[: self.kept], slice_length(self.size, devices))

    def rows(self, x: Array, devices: int) -> Array:
        """Returns the slices of all devices, of shape (devices, *slice shape). Zeros fill the last slices."""
        *front, length = self.slice_shape(devices)
        flat = jnp.reshape(x, (*front, self.size))
        padded = jnp.pad(flat, [(0, 0)] * self.kept + [(0, devices * length - self.size)])
        return jnp.moveaxis(padded.reshape(*front, devices, length), self.kept, 0)

    def own(self, x: Array, axis_name: AxisName, devices: int) -> Array:
        """Returns this device's slice of ``x``."""
        return lax.dynamic_index_in_dim(self.rows(x, devices), lax.axis_index(axis_name), keepdims=False)

    def whole(self, rows: Array) -> Array:
        """Returns the whole array, the inverse of :meth:`rows`."""
        devices, *front, length = rows.shape
        flat = jnp.moveaxis(rows, 0, self.kept).reshape(*front, devices * length)
        return flat[..., : self.size].reshape(self.shape)

    def without_padding(self, x: Array, neutral: Any, axis_name: AxisName, devices: int) -> Array:
        """Returns this device's slice ``x``, with ``neutral`` in the padding of the last slices."""
        length = x.shape[-1]
        if length * devices == self.size:
            return x
        # The elements of each device's slice. The number of all elements may exceed an int32, that of a slice does not.
        counts = jnp.asarray(np.clip(self.size - length * np.arange(devices), 0, length), jnp.int32)
        return jnp.where(jnp.arange(length) < counts[lax.axis_index(axis_name)], x, jnp.asarray(neutral, x.dtype))


def rows_of_slices(x: Array, devices: int) -> Array:
    """Returns the slices of ``x`` as rows, of shape (devices, slice length). Zeros fill the last slices."""
    return Sliced(x.shape).rows(x, devices)


def own_slice(x: Array, axis_name: AxisName, devices: int) -> Array:
    """Returns this device's slice of ``x``, a vector."""
    return Sliced(x.shape).own(x, axis_name, devices)


def whole(rows: Array, shape: Shape) -> Array:
    """Returns the array of this shape from the slices of all devices, the inverse of :func:`rows_of_slices`."""
    return Sliced(shape).whole(rows)


def name_of(path: Any) -> str:
    """Returns the name of a leaf of a tree in error messages."""
    return jax.tree_util.keystr(path) or "the only leaf"
