"""Ulysses: attention over a sequence that is cut along an axis, by exchanges of positions for heads.

An all-to-all gives each of P devices all positions of its part of the heads. A second one restores the first layout.
With fewer key heads than devices several devices compute with one key head, and each of them gets it: of K key heads
each is repeated P / gcd(P, K) times before the exchange.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import jax.numpy as jnp
from jax import lax

from pycollective.errors import message
from pycollective.parallel.axes import AxisName, axis_size
from pycollective.parallel.buckets import in_buckets

Array = Any


def ulysses(attention: Callable[..., Array], axis_name: AxisName) -> Callable[..., Array]:
    """Makes attention over a cut sequence from ``attention`` over a whole one: each device computes some of the heads.

    All-to-alls of q, k and v give each of P devices the whole sequence for 1/P of the heads. A last one restores the
    layout of the sequence for the result.

    Args:
        attention: a function of q (..., T, heads/P, dim), k and v (..., S, some key heads, dim) and further arguments.
            It returns an array of shape (..., T, heads/P, any). Examples are :func:`jax.nn.dot_product_attention` and
            :func:`blockwise_attention`. Device r has the heads from r heads/P on, and the key heads that these need.
        axis_name: the name of the axis along which the sequence is cut, or a tuple of names.

    Returns:
        A function of q (..., T/P, heads, dim), k and v (..., S/P, key heads, dim), and of the further arguments of
        ``attention``, which it passes unchanged: they describe the whole sequence and this device's heads. It returns
        an array of shape (..., T/P, heads, any), in the dtype of the result of ``attention``. P must divide the number
        of heads. If P does not divide the number of key heads, that number must divide the number of heads:
        consecutive heads share a key head (grouped queries), and devices may share one too.

    Raises:
        ValueError: P does not divide the number of heads, neither P divides the number of key heads nor the latter
            the number of heads, or the result of ``attention`` has another shape.
        NameError: the axis is not bound.

    Differentiation:
        The modes that ``attention`` has.

    Order:
        Program order: an all-to-all of q, k and v, joined if they are small, and one of the result.

    Source:
        Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509, section 3.

    Example:
        >>> import functools
        >>> import jax
        >>> import jax.numpy as jnp
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 2, 4))  # 8 positions, 2 heads of 4
        >>> blocks = [x.reshape(2, 4, 2, 4) for x in (q, k, v)]  # 2 devices have 4 positions each
        >>> attention = functools.partial(jax.nn.dot_product_attention, is_causal=True)
        >>> y = jax.vmap(ulysses(attention, "seq"), axis_name="seq")(*blocks)
        >>> bool(jnp.allclose(y.reshape(8, 2, 4), attention(q, k, v), atol=1e-5))
        True
    """

    def cut(q: Array, k: Array, v: Array, *args: Any, **kwargs: Any) -> Array:
        devices = axis_size("ulysses", axis_name)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim < 3 or x.shape[-2] == 0:
                _fail(f"{name} (..., positions, heads, dim)", f"shape {x.shape}", "Keep the axis of heads.")
        if q.shape[-2] % devices:
            expected = f"q (..., positions, heads, dim) with a multiple of {devices} heads"
            _fail(expected, f"shape {q.shape}", "Cut the sequence by ring_attention: it has no such limit.")
        k, v = (_for_each_device(name, x, q.shape[-2], devices) for name, x in (("k", k), ("v", v)))
        whole = _exchange([q, k, v], axis_name, devices, cut_axis=-2, join_axis=-3)
        y = attention(*whole, *args, **kwargs)
        expected = whole[0].shape[:-1]
        if y.shape[:-1] != expected:
            remedy = "Return one vector for each position and head of q."
            _fail(f"a result of attention of shape {expected} + (any,)", f"shape {y.shape}", remedy)
        return _exchange([y], axis_name, devices, cut_axis=-3, join_axis=-2)[0]

    return cut


def _for_each_device(name: str, x: Array, heads: int, devices: int) -> Array:
    """Repeats key heads that several devices need, so that the devices can share them out evenly."""
    key_heads = x.shape[-2]
    if key_heads % devices == 0:
        return x
    if heads % key_heads:
        expected = f"{name} (..., positions, key heads, dim) with a number of key heads that divides the {heads} heads"
        _fail(expected, f"shape {x.shape}", "Consecutive heads share a key head.")
    # devices divides heads = key_heads * each, so devices / gcd divides each: no head gets another key head.
    return jnp.repeat(x, devices // math.gcd(devices, key_heads), axis=-2)


def _exchange(arrays: list[Array], axis_name: AxisName, devices: int, *, cut_axis: int, join_axis: int) -> list[Array]:
    """Cuts each array along one axis into a part for each device, and joins the received parts along another axis."""

    def rows(x: Array) -> Array:
        axis = x.ndim + cut_axis
        cut = x.reshape(*x.shape[:axis], devices, x.shape[axis] // devices, *x.shape[axis + 1 :])
        return jnp.moveaxis(cut, axis, 0).reshape(devices, -1)

    def join(row: Array, like: Array) -> Array:
        shape = list(like.shape)
        shape[cut_axis] //= devices
        parts = jnp.moveaxis(row.reshape(devices, *shape), 0, like.ndim + join_axis)
        shape[join_axis] *= devices
        return parts.reshape(shape)

    received = in_buckets(lambda x: lax.all_to_all(x, axis_name, 0, 0), [rows(x) for x in arrays])
    return [join(row, x) for row, x in zip(received, arrays, strict=True)]


def _fail(expected: str, got: str, remedy: str) -> NoReturn:
    raise ValueError(message("parallel.ulysses", expected, got, remedy))
