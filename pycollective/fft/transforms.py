"""The transforms of jax.numpy.fft, of arrays that are cut among devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pycollective.collectives.jax_collectives import axis_size
from pycollective.errors import fail, integer
from pycollective.fft.layout import arrange, whole_lengths
from pycollective.fft.plan import Transform
from pycollective.fft.spec import Group, Spec, groups_of

Array = Any


def fftn(
    x: Array,
    spec: Spec = None,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    out_spec: Spec = None,
    pieces: int = 1,
) -> Array:
    """Transforms an array that is cut among devices: this device's block of :func:`jax.numpy.fft.fftn` of the array.

    A dimension of length n that is cut among P devices has blocks of L = ceil(n / P) entries. Device r has the entries
    r L to (r + 1) L - 1. Where P does not divide n, the last blocks end with padding: pass ``s``, the lengths without
    it. The padding of ``x`` is not read, and that of the result is zeros.

    Args:
        x: this device's block. All blocks have the same shape.
        spec: the devices among which the dimensions are cut. A :class:`jax.P`, as for :func:`shard_map`, has for each
            dimension None, the name of an axis, a tuple of names, or a communicator. A name, a tuple of names or a
            communicator alone is for dimension 0. Default: dimension 0 is cut among the ranks of the world.
        s: the lengths of the transform, one for each of ``axes``. As in :func:`jax.numpy.fft.fftn`, the array is
            cropped or extended with zeros. Default: the lengths of all blocks together.
        axes: the dimensions to transform. Default: all; with ``s`` the last ``len(s)``.
        norm: "backward", "ortho" or "forward". Default None: "backward".
        out_spec: the devices among which the dimensions of the result are cut: those of ``spec``, perhaps along other
            dimensions. Default: ``spec``. A result that is cut along a dimension that was whole needs half of the
            exchanges (:doc:`/fft`).
        pieces: the number of exchanges that each change of the layout consists of. The transform of a piece does not
            wait for the next piece. Default 1.

    Returns:
        This device's block of the transform, of the complex dtype of :func:`jax.numpy.fft.fftn`.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Differentiation:
        Both modes, of real and complex arrays, by the conventions of :func:`jax.numpy.fft.fftn`. In reverse mode the
        cotangents of all devices count: a gradient is that of the sum of what the devices return.

    Order:
        Program order: an :func:`all_to_all` for each change of the layout.

    Source:
        :func:`jax.numpy.fft.fftn`; Frigo and Johnson, "The design and implementation of FFTW3", Proc. IEEE 93 (2005).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.arange(16.0).reshape(4, 4)  # two rows on each of two devices
        >>> y = jax.vmap(lambda x: fftn(x, "x"), axis_name="x")(x.reshape(2, 2, 4))
        >>> bool(jnp.allclose(y.reshape(4, 4), jnp.fft.fftn(x), atol=1e-5))
        True
    """
    return _call("fftn", x, spec, s, axes, norm, out_spec, pieces)


def ifftn(
    x: Array,
    spec: Spec = None,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    out_spec: Spec = None,
    pieces: int = 1,
) -> Array:
    """Inverts :func:`fftn`: this device's block of :func:`jax.numpy.fft.ifftn` of the array.

    Args:
        x: this device's block.
        spec: the devices among which the array is cut, as for :func:`fftn`.
        s: the lengths of the transform, as for :func:`fftn`.
        axes: the dimensions to transform. Default: all; with ``s`` the last ``len(s)``.
        norm: as for :func:`fftn`.
        out_spec: the devices among which the result is cut, as for :func:`fftn`. Default: ``spec``.
        pieces: the number of exchanges, as for :func:`fftn`. Default 1.

    Returns:
        This device's block of the transform, of the complex dtype of :func:`jax.numpy.fft.ifftn`.

    Raises:
        TypeError, ValueError, NameError: as for :func:`fftn`.

    Differentiation:
        As for :func:`fftn`.

    Order:
        As for :func:`fftn`.

    Source:
        :func:`jax.numpy.fft.ifftn`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.arange(16.0).reshape(2, 2, 4)  # two rows on each of two devices
        >>> there_and_back = lambda x: ifftn(fftn(x, "x", out_spec=jax.P(None, "x")), jax.P(None, "x"), out_spec="x")
        >>> bool(jnp.allclose(jax.vmap(there_and_back, axis_name="x")(x).real, x, atol=1e-5))
        True
    """
    return _call("ifftn", x, spec, s, axes, norm, out_spec, pieces)


def rfftn(
    x: Array,
    spec: Spec = None,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    out_spec: Spec = None,
    pieces: int = 1,
) -> Array:
    """Transforms real numbers: this device's block of :func:`jax.numpy.fft.rfftn` of the array.

    Args:
        x: this device's block of real numbers.
        spec: the devices among which the array is cut, as for :func:`fftn`.
        s: the lengths of the transform, as for :func:`fftn`.
        axes: the dimensions to transform. The last one has n // 2 + 1 entries in the result. Default: all; with ``s``
            the last ``len(s)``.
        norm: as for :func:`fftn`.
        out_spec: the devices among which the result is cut, as for :func:`fftn`. Default: ``spec``.
        pieces: the number of exchanges, as for :func:`fftn`. Default 1.

    Returns:
        This device's block of the transform, of the complex dtype of :func:`jax.numpy.fft.rfftn`.
        A dimension of n // 2 + 1 entries that is cut has blocks of that length divided by P, rounded up.

    Raises:
        TypeError, ValueError, NameError: as for :func:`fftn`.

    Differentiation:
        As for :func:`fftn`.

    Order:
        As for :func:`fftn`.

    Source:
        :func:`jax.numpy.fft.rfftn`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.arange(16.0).reshape(4, 4)
        >>> y = jax.vmap(lambda x: rfftn(x, "x"), axis_name="x")(x.reshape(2, 2, 4))
        >>> bool(jnp.allclose(y.reshape(4, 3), jnp.fft.rfftn(x), atol=1e-5))
        True
    """
    return _call("rfftn", x, spec, s, axes, norm, out_spec, pieces)


def irfftn(
    x: Array,
    spec: Spec = None,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    out_spec: Spec = None,
    pieces: int = 1,
) -> Array:
    """Inverts :func:`rfftn`: this device's block of :func:`jax.numpy.fft.irfftn` of the array.

    Args:
        x: this device's block.
        spec: the devices among which the array is cut, as for :func:`fftn`.
        s: the lengths of the result, one for each of ``axes``. They must be given if the last of ``axes`` is cut, since
            the padding does not tell the length. Default: as in :func:`jax.numpy.fft.irfftn`.
        axes: the dimensions to transform. The last one has n // 2 + 1 entries in ``x``. Default: all; with ``s`` the
            last ``len(s)``.
        norm: as for :func:`fftn`.
        out_spec: the devices among which the result is cut, as for :func:`fftn`. Default: ``spec``.
        pieces: the number of exchanges, as for :func:`fftn`. Default 1.

    Returns:
        This device's block of the transform, of the real dtype of :func:`jax.numpy.fft.irfftn`.

    Raises:
        TypeError, ValueError, NameError: as for :func:`fftn`; ValueError also if ``s`` is needed.

    Differentiation:
        As for :func:`fftn`.

    Order:
        As for :func:`fftn`.

    Source:
        :func:`jax.numpy.fft.irfftn`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.arange(16.0).reshape(2, 2, 4)
        >>> y = jax.vmap(lambda x: irfftn(rfftn(x, "x"), "x"), axis_name="x")(x)
        >>> bool(jnp.allclose(y, x, atol=1e-5))
        True
    """
    return _call("irfftn", x, spec, s, axes, norm, out_spec, pieces)


def fft2(
    x: Array,
    spec: Spec = None,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: str | None = None,
    *,
    out_spec: Spec = None,
    pieces: int = 1,
) -> Array:
    """Transforms two dimensions: :func:`fftn` over the last two.

    Args:
        x: this device's block.
        spec: the devices among which the array is cut, as for :func:`fftn`.
        s: the lengths of the transform, as for :func:`fftn`.
        axes: the dimensions to transform. Default: the last two.
        norm: as for :func:`fftn`.
        out_spec: the devices among which the result is cut, as for :func:`fftn`. Default: ``spec``.
        pieces: the number of exchanges, as for :func:`fftn`. Default 1.

    Returns:
        This device's block of the transform, of the complex dtype of :func:`jax.numpy.fft.fft2`.

    Raises:
        TypeError, ValueError, NameError: as for :func:`fftn`.

    Differentiation:
        As for :func:`fftn`.

    Order:
        As for :func:`fftn`.

    Source:
        :func:`jax.numpy.fft.fft2`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.arange(16.0).reshape(4, 4)
        >>> y = jax.vmap(lambda x: fft2(x, "x"), axis_name="x")(x.reshape(2, 2, 4))
        >>> bool(jnp.allclose(y.reshape(4, -1), jnp.fft.fft2(x), atol=1e-5))
        True
    """
    return _call("fft2", x, spec, s, axes, norm, out_spec, pieces)


def ifft2(
    x: Array,
    spec: Spec = None,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: str | None = None,
    *,
    out_spec: Spec = None,
    pieces: int = 1,
) -> Array:
    """Inverts :func:`fft2`: :func:`ifftn` over the last two dimensions.

    Args:
        x: this device's block.
        spec: the devices among which the array is cut, as for :func:`fftn`.
        s: the lengths of the transform, as for :func:`fftn`.
        axes: the dimensions to transform. Default: the last two.
        norm: as for :func:`fftn`.
        out_spec: the devices among which the result is cut, as for :func:`fftn`. Default: ``spec``.
        pieces: the number of exchanges, as for :func:`fftn`. Default 1.

    Returns:
        This device's block of the transform, of the complex dtype of :func:`jax.numpy.fft.ifft2`.

    Raises:
        TypeError, ValueError, NameError: as for :func:`fftn`.

    Differentiation:
        As for :func:`fftn`.

    Order:
        As for :func:`fftn`.

    Source:
        :func:`jax.numpy.fft.ifft2`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.arange(16.0).reshape(4, 4)
        >>> y = jax.vmap(lambda x: ifft2(x, "x"), axis_name="x")(x.reshape(2, 2, 4))
        >>> bool(jnp.allclose(y.reshape(4, -1), jnp.fft.ifft2(x), atol=1e-5))
        True
    """
    return _call("ifft2", x, spec, s, axes, norm, out_spec, pieces)


def rfft2(
    x: Array,
    spec: Spec = None,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: str | None = None,
    *,
    out_spec: Spec = None,
    pieces: int = 1,
) -> Array:
    """Transforms two dimensions of real numbers: :func:`rfftn` over the last two.

    Args:
        x: this device's block of real numbers.
        spec: the devices among which the array is cut, as for :func:`fftn`.
        s: the lengths of the transform, as for :func:`fftn`.
        axes: the dimensions to transform. The last one has n // 2 + 1 entries in the result. Default: the last two.
        norm: as for :func:`fftn`.
        out_spec: the devices among which the result is cut, as for :func:`fftn`. Default: ``spec``.
        pieces: the number of exchanges, as for :func:`fftn`. Default 1.

    Returns:
        This device's block of the transform, of the complex dtype of :func:`jax.numpy.fft.rfft2`.

    Raises:
        TypeError, ValueError, NameError: as for :func:`fftn`.

    Differentiation:
        As for :func:`fftn`.

    Order:
        As for :func:`fftn`.

    Source:
        :func:`jax.numpy.fft.rfft2`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.arange(16.0).reshape(4, 4)
        >>> y = jax.vmap(lambda x: rfft2(x, "x"), axis_name="x")(x.reshape(2, 2, 4))
        >>> bool(jnp.allclose(y.reshape(4, -1), jnp.fft.rfft2(x), atol=1e-5))
        True
    """
    return _call("rfft2", x, spec, s, axes, norm, out_spec, pieces)


def irfft2(
    x: Array,
    spec: Spec = None,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: str | None = None,
    *,
    out_spec: Spec = None,
    pieces: int = 1,
) -> Array:
    """Inverts :func:`rfft2`: :func:`irfftn` over the last two dimensions.

    Args:
        x: this device's block.
        spec: the devices among which the array is cut, as for :func:`fftn`.
        s: the lengths of the result, one for each of ``axes``. They must be given if the last of ``axes`` is cut, since
            the padding does not tell the length. Default: as in :func:`jax.numpy.fft.irfft2`.
        axes: the dimensions to transform. The last one has n // 2 + 1 entries in ``x``. Default: the last two.
        norm: as for :func:`fftn`.
        out_spec: the devices among which the result is cut, as for :func:`fftn`. Default: ``spec``.
        pieces: the number of exchanges, as for :func:`fftn`. Default 1.

    Returns:
        This device's block of the transform, of the real dtype of :func:`jax.numpy.fft.irfft2`.

    Raises:
        TypeError, ValueError, NameError: as for :func:`fftn`; ValueError also if ``s`` is needed.

    Differentiation:
        As for :func:`fftn`.

    Order:
        As for :func:`fftn`.

    Source:
        :func:`jax.numpy.fft.irfft2`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.arange(16.0).reshape(4, 4)
        >>> y = jax.vmap(lambda x: irfft2(x, "x"), axis_name="x")(x.reshape(2, 2, 4))
        >>> bool(jnp.allclose(y.reshape(4, -1), jnp.fft.irfft2(x), atol=1e-5))
        True
    """
    return _call("irfft2", x, spec, s, axes, norm, out_spec, pieces)


def fft(
    x: Array,
    spec: Spec = None,
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    *,
    out_spec: Spec = None,
    pieces: int = 1,
) -> Array:
    """Transforms one dimension: this device's block of :func:`jax.numpy.fft.fft` of the array.

    Args:
        x: this device's block.
        spec: the devices among which the array is cut, as for :func:`fftn`.
        n: the length of the transform. Default: that of all blocks together.
        axis: the dimension to transform. Default: the last.
        norm: as for :func:`fftn`.
        out_spec: the devices among which the result is cut, as for :func:`fftn`. Default: ``spec``.
        pieces: the number of exchanges, as for :func:`fftn`. Default 1.

    Returns:
        This device's block of the transform, of the complex dtype of :func:`jax.numpy.fft.fft`.

    Raises:
        TypeError, ValueError, NameError: as for :func:`fftn`.

    Differentiation:
        As for :func:`fftn`.

    Order:
        As for :func:`fftn`.

    Source:
        :func:`jax.numpy.fft.fft`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.arange(8.0)
        >>> y = jax.vmap(lambda x: fft(x, "x"), axis_name="x")(x.reshape(2, 4))
        >>> bool(jnp.allclose(y.ravel(), jnp.fft.fft(x), atol=1e-5))
        True
    """
    return _call_1d("fft", x, spec, n, axis, norm, out_spec, pieces)


def ifft(
    x: Array,
    spec: Spec = None,
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    *,
    out_spec: Spec = None,
    pieces: int = 1,
) -> Array:
    """Inverts :func:`fft`: this device's block of :func:`jax.numpy.fft.ifft` of the array.

    Args:
        x: this device's block.
        spec: the devices among which the array is cut, as for :func:`fftn`.
        n: the length of the transform. Default: that of all blocks together.
        axis: the dimension to transform. Default: the last.
        norm: as for :func:`fftn`.
        out_spec: the devices among which the result is cut, as for :func:`fftn`. Default: ``spec``.
        pieces: the number of exchanges, as for :func:`fftn`. Default 1.

    Returns:
        This device's block of the transform, of the complex dtype of :func:`jax.numpy.fft.ifft`.

    Raises:
        TypeError, ValueError, NameError: as for :func:`fftn`.

    Differentiation:
        As for :func:`fftn`.

    Order:
        As for :func:`fftn`.

    Source:
        :func:`jax.numpy.fft.ifft`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.arange(8.0)
        >>> y = jax.vmap(lambda x: ifft(x, "x"), axis_name="x")(x.reshape(2, 4))
        >>> bool(jnp.allclose(y.ravel(), jnp.fft.ifft(x), atol=1e-5))
        True
    """
    return _call_1d("ifft", x, spec, n, axis, norm, out_spec, pieces)


def rfft(
    x: Array,
    spec: Spec = None,
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    *,
    out_spec: Spec = None,
    pieces: int = 1,
) -> Array:
    """Transforms one dimension of real numbers: this device's block of :func:`jax.numpy.fft.rfft` of the array.

    Args:
        x: this device's block of real numbers.
        spec: the devices among which the array is cut, as for :func:`fftn`.
        n: the length of the transform. Default: that of all blocks together.
        axis: the dimension to transform. It has n // 2 + 1 entries in the result. Default: the last.
        norm: as for :func:`fftn`.
        out_spec: the devices among which the result is cut, as for :func:`fftn`. Default: ``spec``.
        pieces: the number of exchanges, as for :func:`fftn`. Default 1.

    Returns:
        This device's block of the transform, of the complex dtype of :func:`jax.numpy.fft.rfft`.
        If ``axis`` is cut, its n // 2 + 1 entries have blocks of that length divided by P, rounded up.

    Raises:
        TypeError, ValueError, NameError: as for :func:`fftn`.

    Differentiation:
        As for :func:`fftn`.

    Order:
        As for :func:`fftn`.

    Source:
        :func:`jax.numpy.fft.rfft`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.arange(8.0)
        >>> y = jax.vmap(lambda x: rfft(x, "x"), axis_name="x")(x.reshape(2, 4))
        >>> bool(jnp.allclose(y.ravel()[:5], jnp.fft.rfft(x), atol=1e-5))
        True
    """
    return _call_1d("rfft", x, spec, n, axis, norm, out_spec, pieces)


def irfft(
    x: Array,
    spec: Spec = None,
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    *,
    out_spec: Spec = None,
    pieces: int = 1,
) -> Array:
    """Inverts :func:`rfft`: this device's block of :func:`jax.numpy.fft.irfft` of the array.

    Args:
        x: this device's block.
        spec: the devices among which the array is cut, as for :func:`fftn`.
        n: the length of the result. It must be given if ``axis`` is cut, since the padding does not tell the length.
            Default: as in :func:`jax.numpy.fft.irfft`.
        axis: the dimension to transform, which has n // 2 + 1 entries in ``x``. Default: the last.
        norm: as for :func:`fftn`.
        out_spec: the devices among which the result is cut, as for :func:`fftn`. Default: ``spec``.
        pieces: the number of exchanges, as for :func:`fftn`. Default 1.

    Returns:
        This device's block of the transform, of the real dtype of :func:`jax.numpy.fft.irfft`.

    Raises:
        TypeError, ValueError, NameError: as for :func:`fftn`; ValueError also if ``n`` is needed.

    Differentiation:
        As for :func:`fftn`.

    Order:
        As for :func:`fftn`.

    Source:
        :func:`jax.numpy.fft.irfft`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.arange(8.0)
        >>> y = jax.vmap(lambda x: irfft(rfft(x, "x"), "x", n=8), axis_name="x")(x.reshape(2, 4))
        >>> bool(jnp.allclose(y.ravel(), x, atol=1e-5))
        True
    """
    return _call_1d("irfft", x, spec, n, axis, norm, out_spec, pieces)


def _call_1d(
    name: str, x: Array, spec: Spec, n: int | None, axis: int, norm: str | None, out_spec: Spec, pieces: int
) -> Array:
    return _call(name, x, spec, None if n is None else (n,), (axis,), norm, out_spec, pieces)


def _call(
    name: str,
    x: Array,
    spec: Spec,
    s: Sequence[int] | None,
    axes: Sequence[int] | None,
    norm: str | None,
    out_spec: Spec,
    pieces: int,
) -> Array:
    """Makes the transform of one of jax.numpy.fft's names."""
    where, inverse, real = f"fft.{name}", name.startswith("i"), "r" in name
    x = jnp.asarray(x)
    lengths = _lengths(where, x, s, axes)
    if norm not in (None, "backward", "ortho", "forward"):
        expected = 'norm to be "backward", "ortho", "forward" or None'
        fail(ValueError, where, None, expected, repr(norm), "Choose one of them.")
    if (number := integer(where, None, "pieces", pieces)) < 1:
        fail(ValueError, where, None, "pieces of at least 1", number, "Pass 1 for whole exchanges.")
    groups = groups_of(where, spec, x.ndim)
    goals = groups if out_spec is None else groups_of(where, out_spec, x.ndim)
    if _cut_among(goals) != _cut_among(groups):
        remedy = "Name each axis or communicator of spec once, along the dimension where it cuts the result."
        fail(ValueError, where, None, f"an out_spec with the devices of spec, {spec}", str(out_spec), remedy)
    last = None
    if real:
        last = _last(where, x, lengths, inverse)
        if inverse and lengths[last] is None and groups[last] is not None:
            expected = f"the length of the result along dimension {last}, which is cut"
            remedy = "Pass n, or s with the lengths along all axes: padding of the array does not tell the length."
            fail(ValueError, where, None, expected, "none", remedy)

    # Dimension 0 is none of the user's: see Transform.
    goals = [None, *map(_among_several, goals)]
    transform = Transform(
        lengths={axis + 1: length for axis, length in lengths.items()},
        last=None if last is None else last + 1,
        inverse=inverse,
        norm=norm,
        goals=goals,
        pieces=number,
    )
    start = whole_lengths(x[None], [None, *map(_among_several, groups)])
    return arrange(transform(start), goals, number).block[0]


def _lengths(where: str, x: Array, s: Sequence[int] | None, axes: Sequence[int] | None) -> dict[int, int | None]:
    """Returns for each dimension to transform its length, None for that of the array; in the order of ``axes``."""
    if axes is None:
        axes = range(x.ndim) if s is None else range(x.ndim - len(s), x.ndim)
    numbers = [integer(where, None, "an entry of axes", axis) for axis in axes]
    if any(not -x.ndim <= axis < x.ndim for axis in numbers) or len({axis % x.ndim for axis in numbers}) < len(numbers):
        expected = f"different axes from {-x.ndim} to {x.ndim - 1}"
        fail(ValueError, where, None, expected, str(list(axes)), f"Choose dimensions of an array of shape {x.shape}.")
    lengths = [None] * len(numbers) if s is None else [integer(where, None, "a length of the transform", n) for n in s]
    if len(lengths) != len(numbers) or any(n is not None and n < 1 for n in lengths):
        expected = f"a positive length for each of the {len(numbers)} axes"
        fail(ValueError, where, None, expected, str(s), "Pass the lengths without padding, or None.")
    return {axis % x.ndim: n for axis, n in zip(numbers, lengths, strict=True)}


def _last(where: str, x: Array, lengths: dict[int, int | None], inverse: bool) -> int:
    """Returns the dimension along which the numbers of a transform are real."""
    if not lengths:
        fail(ValueError, where, None, "at least one axis", "none", "Transform an array that has dimensions.")
    if not inverse and np.issubdtype(x.dtype, np.complexfloating):
        remedy = f"Call {where.replace('rfft', 'fft')}, or pass x.real."
        fail(TypeError, where, None, "real numbers", x.dtype, remedy)
    return list(lengths)[-1]


def _cut_among(groups: list[Group | None]) -> set[Group]:
    return {group for group in groups if group is not None}


def _among_several(group: Group | None) -> Group | None:
    """Returns the group, or None if it is one device, which has the whole dimension."""
    return None if group is None or axis_size(group) == 1 else group
