"""The frequencies of a dimension that is cut."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pycollective.fft.blocks import cut
from pycollective.fft.spec import Group, group_of

Array = Any


def fftfreq(n: int, axis_name: Group | None = None, d: Any = 1.0, *, dtype: Any = None) -> Array:
    """Returns this device's block of the frequencies of a transform of length ``n``.

    Args:
        n: the length of the whole dimension.
        axis_name: the devices among which the dimension is cut: a communicator, the world by default, the name of an
            axis, or a tuple of names.
        d: the distance of two samples. Default 1.
        dtype: the dtype of the result. Default: JAX's default for floats.

    Returns:
        The frequencies of this device's entries of the transform, of shape (ceil(n / P),). They are 0 past the end.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type or value.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Differentiation:
        None: there is no operand.

    Order:
        No communication.

    Source:
        :func:`jax.numpy.fft.fftfreq`.

    Example:
        >>> import jax
        >>> print(jax.vmap(lambda _: fftfreq(5, "x", 0.2), axis_name="x")(jax.numpy.arange(2)))
        [[ 0.  1.  2.]
         [-2. -1.  0.]]
    """
    return _block("fftfreq", jnp.fft.fftfreq(n, d, dtype=dtype), axis_name)


def rfftfreq(n: int, axis_name: Group | None = None, d: Any = 1.0, *, dtype: Any = None) -> Array:
    """Returns this device's block of the frequencies of a transform of ``n`` real numbers.

    Args:
        n: the length of the whole dimension before the transform.
        axis_name: the devices among which the result of the transform is cut, as for :func:`fftfreq`.
        d: the distance of two samples. Default 1.
        dtype: the dtype of the result. Default: JAX's default for floats.

    Returns:
        The frequencies of this device's entries of the transform. Their shape is (ceil((n // 2 + 1) / P),). They are 0
        past the end.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type or value.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Differentiation:
        None: there is no operand.

    Order:
        No communication.

    Source:
        :func:`jax.numpy.fft.rfftfreq`.

    Example:
        >>> import jax
        >>> print(jax.vmap(lambda _: rfftfreq(4, "x", 0.25), axis_name="x")(jax.numpy.arange(2)))
        [[0. 1.]
         [2. 0.]]
    """
    return _block("rfftfreq", jnp.fft.rfftfreq(n, d, dtype=dtype), axis_name)


def _block(where: str, whole: Array, axis_name: Group | None) -> Array:
    return cut(whole, group_of(f"fft.{where}", axis_name))
