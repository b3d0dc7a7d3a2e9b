"""Arrays cut along a dimension, such as an image too large for one device: the borders travel, the inner part stays.

The array is cut into N equal blocks of L entries, in the order of the devices. Device r has the entries r L to
(r + 1) L - 1. Of a window with K entries, a stride s and ``low`` entries of padding, output j reads the entries

    j s - low,  ...,  j s - low + K - 1                            K = (window - 1) dilation + 1

The M outputs are cut into N equal blocks as well. So device r reads, for its M / N outputs, the entries from
r s M / N - low on. It has most of them, and the others come from its neighbours. The result is that of the whole array.

Sources: Dryden, Maruyama, Benson, Moon, Snir, Van Essen, "Improving Strong-Scaling of CNN Training by Exploiting
Finer-Grained Parallelism", arXiv:1903.06681 (spatial parallelism); Xu et al., "GSPMD", arXiv:2105.04663 (halo exchange
where windows of devices differ).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.errors import integer, message
from pycollective.parallel.axes import AxisName, axis_size

Array = Any


def halo_exchange(
    x: Array,
    axis_name: AxisName,
    width: int | tuple[int, int],
    axis: int,
    *,
    periodic: bool = False,
    fill: Any = 0,
) -> Array:
    """Adds to this device's block the entries of the neighbours that lie next to it.

    Each device sends one message each way. It is as long as the halo, or there is one for each block that the halo
    reaches into. Arrays cut along several axes need a call for each: the second call carries what the first has
    fetched, so the corners come right.

    Args:
        x: this device's block, of any dtype. All blocks have the same shape.
        axis_name: the axis along whose devices the array is cut, or a tuple of axes.
        width: how many entries to add before the block and after it, or one number for both. Any width is right, also
            one that is larger than a block.
        axis: the dimension of ``x`` along which the array is cut.
        periodic: whether the last block lies before the first one.
        fill: the entries beyond the borders of an array that is not periodic; cast as by :func:`jax.numpy.full_like`.

    Returns:
        The block with ``before + x.shape[axis] + after`` entries along ``axis``.

    Raises:
        ValueError: a width is negative, ``x`` has no such dimension, or it has no entries along it.
        NameError: the axis is not bound.

    Differentiation: the cotangents of the added entries travel back and are added to those of the neighbours' blocks.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> blocks = jnp.arange(6).reshape(3, 2)  # of three devices
        >>> print(jax.vmap(lambda x: halo_exchange(x, "rows", 1, axis=0), axis_name="rows")(blocks))
        [[0 0 1 2]
         [1 2 3 4]
         [3 4 5 0]]
    """
    devices = axis_size("halo_exchange", axis_name)
    before, after = _widths(width)
    axis = _dimension("halo_exchange", axis, x.ndim)
    length = x.shape[axis]
    if length == 0:
        error = message(
            "parallel.halo_exchange",
            "a block with at least one entry",
            f"shape {x.shape} along dimension {axis}",
            "Cut the array among fewer devices.",
        )
        raise ValueError(error)

    def fetched(step: int, width: int) -> list[Array]:
        """Returns what the devices at ``step``, ``2 step``, ... from this one send, the nearest first."""
        pieces = []
        for hop in range(1, -(-width // length) + 1):
            taken = min(length, width - (hop - 1) * length)
            start = length - taken if step < 0 else 0
            piece = lax.slice_in_dim(x, start, start + taken, axis=axis)
            # The blocks form a ring here, since jax.vmap knows no other permutation.
            piece = lax.ppermute(piece, axis_name, [((k + step * hop) % devices, k) for k in range(devices)])
            source = lax.axis_index(axis_name) + step * hop
            exists = periodic | ((source >= 0) & (source < devices))
            pieces.append(jnp.where(exists, piece, jnp.full_like(piece, fill)))
        return pieces

    # What lies beyond all other blocks is not fetched.
    reach = max(before, after) if periodic else (devices - 1) * length
    parts = [*fetched(-1, min(before, reach))[::-1], x, *fetched(1, min(after, reach))]
    outside = [(0, 0, 0)] * x.ndim
    outside[axis] = (max(0, before - reach), max(0, after - reach), 0)
    return lax.pad(jnp.concatenate(parts, axis), jnp.asarray(fill, x.dtype), outside)


def conv(
    x: Array,
    kernel: Array,
    axes: Mapping[int, AxisName],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    *,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    periodic: bool = False,
) -> Array:
    """Returns this device's block of the convolution of an array that is cut along some of its spatial dimensions.

    It is :func:`jax.lax.conv_general_dilated` of the whole array, cut into equal blocks as that is. "SAME" and "VALID"
    mean what they mean for the whole array.

    Args:
        x: this device's block.
        kernel: the whole kernel, the same on all devices.
        axes: for each dimension of ``x`` that is cut, the axis along whose devices it is.
        window_strides: as in :func:`jax.lax.conv_general_dilated`, like all arguments that are not explained here.
        padding: "SAME", "SAME_LOWER", "VALID", or a pair of numbers for each spatial dimension of the whole array.
        rhs_dilation: the dilation of the kernel; default 1.
        dimension_numbers: the meaning of the dimensions, such as ``("NHWC", "HWIO", "NHWC")``; default NCHW and OIHW.
        feature_group_count: the number of groups of features.
        precision: of the products.
        preferred_element_type: the dtype of the result.
        periodic: whether the cut dimensions are rings, whose padding is the array's other end instead of zeros.

    Returns:
        A block of the output. Along a cut dimension it has M / N of the M outputs of the whole array.

    Raises:
        ValueError: the number of outputs is no multiple of the number of devices (the message says which padding makes
            it one); a cut dimension is not spatial; two dimensions are cut along one axis; a window, stride or dilation
            is no positive number.
        NameError: an axis is not bound.

    Differentiation: the gradient of ``x`` is that of its block. The gradient of ``kernel`` is this device's part of a
    sum over all devices, as in data parallelism: add them up by :func:`jax.lax.psum`. With JAX's varying types
    (:func:`jax.shard_map`) JAX adds them up itself.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> blocks = jnp.arange(8.0).reshape(2, 1, 1, 4)  # of two devices
        >>> kernel = jnp.array([[[1.0, 2.0, 1.0]]])
        >>> f = lambda x: conv(x, kernel, {2: "rows"}, (1,), "SAME")
        >>> print(jax.vmap(f, axis_name="rows")(blocks).reshape(2, 4))
        [[ 1.  4.  8. 12.]
         [16. 20. 24. 20.]]
    """
    numbers = lax.conv_dimension_numbers(x.shape, kernel.shape, dimension_numbers)
    window = [kernel.shape[d] for d in numbers.rhs_spec[2:]]
    dilation = [1] * len(window) if rhs_dilation is None else rhs_dilation
    x, pads = _with_what_is_read(
        "conv", x, axes, numbers.lhs_spec[2:], window, window_strides, dilation, padding, periodic, 0
    )
    return lax.conv_general_dilated(
        x,
        kernel,
        window_strides,
        pads,
        rhs_dilation=dilation,
        dimension_numbers=numbers,
        feature_group_count=feature_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def reduce_window(
    x: Array,
    init_value: Any,
    computation: Callable[[Array, Array], Array],
    axes: Mapping[int, AxisName],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    *,
    window_dilation: Sequence[int] | None = None,
    periodic: bool = False,
) -> Array:
    """Returns this device's block of a pooling of an array that is cut along some of its dimensions.

    It is :func:`jax.lax.reduce_window` of the whole array, as :func:`conv` is a convolution of it. Divide a sum by
    ``math.prod(window_dimensions)`` for an average.

    Args:
        x: this device's block.
        init_value: the neutral value of ``computation``, such as ``-jnp.inf`` for ``lax.max``; it is the padding.
        computation: ``lax.max``, ``lax.min`` or ``lax.add``; another one has no derivative.
        axes: for each dimension of ``x`` that is cut, the axis along whose devices it is.
        window_dimensions: the window, with one number for each dimension of ``x``.
        window_strides: the strides, in the same form.
        padding: as in :func:`conv`, with a pair for each dimension of ``x``.
        window_dilation: the dilation of the window, in the same form; default 1.
        periodic: as in :func:`conv`.

    Returns:
        A block of the output, as of :func:`conv`.

    Raises:
        ValueError: as :func:`conv`.
        NameError: an axis is not bound.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax import lax
        >>> blocks = jnp.arange(8.0).reshape(2, 4)  # of two devices
        >>> f = lambda x: reduce_window(x, -jnp.inf, lax.max, {0: "rows"}, (3,), (2,), "SAME")
        >>> print(jax.vmap(f, axis_name="rows")(blocks))
        [[2. 4.]
         [6. 7.]]
    """
    dilation = [1] * x.ndim if window_dilation is None else window_dilation
    x, pads = _with_what_is_read(
        "reduce_window",
        x,
        axes,
        range(x.ndim),
        window_dimensions,
        window_strides,
        dilation,
        padding,
        periodic,
        init_value,
    )
    return lax.reduce_window(
        x, init_value, computation, window_dimensions, window_strides, pads, window_dilation=dilation
    )


def _with_what_is_read(
    where: str,
    x: Array,
    axes: Mapping[int, AxisName],
    dimensions: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    periodic: bool,
    fill: Any,
) -> tuple[Array, list[tuple[int, int]]]:
    """Returns what the outputs of this device read, and the padding that is left to do.

    Args:
        where: the function, for messages.
        x: this device's block.
        axes: the axis of each cut dimension.
        dimensions: the dimensions of ``x`` along which windows go.
        window: the window along each of them.
        strides: the strides.
        dilation: the dilation of the window.
        padding: the padding of the whole array.
        periodic: whether the cut dimensions are rings.
        fill: the padding's value.
    """
    cut = _cut_dimensions(where, axes, dimensions, x.ndim)
    for name, numbers in (("window", window), ("stride", strides), ("dilation", dilation)):
        if len(numbers) != len(dimensions) or any(number < 1 for number in numbers):
            error = message(
                f"parallel.{where}",
                f"a positive {name} for each of {len(dimensions)} dimensions",
                f"{tuple(numbers)}",
                "Pass 1 where nothing happens.",
            )
            raise ValueError(error)
    whole = [x.shape[d] * axis_size(where, cut[d]) if d in cut else x.shape[d] for d in dimensions]
    spans = [(w - 1) * d + 1 for w, d in zip(window, dilation, strict=True)]
    pads = list(lax.padtype_to_pads(whole, spans, strides, padding) if isinstance(padding, str) else padding)
    if [np.shape(pair) for pair in pads] != [(2,)] * len(dimensions):
        error = message(
            f"parallel.{where}",
            f"{len(dimensions)} pairs of padding",
            f"{padding}",
            "Pass (before, after) for each dimension.",
        )
        raise ValueError(error)
    for i, dimension in enumerate(dimensions):
        if dimension in cut:
            x = _read_along(where, x, cut[dimension], dimension, spans[i], strides[i], pads[i], periodic, fill)
            pads[i] = (0, 0)
    return x, pads


def _read_along(
    where: str,
    x: Array,
    axis_name: AxisName,
    dimension: int,
    span: int,
    stride: int,
    pads: tuple[int, int],
    periodic: bool,
    fill: Any,
) -> Array:
    """Returns the entries along one dimension that the outputs of this device read."""
    devices, length = axis_size(where, axis_name), x.shape[dimension]
    low, high = pads
    outputs = (devices * length + low + high - span) // stride + 1
    if outputs < 1 or outputs % devices:
        more = -outputs % devices if outputs > 0 else 0
        remedy = (
            f"Pass the padding ({low}, {high + more * stride}) and leave the last {more} outputs out."
            if more
            else "Use a smaller window, or more padding."
        )
        error = message(
            f"parallel.{where}",
            f"a positive multiple of {devices} outputs along dimension {dimension}, which {axis_name!r} cuts",
            f"{max(0, outputs)} of {devices} x {length} entries with the padding {(low, high)}",
            remedy,
        )
        raise ValueError(error)

    # The first entry that each device reads, counted from its own first entry. The blocks of outputs may begin a little
    # before or after the blocks of entries that they are made of, and so the devices' halos differ.
    own = outputs // devices
    starts = [device * (own * stride - length) - low for device in range(devices)]
    read = (own - 1) * stride + span
    before, after = max(0, -min(starts)), max(0, max(starts) + read - length)
    x = halo_exchange(x, axis_name, (before, after), dimension, periodic=periodic, fill=fill)
    start = lax.axis_index(axis_name) * (own * stride - length) - low + before
    return lax.dynamic_slice_in_dim(x, start, read, dimension)


def _cut_dimensions(
    where: str, axes: Mapping[int, AxisName], dimensions: Sequence[int], ndim: int
) -> dict[int, AxisName]:
    """Returns the axis of each cut dimension, whose number is not negative."""
    remedy = "Pass a dictionary such as {2: 'rows'}, with an axis of its own for each dimension that is cut."
    expected = f"axes to have some of the dimensions {tuple(dimensions)}"
    if not isinstance(axes, Mapping):
        raise ValueError(message(f"parallel.{where}", expected, f"{axes!r}", remedy))
    cut = {_dimension(where, dimension, ndim): axis_name for dimension, axis_name in axes.items()}
    if not set(cut) <= set(dimensions) or len(set(cut.values())) < len(axes):
        raise ValueError(message(f"parallel.{where}", expected, f"{dict(axes)}", remedy))
    return cut


def _widths(width: int | tuple[int, int]) -> tuple[int, int]:
    pair = width if isinstance(width, tuple) else (width, width)
    widths = tuple(integer("parallel.halo_exchange", None, "width", number) for number in pair)
    if len(widths) != 2 or min(widths) < 0:
        error = message(
            "parallel.halo_exchange",
            "a width of zero or more, or a pair of them",
            f"{width!r}",
            "Cut entries off by a slice of the result.",
        )
        raise ValueError(error)
    return widths


def _dimension(where: str, dimension: int, ndim: int) -> int:
    number = integer(f"parallel.{where}", None, "a dimension", dimension)
    if not -ndim <= number < ndim:
        error = message(
            f"parallel.{where}", f"a dimension of an array that has {ndim}", f"{dimension}", "Count from 0."
        )
        raise ValueError(error)
    return number % ndim
