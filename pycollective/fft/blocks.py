"""A whole array cut into the blocks of devices, and joined again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pycollective.collectives.jax_collectives import axis_index, axis_size
from pycollective.collectives.replicated import gather
from pycollective.errors import fail
from pycollective.fft.layout import fit
from pycollective.fft.spec import Spec, block_length, groups_of

Array = Any


def cut(x: Array, spec: Spec = None) -> Array:
    """Returns this device's block of an array that all devices have.

    Device r of P gets the entries r L to (r + 1) L - 1 of a dimension of length n, where L = ceil(n / P). Zeros follow
    the end of the array.

    Args:
        x: the whole array, the same on all devices, of any dtype.
        spec: how the array is cut, as for :func:`fftn`. Default: dimension 0 among the ranks of the world.

    Returns:
        The block, of the dtype of ``x``. Its shape is that of ``x`` with ceil(n / P) for n of each cut dimension.

    Raises:
        TypeError, ValueError: while tracing, for a spec that does not fit.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Differentiation:
        Both modes.

    Order:
        No communication.

    Source:
        :func:`jax.lax.dynamic_slice_in_dim`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> print(jax.vmap(lambda _: cut(jnp.arange(1, 6), "x"), axis_name="x")(jnp.arange(2)))
        [[1 2 3]
         [4 5 0]]
    """
    x = jnp.asarray(x)
    for axis, group in enumerate(groups_of("fft.cut", spec, x.ndim)):
        if group is not None:
            length = block_length(x.shape[axis], axis_size(group))
            x = fit(x, axis, length * axis_size(group))
            x = lax.dynamic_slice_in_dim(x, axis_index(group) * length, length, axis)
    return x


def join(x: Array, spec: Spec = None, shape: Sequence[int] | None = None) -> Array:
    """Returns the whole array on all devices, the inverse of :func:`cut`.

    Args:
        x: this device's block, of any dtype.
        spec: how the array is cut, as for :func:`fftn`. Default: dimension 0 among the ranks of the world.
        shape: the shape of the whole array. Default: that of all blocks together, with the padding.

    Returns:
        The array, of the dtype of ``x``. By JAX's types it is the same on all devices.

    Raises:
        TypeError, ValueError: while tracing, for a spec that does not fit, or a shape that these blocks do not have.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Differentiation:
        Both modes. The transpose is that of :func:`all_gather`: it sums the cotangents of all devices. With JAX's types
        it takes this device's part of the cotangent.

    Order:
        Program order: an :func:`all_gather` for each cut dimension.

    Source:
        :func:`jax.lax.all_gather`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> whole = lambda block: join(block, "x", (5,))
        >>> print(jax.vmap(whole, axis_name="x")(jnp.array([[1, 2, 3], [4, 5, 0]])))
        [[1 2 3 4 5]
         [1 2 3 4 5]]
    """
    x = jnp.asarray(x)
    groups = groups_of("fft.join", spec, x.ndim)
    sizes = [1 if group is None else axis_size(group) for group in groups]
    lengths = [n * size for n, size in zip(x.shape, sizes, strict=True)] if shape is None else list(shape)
    if [block_length(n, size) for n, size in zip(lengths, sizes, strict=False)] != list(x.shape):
        expected = f"a shape whose blocks have shape {x.shape} on {sizes} devices along the dimensions"
        fail(ValueError, "fft.join", None, expected, str(shape), "Pass the shape of the whole array.")
    for axis, group in enumerate(groups):
        if group is not None:
            x = fit(gather(x, group, axis=axis, tiled=True), axis, lengths[axis])
    return x
