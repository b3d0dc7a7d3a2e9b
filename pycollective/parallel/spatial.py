"""Arrays cut along a dimension, such as an image too large for one device: devices exchange only the block borders.

The array is cut into N equal blocks of L entries, in the order of the devices. Device r has the entries r L to
(r + 1) L - 1. With a window, a stride s and ``low`` entries of padding, output j reads the K entries

    j s - low,  ...,  j s - low + K - 1                            K = (window - 1) dilation + 1

The M outputs are cut into N equal blocks as well. So device r reads the entries from r s M / N - low on for its M / N
outputs. It has most of these entries itself and receives the others, its halo, from its neighbours. The result is that
of the whole array.

Sources: Dryden, Maruyama, Benson, Moon, Snir, Van Essen, "Improving Strong-Scaling of CNN Training by Exploiting
Finer-Grained Parallelism", arXiv:1903.06681 (spatial parallelism); Xu et al., "GSPMD", arXiv:2105.04663 (halo exchange
if the devices' windows begin at different places of their blocks).
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
    """Adds the adjacent entries of the neighbours' blocks to this device's block, its halo.

    With the whole array X and blocks of L entries, ``y_r = X[r L - before : (r + 1) L + after]`` along ``axis``.

    Each device sends one message in each direction, of the size of the halo. If the halo is longer than a block, there
    is one message for each block that it covers. For an array that is cut along several dimensions make one call for
    each dimension: the second call also sends the entries that the first has added, so the corners are right.

    Args:
        x: this device's block, of any dtype. All blocks have the same shape.
        axis_name: the name of the axis along whose devices the array is cut, or a tuple of names.
        width: the numbers of entries to add before and after the block, or one number for both. A width may be larger
            than a block.
        axis: the dimension of ``x`` along which the array is cut.
        periodic: whether the array is a ring: its last block precedes its first block. Default False.
        fill: the value of the entries beyond the ends of an array that is not periodic, cast as by
            :func:`jax.numpy.full_like`. Default 0.

    Returns:
        The block with ``before + x.shape[axis] + after`` entries along ``axis``, in the dtype of ``x``.

    Raises:
        ValueError: a width is negative, ``x`` has no such dimension, or its length there is 0.
        NameError: the axis is not bound.

    Differentiation:
        Both modes. The transpose sends the cotangents of the added entries back to the neighbours, which add them to
        those of their blocks.

    Order:
        Program order.

    Source:
        Xu et al., "GSPMD", arXiv:2105.04663.

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
        """Returns the pieces from the devices at distance ``step``, ``2 step``, ..., the nearest first."""
        pieces = []
        for hop in range(1, -(-width // length) + 1):
            taken = min(length, width - (hop - 1) * length)
            start = length - taken if step < 0 else 0
            piece = lax.slice_in_dim(x, start, start + taken, axis=axis)
            # The permutation is a full ring, since jax.vmap supports only full permutations.
            piece = lax.ppermute(piece, axis_name, [((k + step * hop) % devices, k) for k in range(devices)])
            source = lax.axis_index(axis_name) + step * hop
            exists = periodic | ((source >= 0) & (source < devices))
            pieces.append(jnp.where(exists, piece, jnp.full_like(piece, fill)))
        return pieces

    # Entries beyond the ends of the array are not fetched.
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
    """Computes this device's block of the convolution of an array that is cut along some of its spatial dimensions.

    The result is block r of :func:`jax.lax.conv_general_dilated` of the whole array. "SAME" and "VALID" have their
    meaning for the whole array.

    Args:
        x: this device's block of the array.
        kernel: the whole kernel, the same on all devices.
        axes: for each dimension of ``x`` that is cut, the name of the axis along whose devices it is cut.
        window_strides: the strides, one for each spatial dimension, as in :func:`jax.lax.conv_general_dilated`.
        padding: "SAME", "SAME_LOWER", "VALID", or a pair of numbers for each spatial dimension of the whole array.
        rhs_dilation: the dilation of the kernel, for each spatial dimension. Default 1.
        dimension_numbers: the layouts of ``x``, ``kernel`` and the result, such as ``("NHWC", "HWIO", "NHWC")``.
            Default NCHW, OIHW and NCHW.
        feature_group_count: the number of groups of features. Default 1.
        precision: the precision of the products, as in :func:`jax.lax.conv_general_dilated`. Default None.
        preferred_element_type: the dtype of the result. Default None: that of the operands.
        periodic: whether the cut dimensions are rings. Their padding is then the array's other end instead of zeros.
            Default False.

    Returns:
        This device's block of the output. Along a cut dimension it has M / N of the M outputs of the whole array.

    Raises:
        ValueError: the number of outputs is no multiple of the number of devices (the message names a padding that
            makes it one); a cut dimension is not spatial; two dimensions are cut along one axis; a window, stride or
            dilation is no positive number.
        NameError: an axis is not bound.

    Differentiation:
        Both modes. The gradient of ``x`` is that of this device's block. The gradient of ``kernel`` is this device's
        term of a sum over all devices, as in data parallelism: sum it by :func:`jax.lax.psum`. With JAX's varying types
        (:func:`jax.shard_map`) JAX sums it.

    Order:
        Program order: one halo exchange for each cut dimension.

    Source:
        :func:`jax.lax.conv_general_dilated`; Dryden et al., arXiv:1903.06681.

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
    x, pads = _with_halos("conv", x, axes, numbers.lhs_spec[2:], window, window_strides, dilation, padding, periodic, 0)
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
    """Computes this device's block of a pooling of an array that is cut along some of its dimensions.

    The result is block r of :func:`jax.lax.reduce_window` of the whole array. For an average divide the sum by
    ``math.prod(window_dimensions)``.

    Args:
        x: this device's block of the array.
        init_value: the neutral value of ``computation``, such as ``-jnp.inf`` for ``lax.max``. It is also the padding.
        computation: ``lax.max``, ``lax.min`` or ``lax.add``. Another function has no derivative.
        axes: for each dimension of ``x`` that is cut, the name of the axis along whose devices it is cut.
        window_dimensions: the lengths of the window, one for each dimension of ``x``.
        window_strides: the strides, one for each dimension of ``x``.
        padding: as in :func:`conv`, with a pair for each dimension of ``x``.
        window_dilation: the dilations of the window, one for each dimension of ``x``. Default 1.
        periodic: as in :func:`conv`. Default False.

    Returns:
        This device's block of the output. Along a cut dimension it has M / N of the M outputs of the whole array.

    Raises:
        ValueError: for the reasons of :func:`conv`.
        NameError: an axis is not bound.

    Differentiation:
        That of :func:`jax.lax.reduce_window`: the gradient of ``x`` is that of this device's block.

    Order:
        Program order: one halo exchange for each cut dimension.

    Source:
        :func:`jax.lax.reduce_window`.

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
    x, pads = _with_halos(
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


def _with_halos(
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
    """Returns the entries that the outputs of this device read, and the padding that remains for each dimension.

    Args:
        where: the name of the calling function, for messages.
        x: this device's block.
        axes: the axis of each cut dimension.
        dimensions: the dimensions of ``x`` that the window has.
        window: the length of the window along each of these dimensions.
        strides: the strides.
        dilation: the dilation of the window.
        padding: the padding of the whole array.
        periodic: whether the cut dimensions are rings.
        fill: the value of the padding.
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
            x = _entries_along(where, x, cut[dimension], dimension, spans[i], strides[i], pads[i], periodic, fill)
            pads[i] = (0, 0)
    return x, pads


def _entries_along(
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

    # For each device the first entry that it reads, relative to its own first entry. Blocks of outputs and blocks of
    # entries need not begin at the same place of the array, so the devices need different halos.
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
    """Returns the axis of each cut dimension, by the dimension's number counted from 0."""
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
