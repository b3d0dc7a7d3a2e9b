"""Context parallelism: attention over a sequence that is cut along an axis.

Each of P devices has T/P of the T positions: device r has those from r T/P on. All other operations of a layer treat
each position by itself, so they need no communication.

Ring attention: each device keeps its queries, while the blocks of keys and values are passed around the ring. At step s
device r has the block of device r - s. It updates the largest score m, the sum l and the output o of the keys so far
(online softmax):

    s_ij = scale q_i k_j            m' = max(m, max_j s_ij)
    l'   = l exp(m - m') + sum_j exp(s_ij - m')
    o'   = o exp(m - m') + sum_j exp(s_ij - m') v_j                 attention = o / l

Ulysses: an all-to-all gives each device all positions of its part of the heads. A second one restores the first layout.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv:2310.01889,
section 3; Milakov, Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867; Dao, "FlashAttention-2",
arXiv:2307.08691, section 3 (backward); Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509, section 3.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.errors import message
from pycollective.jax_support import jax_internals
from pycollective.parallel.axes import AxisName, axis_size, names_of, vary
from pycollective.parallel.buckets import in_buckets

Array = Any
Tree = Any


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    axis_name: AxisName,
    *,
    causal: bool = False,
    scale: float | None = None,
    keys_at_once: int = 256,
) -> Array:
    """Computes attention over a sequence that is cut along an axis: ``softmax(scale q k^T) v``.

    The result is that of :func:`jax.nn.dot_product_attention` for the whole sequence. Scores and sums are float32, or
    float64 for float64. In addition to its own part of the sequence a device holds two blocks of keys and values, one
    of which is in transit, and the scores of ``keys_at_once`` keys. The derivative needs memory for gradients as well.

    Args:
        q: this device's queries, of shape (..., T/P, heads, dim) and a floating-point dtype.
        k: this device's keys, of shape (..., S/P, key heads, dim) and the dtype of ``q``. The number of heads must be a
            multiple of the number of key heads: consecutive heads share a key head (grouped queries).
        v: this device's values, of shape (..., S/P, key heads, dim of values) and the dtype of ``q``.
        axis_name: the name of the axis along which the sequence is cut. It is one name, not a tuple.
        causal: whether query i attends only to the keys 0 to i. Default False. A device skips keys to which none of its
            queries attends, so the last device computes the most, and the others wait for it.
        scale: the factor of the scores, a Python number. Default ``dim ** -0.5``.
        keys_at_once: the largest number of keys whose scores a device holds at one time, from 1. Default 256. A smaller
            number needs less memory and more steps.

    Returns:
        An array of shape (..., T/P, heads, dim of values), in the dtype of ``q``.

    Raises:
        ValueError: the shapes or dtypes do not fit, or ``axis_name`` has several names.
        TypeError: ``scale`` is no Python number.
        NameError: the axis is not bound.

    Differentiation:
        Reverse mode, any number of times, and forward over reverse. Forward mode alone is a TypeError of JAX. The
        backward pass computes the scores again. Take derivatives inside ``jax.vmap(axis_name=)``; outside JAX does not
        find the axis.

    Order:
        Program order: P - 1 permutations, each of a block of keys and values. The backward pass has P - 1 more, and P
        permutations of the gradients of a block, the last of which returns them to their device.

    Source:
        Liu et al., "Ring Attention", arXiv:2310.01889; backward: Dao, "FlashAttention-2", arXiv:2307.08691, section 3.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 2, 4))  # 8 positions, 2 heads of 4
        >>> blocks = [x.reshape(2, 4, 2, 4) for x in (q, k, v)]  # 2 devices have 4 positions each
        >>> y = jax.vmap(lambda *x: ring_attention(*x, "seq", causal=True), axis_name="seq")(*blocks)
        >>> full = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        >>> bool(jnp.allclose(y.reshape(8, 2, 4), full, atol=1e-5))
        True
    """
    devices = axis_size("ring_attention", axis_name)
    _check_ring(q, k, v, axis_name, scale, keys_at_once)
    ring = _Ring(
        axis_name=axis_name,
        devices=devices,
        causal=causal,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        queries=q.shape[-3],
        keys=k.shape[-3],
        key_heads=k.shape[-2],
        key_dim=k.shape[-1],
        tiles=-(-k.shape[-3] // keys_at_once),
    )
    return _attention(ring, *_varying_alike(axis_name, q, k, v))


class _Ring(NamedTuple):
    """The static parameters of a ring. A block of keys is processed in ``tiles`` tiles of equal length, in order."""

    axis_name: AxisName
    devices: int
    causal: bool
    scale: float
    queries: int
    keys: int
    key_heads: int
    key_dim: int
    tiles: int


def _varying_alike(axis_name: AxisName, *arrays: Array) -> list[Array]:
    """Casts arrays so that all of them vary along the same axes: the ring's axis, and each axis of one of them."""
    varying = [jax_internals.varying_axes(x) for x in (lax.axis_index(axis_name), *arrays)]
    union = frozenset().union(*varying)
    return [vary(x, sorted(union, key=str)) for x in arrays]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring: _Ring, q: Array, k: Array, v: Array) -> Array:
    return _forward(ring, q, k, v)[0]


def _forward(ring: _Ring, q: Array, k: Array, v: Array) -> tuple[Array, Tree]:
    rows = _to_rows(ring, q)
    wide = _wide(q)

    def attend(sums: Tree, tile: Array, grads: None, mask: Array | None) -> tuple[Tree, None]:
        largest, total, out = sums
        keys, values = tile[..., : ring.key_dim], tile[..., ring.key_dim :]
        scores = _scores(ring, rows, keys, mask)
        new = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
        weights, rest = jnp.exp(scores - new), jnp.exp(largest - new)
        total = total * rest + jnp.sum(weights, axis=-1, keepdims=True)
        return (new, total, out * rest + _matmul(weights.astype(values.dtype), values)), grads

    # A row whose keys so far are all masked has a wrong sum. At its first key that is not masked the factor
    # exp(largest - new) is 0, which removes the wrong sum.
    start = functools.partial(jnp.full_like, rows, dtype=wide)
    column = (*rows.shape[:-1], 1)
    sums = (
        start(_masked_score(wide), shape=column),
        start(0, shape=column),
        start(0, shape=(*rows.shape[:-1], v.shape[-1])),
    )
    (largest, total, out), _ = _ring_pass(ring, attend, sums, _to_tiles(ring, k, v), None)
    y = _from_rows(ring, out / total).astype(q.dtype)
    return y, (q, k, v, y, largest + jnp.log(total))


def _backward(ring: _Ring, residuals: Tree, dy: Array) -> tuple[Array, Array, Array]:
    q, k, v, y, log_total = residuals
    rows, drows = _to_rows(ring, q), _to_rows(ring, dy)
    # Of p_ij = exp(s_ij - log_total_i) and dp_ij = dy_i v_j:  ds_ij = p_ij (dp_ij - sum_j p_ij dp_ij).
    # The sum is dy_i y_i, so it needs no communication.
    mean = jnp.sum(drows.astype(log_total.dtype) * _to_rows(ring, y).astype(log_total.dtype), axis=-1, keepdims=True)

    def attend(dq: Array, tile: Array, grads: Array, mask: Array | None) -> tuple[Array, Array]:
        keys, values = tile[..., : ring.key_dim], tile[..., ring.key_dim :]
        weights = jnp.exp(_scores(ring, rows, keys, mask) - log_total)
        dscores = (weights * (_matmul(drows, values.mT) - mean) * ring.scale).astype(q.dtype)
        dkeys, dvalues = _matmul(dscores.mT, rows), _matmul(weights.astype(q.dtype).mT, drows)
        return dq + _matmul(dscores, keys), grads + jnp.concatenate([dkeys, dvalues], axis=-1)

    tiles = _to_tiles(ring, k, v)
    dq, grads = (jnp.zeros_like(x, _wide(x)) for x in (rows, tiles))
    dq, grads = _ring_pass(ring, attend, dq, tiles, grads)
    dk, dv = _from_tiles(ring, grads)
    return _from_rows(ring, dq).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


_attention.defvjp(_forward, _backward)


def _ring_pass(ring: _Ring, attend: Callable[..., Any], own: Tree, tiles: Array, grads: Tree) -> tuple[Tree, Tree]:
    """Passes the tiles around the ring, so that each device computes with the tiles of all devices.

    Args:
        ring: the ring.
        attend: maps ``own``, a tile, its part of ``grads`` and the mask to the new ``own`` and the new part.
        own: the values that stay on this device.
        tiles: this device's tiles, stacked. They are sent to the next device before the computation with them.
        grads: gradients of the tiles, or None. They are sent to the next device after the computation with the tiles.

    Returns:
        ``own``, and ``grads`` of this device's own tiles.
    """
    device = lax.axis_index(ring.axis_name)

    def send(x: Tree) -> Tree:
        return lax.ppermute(x, ring.axis_name, [(r, (r + 1) % ring.devices) for r in range(ring.devices)])

    def attend_to_block(own: Tree, tiles: Array, grads: Tree, step: Any) -> tuple[Tree, Tree]:
        first = (device - step) % ring.devices * ring.keys
        length = tiles.shape[-2]

        def attend_to_tile(own: Tree, each: Tree) -> tuple[Tree, Tree]:
            tile, part, place = each

            def attend_with_mask(own: Tree, part: Tree) -> tuple[Tree, Tree]:
                return attend(own, tile, part, _mask(ring, device, first, place * length, length))

            if not ring.causal:
                return attend_with_mask(own, part)
            last_query = (device + 1) * ring.queries - 1
            return lax.cond(first + place * length <= last_query, attend_with_mask, lambda *unseen: unseen, own, part)

        return lax.scan(attend_to_tile, own, (tiles, grads, jnp.arange(ring.tiles, dtype=jnp.int32)))

    def one_step(state: Tree, step: Array) -> tuple[Tree, None]:
        own, tiles, grads = state
        following = send(tiles)
        own, grads = attend_to_block(own, tiles, grads, step)
        return (own, following, send(grads)), None

    steps = jnp.arange(ring.devices - 1, dtype=jnp.int32)
    (own, tiles, grads), _ = lax.scan(one_step, (own, tiles, grads), steps, unroll=2)  # the two buffers change roles
    own, grads = attend_to_block(own, tiles, grads, ring.devices - 1)
    return own, send(grads)


def _mask(ring: _Ring, device: Array, first: Array, start: Array, length: int) -> Array | None:
    """Returns the mask of a tile, of shape (queries, length): whether a query attends to a key. None: to all keys.

    Args:
        ring: the ring.
        device: the index of this device.
        first: the position of the block's first key.
        start: the tile's first key in its block.
        length: the number of keys of a tile.
    """
    keys = start + jnp.arange(length, dtype=jnp.int32)
    mask = None
    if ring.tiles * length > ring.keys:
        mask = jnp.broadcast_to(keys < ring.keys, (ring.queries, length))  # the last tiles end with padding
    if ring.causal:
        queries = device * ring.queries + jnp.arange(ring.queries, dtype=jnp.int32)
        before = queries[:, None] >= (first + keys)[None, :]
        mask = before if mask is None else mask & before
    return mask


def _scores(ring: _Ring, rows: Array, keys: Array, mask: Array | None) -> Array:
    scores = ring.scale * _matmul(rows, keys.mT)
    if mask is None:
        return scores
    each = scores.shape[-2] // ring.queries  # the rows are the queries of one head, then those of the next head
    return jnp.where(jnp.broadcast_to(jnp.tile(mask, (each, 1)), scores.shape), scores, _masked_score(scores.dtype))


def _masked_score(dtype: Any) -> float:
    """Returns the score of a masked key. It is finite, since the difference of two infinities is NaN."""
    return -0.7 * float(jnp.finfo(dtype).max)


def _wide(x: Array) -> Any:
    return np.promote_types(x.dtype, np.float32)


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=_wide(a))


def _to_rows(ring: _Ring, x: Array) -> Array:
    """Reshapes (..., positions, heads, dim) to (..., key heads, rows, dim).

    The rows of a key head are the positions of all heads that share it, head after head.
    """
    *batch, positions, heads, dim = x.shape
    each = heads // ring.key_heads
    grouped = x.reshape(*batch, positions, ring.key_heads, each, dim)
    return jnp.moveaxis(grouped, -4, -2).reshape(*batch, ring.key_heads, each * positions, dim)


def _from_rows(ring: _Ring, rows: Array) -> Array:
    """Reshapes the rows of queries back, the inverse of :func:`_to_rows`."""
    *batch, key_heads, count, dim = rows.shape
    each = count // ring.queries
    grouped = rows.reshape(*batch, key_heads, each, ring.queries, dim)
    return jnp.moveaxis(grouped, -2, -4).reshape(*batch, ring.queries, key_heads * each, dim)


def _to_tiles(ring: _Ring, k: Array, v: Array) -> Array:
    """Returns keys and values as tiles, joined for one call: (tiles, ..., key heads, length, dims of both)."""
    both = _to_rows(ring, jnp.concatenate([k, v], axis=-1))
    length = -(-ring.keys // ring.tiles)
    padded = jnp.pad(both, [(0, 0)] * (both.ndim - 2) + [(0, ring.tiles * length - ring.keys), (0, 0)])
    return jnp.moveaxis(padded.reshape(*both.shape[:-2], ring.tiles, length, both.shape[-1]), -3, 0)


def _from_tiles(ring: _Ring, tiles: Array) -> tuple[Array, Array]:
    """Returns the keys and values of tiles, the inverse of :func:`_to_tiles`."""
    padded = jnp.moveaxis(tiles, 0, -3)
    *rest, count, length, dims = padded.shape
    both = padded.reshape(*rest, count * length, dims)[..., : ring.keys, :]
    return tuple(jnp.split(jnp.moveaxis(both, -2, -3), [ring.key_dim], axis=-1))


def _check_ring(q: Array, k: Array, v: Array, axis_name: AxisName, scale: Any, keys_at_once: int) -> None:
    where = "parallel.ring_attention"
    if len(names_of(axis_name)) != 1:
        remedy = "Lay the devices of the sequence out along one axis: JAX has no ring along several."
        raise ValueError(message(where, "an axis with one name", f"axis_name={axis_name!r}", remedy))
    if not (scale is None or isinstance(scale, numbers.Real)):
        raise TypeError(message(where, "scale: a Python number", repr(scale), "Multiply q by it."))
    if keys_at_once < 1:
        raise ValueError(message(where, "keys_at_once of at least 1", f"{keys_at_once}", "Pass e.g. 512."))
    got = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
    if not (q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, jnp.floating)):
        raise ValueError(
            message(where, "q, k and v of one floating-point dtype", got, "Cast them, e.g. k.astype(q.dtype).")
        )
    fits = (
        min(q.ndim, k.ndim) >= 3
        and k.shape[:-1] == v.shape[:-1]
        and (q.shape[:-3], q.shape[-1]) == (k.shape[:-3], k.shape[-1])
        and min(*q.shape[-3:], *v.shape[-3:]) > 0
        and q.shape[-2] % k.shape[-2] == 0
    )
    if not fits:
        expected = "q (..., T/P, heads, dim), k (..., S/P, key heads, dim), v (..., S/P, key heads, any), none 0"
        raise ValueError(message(where, expected, got, "The number of key heads must divide the number of heads."))


def ulysses(attention: Callable[..., Array], axis_name: AxisName) -> Callable[..., Array]:
    """Makes attention over a cut sequence from ``attention`` over a whole one: each device computes some of the heads.

    All-to-alls of q, k and v give each of P devices the whole sequence for 1/P of the heads. A last one restores the
    layout of the sequence for the result.

    Args:
        attention: a function of q (..., T, heads/P, dim), k and v (..., S, key heads/P, dim) and further arguments. It
            returns an array of shape (..., T, heads/P, any). An example is :func:`jax.nn.dot_product_attention`.
        axis_name: the name of the axis along which the sequence is cut, or a tuple of names.

    Returns:
        A function of q (..., T/P, heads, dim), k and v (..., S/P, key heads, dim), and of the further arguments of
        ``attention``, which it passes unchanged. It returns an array of shape (..., T/P, heads, any), in the dtype of
        the result of ``attention``.

    Raises:
        ValueError: P does not divide the number of heads of q, k or v, or the result of ``attention`` has another
            shape.
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
            if x.ndim < 3 or x.shape[-2] % devices:
                expected = f"{name} (..., positions, heads, dim) with a multiple of {devices} heads"
                remedy = "Repeat too few heads of k and v by jnp.repeat(x, n, axis=-2), or use ring_attention."
                raise ValueError(message("parallel.ulysses", expected, f"shape {x.shape}", remedy))
        whole = _exchange([q, k, v], axis_name, devices, cut_axis=-2, join_axis=-3)
        y = attention(*whole, *args, **kwargs)
        expected = whole[0].shape[:-1]
        if y.shape[:-1] != expected:
            remedy = "Return one vector for each position and head of q."
            got = f"shape {y.shape}"
            raise ValueError(
                message("parallel.ulysses", f"a result of attention of shape {expected} + (any,)", got, remedy)
            )
        return _exchange([y], axis_name, devices, cut_axis=-3, join_axis=-2)[0]

    return cut


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
