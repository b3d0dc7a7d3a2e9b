"""Context parallelism: attention over a sequence that is cut along an axis, block by block.

Each of P devices has T/P of the T positions: device r has those from r T/P on, or two chunks in zigzag order
(``zigzag.py``). All other operations of a layer treat each position by itself, so they need no communication.

Blockwise attention updates the largest score m, the sum l and the output o of the keys so far (online softmax):

    s_ij = scale q_i k_j + bias_ij  m' = max(m, max_j s_ij)
    l'   = l exp(m - m') + sum_j exp(s_ij - m')
    o'   = o exp(m - m') + sum_j exp(s_ij - m') v_j                 attention = o / l

Ring attention: each device keeps its queries, while the blocks of keys and values are passed around the ring. After d
steps device r has the block of device r - d. Distances at which no device needs a block are left out.

A tile of keys that no query of a part sees is skipped (``attention_tiles.py``). Messages are outside of that decision,
so all devices send and receive the same.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv:2310.01889,
section 3; Milakov, Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867; Dao, "FlashAttention-2",
arXiv:2307.08691, section 3 (backward).
"""

from __future__ import annotations

import functools
import itertools
import numbers
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.errors import message
from pycollective.jax_support import jax_internals
from pycollective.parallel import attention_dropout
from pycollective.parallel.attention_tiles import (
    Data,
    Layout,
    Place,
    distances,
    has_blind_queries,
    index_of,
    kept_of,
    less,
    mask_of,
    needed,
    tile_of,
    to_tiles,
)
from pycollective.parallel.axes import AxisName, axis_size, names_of, vary

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
    bias: Array | None = None,
    mask: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    zigzag: bool = False,
    keys_at_once: int = 256,
    queries_at_once: int | None = None,
) -> Array:
    """Computes attention over a sequence that is cut along an axis: ``softmax(scale q k^T + bias) v``.

    The result is that of :func:`jax.nn.dot_product_attention` for the whole sequence. Scores and sums are float32, or
    float64 for float64. In addition to its own part of the sequence a device holds two blocks of keys and values, one
    of which is in transit, and the scores of ``queries_at_once`` queries and ``keys_at_once`` keys. The derivative
    needs memory for gradients as well.

    A query sees a key if ``causal``, ``mask``, ``segment_ids``, the lengths and the window all permit it. As in
    JAX, a query that sees no key gets the mean of all values, without dropout. A device skips the tiles of keys of
    which its queries see none, and the ring leaves out the distances at which no device sees a key by its position.

    Args:
        q: this device's queries, of shape (..., T/P, heads, dim) and a floating-point dtype.
        k: this device's keys, of shape (..., S/P, key heads, dim) and the dtype of ``q``. The number of heads must be a
            multiple of the number of key heads: consecutive heads share a key head (grouped queries).
        v: this device's values, of shape (..., S/P, key heads, dim of values) and the dtype of ``q``.
        axis_name: the name of the axis along which the sequence is cut. It is one name, not a tuple.
        causal: whether query i sees only the keys 0 to i. Default False. Without ``zigzag`` the last device computes
            the most, and the others wait for it.
        scale: the factor of the scores, a Python number. Default ``dim ** -0.5``.
        bias: numbers that are added to the scores of this device's queries and the keys of all devices, of a
            floating-point dtype and of a shape that can be broadcast to (..., heads, T/P, S). Keys are in the order of
            positions, queries in the order of ``q``. Default None.
        mask: whether queries see keys, bools of a shape as that of ``bias``. Default None.
        segment_ids: the number of the document of each position, integers of a shape that can be broadcast to (...,
            T/P): this device's part. A query sees only keys of its own document. A pair of arrays has the numbers of
            queries and those of keys, of shape (..., S/P). Default None.
        query_seq_lengths: the numbers of queries of the whole sequences, integers of shape (...). The result of
            further queries is 0. Default None.
        key_value_seq_lengths: the numbers of keys of the whole sequences, integers of shape (...). Default None.
        local_window_size: ``(left, right)``: query i sees the keys i - left to i + right. One integer stands for both.
            Default None.
        dropout_rate: the share of weights that are dropped, a Python number from 0 to less than 1. The other weights
            are divided by ``1 - dropout_rate``. Default 0. Which ones are dropped follows from ``dropout_key`` and from
            the place of the query, key, head and batch element, for any number of devices.
        dropout_key: a key of :func:`jax.random.key`, the same on all devices along the axis. Give devices that have
            other heads or other examples other keys (:func:`random_streams`). Under :func:`jax.vmap` over examples
            these are no batch elements, and all of them drop the same weights: map over a key of each example as
            well. Default None.
        zigzag: whether each device has its part of the sequence in zigzag order (:func:`zigzag`), of queries and of
            keys: the causal mask then gives all devices the same work. T/P and S/P must be even. Default False.
        keys_at_once: the largest number of keys whose scores a device holds at one time, from 1. Default 256. A smaller
            number needs less memory and more steps.
        queries_at_once: the number of queries that are treated together. It divides T/P, and in zigzag order T/P/2.
            With a window smaller than T/P a smaller number skips more. Default None: all of a chunk.

    Returns:
        An array of shape (..., T/P, heads, dim of values), in the dtype of ``q``.

    Raises:
        ValueError: the shapes, dtypes or options do not fit, or ``axis_name`` has several names.
        TypeError: ``scale``, the window or ``dropout_rate`` are no Python numbers.
        NameError: the axis is not bound.

    Differentiation:
        With respect to q, k, v and ``bias``: reverse mode, any number of times, and forward over reverse. Forward mode
        alone is a TypeError of JAX. The backward pass computes the scores again. Take derivatives inside
        ``jax.vmap(axis_name=)``; outside JAX does not find the axis.

    Order:
        Program order: P - 1 permutations, each of a block of keys and values, fewer with a window. The backward pass
        has as many more, and one more than that of the gradients of a block, the last of which returns them to their
        device. ``segment_ids`` adds an all-gather of integers, and where a query may see no key there is a sum of
        (..., key heads, dim of values) numbers.

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
    options = _Options(
        "ring_attention",
        causal=causal,
        scale=scale,
        bias=bias,
        mask=mask,
        segment_ids=segment_ids,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        zigzag=zigzag,
        keys_at_once=keys_at_once,
        queries_at_once=queries_at_once,
    )
    devices = axis_size("ring_attention", axis_name)
    if len(names_of(axis_name)) != 1:
        remedy = "Lay the devices of the sequence out along one axis: JAX has no ring along several."
        _fail("ring_attention", "an axis with one name", f"axis_name={axis_name!r}", remedy)
    return _attend(options, q, k, v, axis_name, devices)


def blockwise_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    first_head: Any = 0,
    keys_at_once: int = 256,
    queries_at_once: int | None = None,
) -> Array:
    """Computes attention over a whole sequence, block by block: ``softmax(scale q k^T + bias) v``.

    It is :func:`ring_attention` of one device, without an axis, and has its options. Use it in :func:`ulysses`: there
    each device has the whole sequence for some of the heads.

    Args:
        q: queries of shape (..., T, heads, dim) and a floating-point dtype.
        k: keys of shape (..., S, key heads, dim) and the dtype of ``q``.
        v: values of shape (..., S, key heads, dim of values) and the dtype of ``q``.
        causal: as for :func:`ring_attention`, and so are all options that are not listed here.
        scale: the factor of the scores.
        bias: numbers that are added to the scores, of a shape that can be broadcast to (..., heads, T, S).
        mask: whether queries see keys, bools of such a shape.
        segment_ids: the number of the document of each position.
        query_seq_lengths: the numbers of queries, of shape (...).
        key_value_seq_lengths: the numbers of keys, of shape (...).
        local_window_size: ``(left, right)``, or one integer for both.
        dropout_rate: the share of weights that are dropped.
        dropout_key: a key of :func:`jax.random.key`; under :func:`jax.vmap` see :func:`ring_attention`.
        first_head: the number of the first of these heads among the heads of all devices, by which dropout draws: in
            :func:`ulysses` ``lax.axis_index(axis_name) * heads``. Default 0.
        keys_at_once: the largest number of keys whose scores are held at one time.
        queries_at_once: the number of queries that are treated together. It divides T.

    Returns:
        An array of shape (..., T, heads, dim of values), in the dtype of ``q``.

    Raises:
        ValueError: the shapes, dtypes or options do not fit.
        TypeError: ``scale``, the window or ``dropout_rate`` are no Python numbers.

    Differentiation:
        As for :func:`ring_attention`.

    Order:
        No communication.

    Source:
        Liu, Abbeel, "Blockwise Parallel Transformer", arXiv:2305.19370; Dao, "FlashAttention-2", arXiv:2307.08691.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 2, 4))  # 8 positions, 2 heads of 4
        >>> y = blockwise_attention(q, k, v, local_window_size=(2, 0))
        >>> full = jax.nn.dot_product_attention(q, k, v, local_window_size=(2, 0))
        >>> bool(jnp.allclose(y, full, atol=1e-5))
        True
    """
    options = _Options(
        "blockwise_attention",
        causal=causal,
        scale=scale,
        bias=bias,
        mask=mask,
        segment_ids=segment_ids,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        first_head=first_head,
        keys_at_once=keys_at_once,
        queries_at_once=queries_at_once,
    )
    return _attend(options, q, k, v, None, 1)


class _Options(NamedTuple):
    """The options of a call, and the name of the public function."""

    where: str
    causal: bool
    scale: Any
    bias: Array | None
    mask: Array | None
    segment_ids: Any
    query_seq_lengths: Array | None
    key_value_seq_lengths: Array | None
    local_window_size: Any
    dropout_rate: Any
    dropout_key: Array | None
    keys_at_once: int
    queries_at_once: int | None
    zigzag: bool = False
    first_head: Any = 0


def _attend(options: _Options, q: Array, k: Array, v: Array, axis_name: AxisName | None, devices: int) -> Array:
    _check_arrays(options.where, q, k, v)
    layout = _layout(options, q, k, axis_name, devices)
    bias, data = _bias_and_data(options, layout, q, k)
    q, k, v, bias, data = _varying_alike(axis_name, (q, k, v, bias, data))
    y, seen = _attention(layout, q, k, v, bias, data)
    if seen is not None:
        mean = jnp.sum(v, axis=-3, keepdims=True, dtype=_wide(v)) / (k.shape[-3] * devices)
        if axis_name is not None:
            (mean,) = _varying_alike(axis_name, (lax.psum(mean, axis_name),))
        mean = jnp.repeat(mean, q.shape[-2] // k.shape[-2], axis=-2).astype(y.dtype)
        y = jnp.where(jnp.broadcast_to(seen, y.shape), y, jnp.broadcast_to(mean, y.shape))
    if data.query_lengths is not None:
        within = less(_positions(layout), data.query_lengths[..., None])
        y = jnp.where(jnp.broadcast_to(within[..., None, None], y.shape), y, jnp.zeros_like(y))
    return y


def _positions(layout: Layout) -> Array:
    """Returns the positions of this device's queries."""
    queries = jnp.arange(layout.queries, dtype=jnp.int32)
    chunks = [layout.chunk(layout.device(), half) * layout.queries + queries for half in range(layout.chunks)]
    return jnp.concatenate(chunks)


def _varying_alike(axis_name: AxisName | None, tree: Tree) -> Tree:
    """Casts arrays so that all of them vary along the same axes: the ring's axis, and each axis of one of them."""
    arrays = jax.tree.leaves(tree) + ([] if axis_name is None else [lax.axis_index(axis_name)])
    union = frozenset().union(*map(jax_internals.varying_axes, arrays))
    return jax.tree.map(lambda x: vary(x, union), tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    layout: Layout, q: Array, k: Array, v: Array, bias: Array | None, data: Data
) -> tuple[Array, Array | None]:
    """Returns the attention, 0 for a query that sees no key, and whether queries see a key, or None if all do."""
    return _forward(layout, q, k, v, bias, data)[0]


def _forward(layout: Layout, q: Array, k: Array, v: Array, bias: Array | None, data: Data) -> tuple[Tree, Tree]:
    rows = _to_rows(layout, q)
    wide = _wide(q)

    def attend(sums: Tree, rows: Array, tile: Array, _: None, view: _View) -> tuple[Tree, None, None]:
        largest, total, out, seen = sums
        keys, values = tile[..., : layout.key_dim], tile[..., layout.key_dim :]
        scores = _scores(layout, rows, keys, view)
        new = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
        base = _finite_base(new)  # the difference of two infinities is NaN
        weights, rest = jnp.exp(scores - base), jnp.exp(largest - base)
        total = total * rest + jnp.sum(weights, axis=-1, keepdims=True)
        out = out * rest + _matmul(_dropped(layout, weights, view).astype(values.dtype), values)
        if seen is not None and view.mask is not None:
            of_rows = jnp.broadcast_to(jnp.any(view.mask, axis=-1, keepdims=True), view.shape(layout, scores, keys=1))
            seen = seen | of_rows.reshape(seen.shape)
        return (new, total, out, seen), None, None

    start = functools.partial(jnp.full_like, rows)
    column = (*rows.shape[:-1], 1)
    sums = (
        start(-jnp.inf, shape=column, dtype=wide),
        start(0, shape=column, dtype=wide),
        start(0, shape=(*rows.shape[:-1], v.shape[-1]), dtype=wide),
        start(False, shape=column, dtype=bool) if layout.blind else None,
    )
    sums, _, _ = _ring_pass(layout, attend, rows, sums, _to_tiles(layout, k, v), None, bias, data)
    largest, total, out, seen = sums
    if seen is not None:
        total, largest = jnp.where(seen, total, jnp.ones_like(total)), jnp.where(seen, largest, jnp.zeros_like(largest))
    y = _from_rows(layout, out / total).astype(q.dtype)
    found = None if seen is None else _from_rows(layout, seen)
    return (y, found), (q, k, v, bias, data, y, largest + jnp.log(total))


def _backward(layout: Layout, residuals: Tree, cotangents: Tree) -> tuple[Array, Array, Array, Array | None, None]:
    q, k, v, bias, data, y, log_total = residuals
    dy, _ = cotangents
    rows, drows = _to_rows(layout, q), _to_rows(layout, dy)
    # Of p_ij = exp(s_ij - log_total_i) and dp_ij = dy_i v_j:  ds_ij = p_ij (dp_ij - sum_j p_ij dp_ij).
    # The sum is dy_i y_i, so it needs no communication. Dropout multiplies dp_ij, and the sum is dy_i y_i as well.
    mean = jnp.sum(drows.astype(log_total.dtype) * _to_rows(layout, y).astype(log_total.dtype), axis=-1, keepdims=True)

    def attend(dq: Array, fixed: Tree, tile: Array, grads: Array, view: _View) -> tuple[Array, Array, Array | None]:
        rows, drows, mean, log_total = fixed
        keys, values = tile[..., : layout.key_dim], tile[..., layout.key_dim :]
        weights = jnp.exp(_scores(layout, rows, keys, view) - log_total)
        dscores = weights * (_dropped(layout, _matmul(drows, values.mT), view) - mean)
        dbias = None if view.bias is None else _summed_to(view.bias.shape, dscores.reshape(view.shape(layout, dscores)))
        dscores = (dscores * layout.scale).astype(q.dtype)
        dkeys = _matmul(dscores.mT, rows)
        dvalues = _matmul(_dropped(layout, weights, view).astype(q.dtype).mT, drows)
        return dq + _matmul(dscores, keys), grads + jnp.concatenate([dkeys, dvalues], axis=-1), dbias

    tiles = _to_tiles(layout, k, v)
    dq, grads = (jnp.zeros_like(x, _wide(x)) for x in (rows, tiles))
    fixed = rows, drows, mean, log_total
    dq, grads, dbias = _ring_pass(layout, attend, fixed, dq, tiles, grads, bias, data)
    dk, dv = _from_tiles(layout, grads)
    dq = _from_rows(layout, dq).astype(q.dtype)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None if bias is None else dbias.astype(bias.dtype), None


_attention.defvjp(_forward, _backward)


class _View(NamedTuple):
    """What a part of the queries sees of a tile. Each may be None.

    The axes are (..., key heads, heads of each, queries, keys); those of the mask and of the bias may have length 1.
    """

    mask: Array | None
    bias: Array | None
    kept: Array | None

    @staticmethod
    def shape(layout: Layout, scores: Array, *, keys: int | None = None) -> tuple[int, ...]:
        """Returns the shape of scores with these axes; ``keys`` replaces the number of keys."""
        *batch, rows, length = scores.shape
        return (*batch, rows // layout.part_length, layout.part_length, length if keys is None else keys)


def _ring_pass(
    layout: Layout,
    attend: Callable[..., Any],
    fixed: Tree,
    own: Tree,
    tiles: Array,
    grads: Tree,
    bias: Array | None,
    data: Data,
) -> tuple[Tree, Tree, Tree]:
    """Passes the tiles around the ring, so that each device computes with the tiles that it needs.

    Args:
        layout: the layout.
        attend: maps ``own`` and ``fixed`` of a part, a tile, its part of ``grads`` and the :class:`_View` to the new
            ``own``, the new part of ``grads`` and the gradient of the bias.
        fixed: values of this device's queries, stacked by parts.
        own: values that stay on this device and change, stacked by parts.
        tiles: this device's tiles, stacked. They are sent to the next device before the computation with them.
        grads: gradients of the tiles, or None. They are sent to the next device after the computation with the tiles.
        bias: the bias in tiles, or None.
        data: masks.

    Returns:
        ``own``, ``grads`` of this device's own tiles, and the gradient of the bias in tiles, None without ``grads``.
    """
    device = layout.device()

    def send(x: Tree, places: int) -> Tree:
        if places % layout.devices == 0:
            return x
        return lax.ppermute(x, layout.axis_name, [(r, (r + places) % layout.devices) for r in range(layout.devices)])

    def attend_to_part(tile: Array, source: Any, number: Array, state: Tree, of_part: Tree) -> Tree:
        grads, dbias = state
        own, fixed, part = of_part
        place = Place(device, part, source, number)

        def look(own: Tree, grads: Tree) -> Tree:
            view = _View(
                mask_of(layout, data, place),
                None if bias is None else tile_of(layout, bias, place),
                kept_of(layout, data, place),
            )
            return attend(own, fixed, tile, grads, view)

        def skip(own: Tree, grads: Tree) -> Tree:
            return own, grads, None if dbias is None else jnp.zeros_like(tile_of(layout, dbias, place))

        condition = needed(layout, data, place)
        own, grads, more = look(own, grads) if condition is None else lax.cond(condition, look, skip, own, grads)
        if dbias is not None:
            dbias = dbias.at[index_of(layout, dbias, place)].add(more)
        return (grads, dbias), own

    def attend_to_block(own: Tree, dbias: Tree, tiles: Array, grads: Tree, distance: Any) -> Tree:
        source = (device - distance) % layout.devices

        def attend_to_tile(state: Tree, each: Tree) -> tuple[Tree, Tree]:
            own, dbias = state
            tile, grads, number = each

            one_part = functools.partial(attend_to_part, tile, source, number)
            parts = jnp.arange(layout.chunks * layout.parts, dtype=jnp.int32)
            (grads, dbias), own = lax.scan(one_part, (grads, dbias), (own, fixed, parts))
            return (own, dbias), grads

        numbers_of_tiles = jnp.arange(layout.chunks * layout.tiles, dtype=jnp.int32)
        (own, dbias), grads = lax.scan(attend_to_tile, (own, dbias), (tiles, grads, numbers_of_tiles))
        return own, dbias, grads

    def one_step(places: int, state: Tree, distance: Array) -> tuple[Tree, None]:
        own, dbias, tiles, grads = state
        following = send(tiles, places)
        own, dbias, grads = attend_to_block(own, dbias, tiles, grads, distance)
        return (own, dbias, following, send(grads, places)), None

    dbias = None if bias is None or grads is None else jnp.zeros_like(bias, _wide(bias))
    state = own, dbias, tiles, grads
    found = distances(layout)
    for places, run in itertools.groupby(itertools.pairwise(found), lambda step: step[1] - step[0]):
        run_distances = jnp.array([distance for distance, _ in run], jnp.int32)
        step = functools.partial(one_step, places)
        state, _ = lax.scan(step, state, run_distances, unroll=2)  # the two buffers change roles
    own, dbias, tiles, grads = state
    own, dbias, grads = attend_to_block(own, dbias, tiles, grads, found[-1])
    return own, send(grads, -found[-1]), dbias


def _scores(layout: Layout, rows: Array, keys: Array, view: _View) -> Array:
    """Returns scores, ``-inf`` for masked keys."""
    scores = layout.scale * _matmul(rows, keys.mT)
    shape = view.shape(layout, scores)
    if view.bias is not None:
        bias = jnp.broadcast_to(view.bias.astype(scores.dtype), shape)
        scores = scores + bias.reshape(scores.shape)
    if view.mask is not None:
        # The rows are the queries of one head, then those of the next head.
        scores = jnp.where(
            jnp.broadcast_to(view.mask, shape).reshape(scores.shape), scores, jnp.full_like(scores, -jnp.inf)
        )
    return scores


def _finite_base(largest: Array) -> Array:
    """Returns the largest scores, and 0 where no key has been seen."""
    return jnp.where(largest == -jnp.inf, jnp.zeros_like(largest), largest)


def _dropped(layout: Layout, weights: Array, view: _View) -> Array:
    if view.kept is None:
        return weights
    kept = jnp.broadcast_to(view.kept, view.shape(layout, weights)).reshape(weights.shape)
    return jnp.where(kept, weights / (1 - layout.dropout_rate), jnp.zeros_like(weights))


def _summed_to(shape: tuple[int, ...], x: Array) -> Array:
    """Sums along the axes that have length 1 in ``shape``: the transpose of broadcasting."""
    axes = tuple(axis for axis, length in enumerate(shape) if length == 1 and x.shape[axis] > 1)
    return jnp.sum(x, axis=axes, keepdims=True)


def _wide(x: Array) -> Any:
    return np.promote_types(x.dtype, np.float32)


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=_wide(a))


def _to_rows(layout: Layout, x: Array) -> Array:
    """Reshapes (..., positions of a device, heads, dim) to (parts, ..., key heads, rows, dim).

    The rows of a key head are the positions of a part for all heads that share it, head after head.
    """
    *batch, positions, heads, dim = x.shape
    grouped = x.reshape(
        *batch, positions // layout.part_length, layout.part_length, layout.key_heads, heads // layout.key_heads, dim
    )
    grouped = jnp.moveaxis(jnp.moveaxis(grouped, -4, -2), -5, 0)
    rows = heads // layout.key_heads * layout.part_length
    return grouped.reshape(grouped.shape[0], *batch, layout.key_heads, rows, dim)


def _from_rows(layout: Layout, rows: Array) -> Array:
    """Reshapes the rows of queries back, the inverse of :func:`_to_rows`."""
    parts, *batch, key_heads, count, dim = rows.shape
    each = count // layout.part_length
    grouped = rows.reshape(parts, *batch, key_heads, each, layout.part_length, dim)
    grouped = jnp.moveaxis(jnp.moveaxis(grouped, 0, -5), -2, -4)
    return grouped.reshape(*batch, parts * layout.part_length, key_heads * each, dim)


def _to_tiles(layout: Layout, k: Array, v: Array) -> Array:
    """Returns keys and values as tiles, joined for one call: (tiles, ..., key heads, length, dims of both)."""
    both = jnp.moveaxis(jnp.concatenate([k, v], axis=-1), -3, -2)
    *rest, _, dims = both.shape
    length = layout.tile_length
    chunks = both.reshape(*rest, layout.chunks, layout.keys, dims)
    padding = [(0, 0)] * (chunks.ndim - 2) + [(0, layout.tiles * length - layout.keys), (0, 0)]
    return jnp.moveaxis(jnp.pad(chunks, padding).reshape(*rest, layout.chunks * layout.tiles, length, dims), -3, 0)


def _from_tiles(layout: Layout, tiles: Array) -> tuple[Array, Array]:
    """Returns the keys and values of tiles, the inverse of :func:`_to_tiles`."""
    padded = jnp.moveaxis(tiles, 0, -3)
    *rest, _, length, dims = padded.shape
    chunks = padded.reshape(*rest, layout.chunks, layout.tiles * length, dims)[..., : layout.keys, :]
    both = jnp.moveaxis(chunks.reshape(*rest, layout.chunks * layout.keys, dims), -2, -3)
    return tuple(jnp.split(both, [layout.key_dim], axis=-1))


def _layout(options: _Options, q: Array, k: Array, axis_name: AxisName | None, devices: int) -> Layout:
    where, chunks = options.where, 2 if options.zigzag else 1
    if not (options.scale is None or isinstance(options.scale, numbers.Real)):
        _fail(where, "scale: a Python number", repr(options.scale), "Multiply q by it.", TypeError)
    if options.keys_at_once < 1:
        _fail(where, "keys_at_once of at least 1", f"{options.keys_at_once}", "Pass e.g. 512.")
    if q.shape[-3] % chunks or k.shape[-3] % chunks:
        got = f"{q.shape[-3]} queries and {k.shape[-3]} keys"
        _fail(where, "zigzag order: an even number of queries and of keys", got, "Fill the sequence up.")
    queries, keys = q.shape[-3] // chunks, k.shape[-3] // chunks
    at_once = queries if options.queries_at_once is None else options.queries_at_once
    if at_once < 1 or queries % at_once:
        _fail(where, f"queries_at_once that divides {queries}, the queries of a chunk", f"{at_once}", "Pass None.")
    if not isinstance(options.dropout_rate, numbers.Real):
        remedy = "It is known when the program is traced."
        _fail(where, "dropout_rate: a Python number", repr(options.dropout_rate), remedy, TypeError)
    rate = float(options.dropout_rate)
    if not 0 <= rate < 1 or (rate > 0 and options.dropout_key is None):
        got = f"dropout_rate={rate} and dropout_key={options.dropout_key}"
        _fail(where, "a dropout_rate from 0 to less than 1, with a dropout_key unless it is 0", got, "Pass both.")
    left, right = _window(where, options.local_window_size)
    lows = ([0] if options.causal else []) + ([] if right is None else [-right])
    layout = Layout(
        axis_name=axis_name,
        devices=devices,
        chunks=chunks,
        low=max(lows, default=None),
        high=left,
        scale=q.shape[-1] ** -0.5 if options.scale is None else float(options.scale),
        queries=queries,
        keys=keys,
        parts=queries // at_once,
        tiles=-(-keys // options.keys_at_once),
        key_heads=k.shape[-2],
        key_dim=k.shape[-1],
        dropout_rate=rate,
        blind=False,
    )
    by_data = (options.mask, options.segment_ids, options.query_seq_lengths, options.key_value_seq_lengths)
    return layout._replace(blind=any(x is not None for x in by_data) or has_blind_queries(layout))


def _window(where: str, size: Any) -> tuple[int | None, int | None]:
    if size is None:
        return None, None
    try:
        left, right = (operator.index(x) for x in (size if isinstance(size, tuple) else (size, size)))
    except (TypeError, ValueError):
        expected = "local_window_size: an integer, or (left, right)"
        _fail(where, expected, repr(size), "Pass Python integers.", TypeError)
    return left, right


def _bias_and_data(options: _Options, layout: Layout, q: Array, k: Array) -> tuple[Array | None, Data]:
    where, batch = options.where, q.shape[:-3]
    whole = (*batch, q.shape[-2], q.shape[-3], k.shape[-3] * layout.devices)
    bias = _fitting(where, "bias", options.bias, whole, jnp.floating)
    mask = _fitting(where, "mask", options.mask, whole, jnp.bool_)
    query_lengths, key_lengths = (
        _fitting(where, name, x, batch, jnp.integer, exact=len(batch))
        for name, x in (
            ("query_seq_lengths", options.query_seq_lengths),
            ("key_value_seq_lengths", options.key_value_seq_lengths),
        )
    )
    query_lengths, key_lengths = (None if x is None else x.astype(jnp.int32) for x in (query_lengths, key_lengths))
    ids = options.segment_ids
    of_queries, of_keys = ids if isinstance(ids, tuple) else (ids, ids)
    if (of_queries is None) != (of_keys is None):
        _fail(where, "segment_ids of queries and of keys", "None for one of them", "Pass a pair of arrays, or None.")
    of_queries = _fitting(where, "segment_ids of queries", of_queries, (*batch, q.shape[-3]), jnp.integer, exact=1)
    of_keys = _fitting(where, "segment_ids of keys", of_keys, (*batch, k.shape[-3]), jnp.integer, exact=1)
    if of_queries is not None:
        of_queries, of_keys = _documents_in_tiles(layout, of_queries, of_keys)
    head_keys = None
    if layout.dropout_rate > 0:
        words = attention_dropout.keys_of_heads(options.dropout_key, batch, q.shape[-2], options.first_head)
        each = q.shape[-2] // layout.key_heads
        head_keys = tuple(x.reshape(*batch, layout.key_heads, each, 1, 1) for x in words)
    data = Data(
        mask=None if mask is None else to_tiles(layout, mask),
        query_documents=of_queries,
        key_documents=of_keys,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        head_keys=head_keys,
    )
    return None if bias is None else to_tiles(layout, bias), data


def _documents_in_tiles(layout: Layout, of_queries: Array, of_keys: Array) -> tuple[Array, Array]:
    """Returns the documents of this device's queries by parts, and those of all keys by devices and tiles."""
    *batch, _ = of_queries.shape
    parts = of_queries.reshape(*batch, layout.chunks * layout.parts, layout.part_length)
    *batch, _ = of_keys.shape
    chunks = of_keys.reshape(*batch, layout.chunks, layout.keys)
    padding = [(0, 0)] * (chunks.ndim - 1) + [(0, layout.tiles * layout.tile_length - layout.keys)]
    tiles = jnp.pad(chunks, padding, mode="edge").reshape(*batch, layout.chunks * layout.tiles, layout.tile_length)
    tiles = jnp.moveaxis(tiles, -2, 0)
    of_all = tiles[None] if layout.axis_name is None else lax.all_gather(tiles, layout.axis_name)
    return jnp.moveaxis(parts, -2, 0), of_all


def _fitting(where: str, name: str, x: Any, shape: tuple[int, ...], kind: Any, *, exact: int = 0) -> Array | None:
    """Returns ``x`` with as many axes as ``shape``, to which it can be broadcast.

    Args:
        where: the public function.
        name: the name of the argument.
        x: the argument, or None.
        shape: the shape.
        kind: the kind of dtype.
        exact: how many of the last axes must have the length that ``shape`` has.
    """
    if x is None:
        return None
    x = jnp.asarray(x)
    padded = (1,) * (len(shape) - x.ndim) + x.shape
    free = len(shape) - exact
    fits = len(padded) == len(shape) and all(
        a == b or (a == 1 and axis < free) for axis, (a, b) in enumerate(zip(padded, shape, strict=True))
    )
    if not fits or not jnp.issubdtype(x.dtype, kind):
        expected = f"{name} of {kind.__name__} and of shape {list(shape)}, or one that can be broadcast to it"
        _fail(where, expected, f"{x.dtype}{list(x.shape)}", "Give each device the part of its own queries.")
    return x.reshape(padded)


def _check_arrays(where: str, q: Array, k: Array, v: Array) -> None:
    got = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
    if not (q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, jnp.floating)):
        _fail(where, "q, k and v of one floating-point dtype", got, "Cast them, e.g. k.astype(q.dtype).")
    fits = (
        min(q.ndim, k.ndim) >= 3
        and k.shape[:-1] == v.shape[:-1]
        and (q.shape[:-3], q.shape[-1]) == (k.shape[:-3], k.shape[-1])
        and min(*q.shape[-3:], *v.shape[-3:]) > 0
        and q.shape[-2] % k.shape[-2] == 0
    )
    if not fits:
        expected = "q (..., T/P, heads, dim), k (..., S/P, key heads, dim), v (..., S/P, key heads, any), none 0"
        _fail(where, expected, got, "The number of key heads must divide the number of heads.")


def _fail(where: str, expected: str, got: str, remedy: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(message(f"parallel.{where}", expected, got, remedy))
