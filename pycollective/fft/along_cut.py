"""Transforms of a dimension that stays cut, for arrays that have no other dimension to cut.

With w_n = exp(-2 pi i / n), the transform of x_0, ..., x_{n-1} is X_k = sum_j w_n^(j k) x_j. Device r of P has the
entries r L to (r + 1) L - 1 of both.

**n is a multiple of P^2**: the four-step algorithm. n = n1 n2, where P divides both, j = n2 j1 + j2, k = k1 + n1 k2:

    X_(k1 + n1 k2) = sum_j2 w_n2^(j2 k2) w_n^(j2 k1) sum_j1 w_n1^(j1 k1) x_(n2 j1 + j2)

A device's block is a block of rows j1 of a matrix. Three exchanges, each of L entries of a device.

**Other n**: Bluestein's algorithm. Since 2 j k = j^2 + k^2 - (k - j)^2, with the chirp c_j = exp(-pi i j^2 / n):

    X_k = c_k sum_j (c_j x_j) conj(c_(k - j))

The sum is a convolution. With j = r L + l it is a convolution in two dimensions, r and l, whose results beyond the end
of a row belong to the next row. So rows are transformed where they are, and r, of 2 P entries, after an exchange. F is
about 2 L. Two exchanges of F entries of a device, and one of 2 F for the transform of the chirp.

Sources: Bailey, "FFTs in external or hierarchical memory", J. Supercomputing 4 (1990); Bluestein, "A linear filtering
approach to the computation of discrete Fourier transform", IEEE Trans. Audio Electroacoustics 18 (1970).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.collectives.jax_collectives import all_to_all, axis_index, axis_size
from pycollective.fft.spec import Group

Array = Any

LONGEST = (1 << 30) - 1
"""The longest dimension whose phases are exact in 32 bits."""


def transform_along_cut(x: Array, axis: int, group: Group, length: int, *, inverse: bool, norm: str | None) -> Array:
    """Transforms a dimension that is cut among the devices of a group, and leaves it cut in the same way.

    Args:
        x: this device's block, with ceil(length / P) entries along ``axis``. Entries past the end are ignored.
        axis: the dimension.
        group: its devices.
        length: the length of the whole dimension, up to ``LONGEST``.
        inverse: whether the transform is the inverse one.
        norm: as in :func:`jax.numpy.fft.fft`.

    Returns:
        The block of the transform, with zeros past the end.
    """
    x = jnp.moveaxis(x, axis, -1)
    x = x.astype(jax.eval_shape(jnp.fft.fft, x).dtype)
    x = x.conj() if inverse else x
    y = four_step(x, group, length) if length % axis_size(group) ** 2 == 0 else bluestein(x, group, length)
    y = y.conj() if inverse else y
    power = {"backward": -1.0 if inverse else 0.0, "ortho": -0.5, "forward": 0.0 if inverse else -1.0}
    scale = float(length) ** power[norm or "backward"]
    return jnp.moveaxis(y * scale, -1, axis)


def four_step(x: Array, group: Group, length: int) -> Array:
    """Transforms the last dimension, of ``length`` entries on all devices. P^2 divides the length."""
    size = axis_size(group)
    columns = size * _divisor_near_the_root(length // size**2)
    rows = length // columns

    def exchange(x: Array, split: int, join: int) -> Array:
        return all_to_all(x, group, split_axis=x.ndim + split, concat_axis=x.ndim + join, tiled=True)

    x = x.reshape(*x.shape[:-1], rows // size, columns)  # j1, j2
    x = jnp.fft.fft(exchange(x, -1, -2), axis=-2)  # k1, j2
    j2 = _entries(group, columns // size)
    twiddles = _roots_of_one(_product_modulo(_range(rows)[:, None], j2[None, :], length), length, x.real.dtype)
    x = x * _fit_to_rank(twiddles, x)
    x = jnp.fft.fft(exchange(x, -2, -1), axis=-1)  # k1, k2
    x = exchange(x.mT, -2, -1)  # k2, k1
    return x.reshape(*x.shape[:-2], -1)


def bluestein(x: Array, group: Group, length: int) -> Array:
    """Transforms the last dimension, of ``length`` entries on all devices, which follow padding."""
    size, own = axis_size(group), x.shape[-1]
    part = _fast_length(-(-2 * own // size))
    long = size * part  # F
    dtype = x.real.dtype

    def chirp(j: Array) -> Array:
        j = (j % np.uint32(2 * length)).astype(np.uint32)
        return _roots_of_one(_product_modulo(j, j, 2 * length), 2 * length, dtype)

    def rows_to_columns(rows: Array) -> Array:
        """Exchanges (..., rows of this device, F) for (..., the same rows of device 0, 1, ..., own frequencies)."""
        columns = all_to_all(rows[..., None, :], group, split_axis=rows.ndim, concat_axis=rows.ndim - 1, tiled=True)
        return columns.reshape(*rows.shape[:-2], -1, part)

    j = _entries(group, own)
    own_chirp = jnp.where(j < np.uint32(length), chirp(j), 0)
    a = jnp.fft.fft(_fit_to_rank(own_chirp, x) * x, n=long)
    a = jnp.fft.fft(rows_to_columns(a[..., None, :]), n=2 * size, axis=-2)
    # Row r of the other operand begins at r L, and row r + P at (r - P) L: it is circular. The chirp is even.
    before = np.uint32(size * own) - j
    b = jnp.fft.fft(jnp.stack([chirp(j), chirp(before)]).conj(), n=long)
    b = jnp.fft.fft(rows_to_columns(b), axis=0)
    c = jnp.fft.ifft(_fit_to_rank(b, a) * a, axis=-2)

    # In frequencies, an array is advanced by L entries when it is multiplied by exp(2 pi i f L / F).
    f = _entries(group, part)
    ahead = _roots_of_one(_product_modulo(f, np.uint32(own % long), long), long, dtype).conj()
    c = c[..., :size, :] + _fit_to_rank(ahead, c) * jnp.roll(c, 1, axis=-2)[..., :size, :]
    y = all_to_all(c, group, split_axis=c.ndim - 2, concat_axis=c.ndim - 1, tiled=True)
    y = jnp.fft.ifft(y.reshape(*x.shape[:-1], long))[..., :own]
    return _fit_to_rank(own_chirp, y) * y


def _divisor_near_the_root(n: int) -> int:
    return next(k for k in range(math.isqrt(n), 0, -1) if n % k == 0)


def _fast_length(n: int) -> int:
    """Returns the smallest length of at least ``n`` that has no prime factors but 2, 3 and 5."""

    def rest(n: int) -> int:
        for prime in (2, 3, 5):
            while n % prime == 0:
                n //= prime
        return n

    return next(length for length in itertools.count(n) if rest(length) == 1)


def _range(count: int) -> Array:
    return jnp.arange(count, dtype=np.uint32)


def _entries(group: Group, count: int) -> Array:
    """Returns the indices of this device's ``count`` entries of a dimension that is cut among the devices."""
    return axis_index(group).astype(np.uint32) * np.uint32(count) + _range(count)


def _product_modulo(a: Array, b: Array, n: int) -> Array:
    """Returns ``a b mod n`` of numbers below ``n``, which is below 2^31, in 32 bits.

    The product is made of digits of ``b``, of as many bits as ``n`` leaves free.
    """
    bits = n.bit_length()
    width, modulus = 32 - bits, np.uint32(n)
    product = jnp.zeros((), np.uint32)
    for low in reversed(range(0, bits, width)):
        digit = (b >> np.uint32(low)) & np.uint32((1 << width) - 1)
        product = ((product << np.uint32(width)) % modulus + (a * digit) % modulus) % modulus
    return product


def _roots_of_one(numerators: Array, n: int, dtype: Any) -> Array:
    """Returns ``exp(-2 pi i numerators / n)``."""
    angle = numerators.astype(dtype) * np.asarray(-2 * np.pi / n, dtype)
    return lax.complex(jnp.cos(angle), jnp.sin(angle))


def _fit_to_rank(x: Array, like: Array) -> Array:
    """Returns ``x`` with leading dimensions of length 1, as many as ``like`` has more."""
    return x.reshape((1,) * (like.ndim - x.ndim) + x.shape)
