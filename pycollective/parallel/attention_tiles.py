"""The tiles of blockwise attention: which queries and keys they have, which of them are needed, and what they mask.

Each device has a chunk of the sequence, or two in zigzag order. A chunk of queries has ``parts`` parts, a chunk of keys
``tiles`` tiles. A part and a tile are the unit of computation. Query i sees key j only if

    low <= i - j <= high       low = 0 for a causal mask, high = left and low = -right for a window (left, right)

A tile is needed for a part only if one of these queries may see one of these keys. Most of that follows from the places
alone, and numbers of documents, lengths and masks say the rest when the program runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.parallel import attention_dropout
from pycollective.parallel.axes import AxisName
from pycollective.parallel.zigzag import chunk_number

Array = Any


class Layout(NamedTuple):
    """The static parameters of an attention.

    Attributes:
        axis_name: the name of the axis along which the sequence is cut, or None.
        devices: the number of devices, P.
        chunks: the number of chunks of a device: 2 in zigzag order, else 1.
        low: the smallest difference i - j of positions where query i sees key j, or None.
        high: the largest such difference, or None.
        scale: the factor of the scores.
        queries: the number of queries of a chunk.
        keys: the number of keys of a chunk.
        parts: the number of parts of a chunk of queries, which have equal lengths.
        tiles: the number of tiles of a chunk of keys. They have equal lengths, and the last one ends with padding.
        key_heads: the number of key heads.
        key_dim: the size of a key.
        dropout_rate: the share of weights that are dropped.
        blind: whether a query may see no key at all.
    """

    axis_name: AxisName | None
    devices: int
    chunks: int
    low: int | None
    high: int | None
    scale: float
    queries: int
    keys: int
    parts: int
    tiles: int
    key_heads: int
    key_dim: int
    dropout_rate: float
    blind: bool

    @property
    def part_length(self) -> int:
        return self.queries // self.parts

    @property
    def tile_length(self) -> int:
        return -(-self.keys // self.tiles)

    def device(self) -> Any:
        """Returns the index of this device."""
        return 0 if self.axis_name is None else lax.axis_index(self.axis_name)

    def chunk(self, device: Any, half: Any) -> Any:
        """Returns the number of a chunk in the whole sequence. For numbers and arrays."""
        return device if self.chunks == 1 else chunk_number(device, half, self.devices)


class Data(NamedTuple):
    """What masks and drops, by arrays that have no derivative. Each may be None.

    Attributes:
        mask: a mask in tiles (:func:`to_tiles`).
        query_documents: the documents of this device's queries, of shape (parts of a device, ..., part length).
        key_documents: the documents of all keys, of shape (devices, tiles of a device, ..., tile length).
        query_lengths: the lengths of sequences of queries, of shape (...).
        key_lengths: the lengths of sequences of keys, of shape (...).
        head_keys: the two words of the keys of heads for dropout, of shape (..., key heads, heads of each, 1, 1).
    """

    mask: Array | None = None
    query_documents: Array | None = None
    key_documents: Array | None = None
    query_lengths: Array | None = None
    key_lengths: Array | None = None
    head_keys: tuple[Array, Array] | None = None


class Place(NamedTuple):
    """A part of this device's queries, and a tile of the keys of a device. For numbers and arrays."""

    device: Any
    part: Any
    source: Any
    tile: Any

    def first_query(self, layout: Layout) -> Any:
        half, part = self.part // layout.parts, self.part % layout.parts
        return layout.chunk(self.device, half) * layout.queries + part * layout.part_length

    def first_key(self, layout: Layout) -> Any:
        half, tile = self.tile // layout.tiles, self.tile % layout.tiles
        return layout.chunk(self.source, half) * layout.keys + tile * layout.tile_length

    def number(self, layout: Layout) -> Any:
        """Returns the number of the tile among all tiles of the sequence, in the order of positions."""
        half, tile = self.tile // layout.tiles, self.tile % layout.tiles
        return layout.chunk(self.source, half) * layout.tiles + tile


def may_see(layout: Layout, place: Place) -> Any:
    """Returns whether a query of the part sees a key of the tile, by their positions. For numbers and arrays."""
    query, key = place.first_query(layout), place.first_key(layout)
    seen = True
    if layout.low is not None:
        seen = query + (layout.part_length - 1) - key >= layout.low
    if layout.high is not None:
        seen = seen & (query - (key + layout.tile_length - 1) <= layout.high)
    if layout.low is not None and layout.high is not None and layout.low > layout.high:
        seen = seen & False
    return seen


def distances(layout: Layout) -> list[int]:
    """Returns the distances d at which some device r needs keys of device r - d, and 0, in ascending order."""
    coarse = layout._replace(parts=1, tiles=1)
    sides = [layout.devices, layout.chunks, layout.devices, layout.chunks]
    device, part, source, tile = np.ogrid[tuple(map(slice, sides))]
    seen = np.broadcast_to(may_see(coarse, Place(device, part, source, tile)), sides).any(axis=(1, 3))
    found = {0, *((r - s) % layout.devices for r, s in zip(*np.nonzero(seen), strict=True))}
    return sorted(map(int, found))


def has_blind_queries(layout: Layout) -> bool:
    """Returns whether some query sees no key, by the positions alone."""
    count = layout.devices * layout.chunks
    query = np.arange(count * layout.queries)
    first = np.maximum(query - layout.high, 0) if layout.high is not None else np.zeros_like(query)
    last = count * layout.keys - 1
    return bool((first > (last if layout.low is None else np.minimum(query - layout.low, last))).any())


def needed(layout: Layout, data: Data, place: Place) -> Array | None:
    """Returns whether the tile is needed for the part, a scalar. None: always."""
    tests = []
    if layout.low is not None or layout.high is not None:
        tests.append(may_see(layout, place))
    if data.query_documents is not None:
        queries, keys = _documents(data, place)
        # Ranges that do not overlap have no number in common.
        apart = (queries.min(axis=-1) > keys.max(axis=-1)) | (keys.min(axis=-1) > queries.max(axis=-1))
        tests.append(jnp.any(~apart))
    if data.query_lengths is not None:
        tests.append(jnp.any(data.query_lengths > place.first_query(layout)))
    if data.key_lengths is not None:
        tests.append(jnp.any(data.key_lengths > place.first_key(layout)))
    if data.mask is not None:
        tests.append(jnp.any(tile_of(layout, data.mask, place)))
    return jnp.all(jnp.stack([jnp.asarray(test) for test in tests])) if tests else None


def mask_of(layout: Layout, data: Data, place: Place) -> Array | None:
    """Returns whether queries see keys, of shape (..., key heads, heads of each, part length, tile length).

    Axes along which the mask is the same have the length 1. None: all queries see all keys.
    """
    queries = place.first_query(layout) + jnp.arange(layout.part_length, dtype=jnp.int32)[:, None]
    keys = place.first_key(layout) + jnp.arange(layout.tile_length, dtype=jnp.int32)[None, :]
    masks = []
    if layout.tiles * layout.tile_length > layout.keys:
        in_chunk = place.tile % layout.tiles * layout.tile_length + jnp.arange(layout.tile_length, dtype=jnp.int32)
        masks.append((in_chunk < layout.keys)[None, :])  # the last tile of a chunk ends with padding
    if layout.low is not None:
        masks.append(queries - keys >= layout.low)
    if layout.high is not None:
        masks.append(queries - keys <= layout.high)
    if data.query_documents is not None:
        of_queries, of_keys = _documents(data, place)
        masks.append((of_queries[..., :, None] == of_keys[..., None, :])[..., None, None, :, :])
    if data.query_lengths is not None:
        masks.append(less(queries, data.query_lengths[..., None, None, None, None]))
    if data.key_lengths is not None:
        masks.append(less(keys, data.key_lengths[..., None, None, None, None]))
    if data.mask is not None:
        masks.append(tile_of(layout, data.mask, place))
    mask = None
    for each in masks:
        mask = each if mask is None else jnp.logical_and(*of_one_ndim(mask, each))
    return mask


def kept_of(layout: Layout, data: Data, place: Place) -> Array | None:
    """Returns which weights dropout keeps, of shape (..., key heads, heads of each, part length, tile length)."""
    if data.head_keys is None:
        return None
    queries = place.first_query(layout) + jnp.arange(layout.part_length, dtype=jnp.int32)[:, None]
    keys = place.first_key(layout) + jnp.arange(layout.tile_length, dtype=jnp.int32)[None, :]
    ones = (1,) * (data.head_keys[0].ndim - 2)
    queries, keys = (x.reshape(*ones, *x.shape) for x in (queries, keys))
    return attention_dropout.kept(data.head_keys, queries, keys, layout.dropout_rate)


def to_tiles(layout: Layout, x: Array) -> Array:
    """Cuts a mask or a bias (..., heads, queries of a device, keys of all devices) into tiles.

    Returns:
        An array of shape (parts, tiles, ..., key heads, heads of each, part length, tile length), of the parts of this
        device and the tiles of all devices in the order of positions. Where ``x`` has the length 1 along an axis, the
        axes made of it have the length 1.
    """
    *batch, heads, queries, keys = x.shape
    each = (1, 1) if heads == 1 else (layout.key_heads, heads // layout.key_heads)
    parts, queries = (1, 1) if queries == 1 else (layout.chunks * layout.parts, layout.part_length)
    if keys > 1:
        count, length = layout.devices * layout.chunks, layout.tile_length
        padding = layout.tiles * length - layout.keys
        chunks = x.reshape(*x.shape[:-1], count, layout.keys)
        x = jnp.pad(chunks, [(0, 0)] * (chunks.ndim - 1) + [(0, padding)])
        tiles, keys = count * layout.tiles, length
    else:
        tiles = 1
    return jnp.moveaxis(x.reshape(*batch, *each, parts, queries, tiles, keys), (-4, -2), (0, 1))


def tile_of(layout: Layout, tiles: Array, place: Place) -> Array:
    """Returns one of the tiles that :func:`to_tiles` has cut."""
    return tiles[index_of(layout, tiles, place)]


def index_of(layout: Layout, tiles: Array, place: Place) -> tuple[Any, Any]:
    """Returns the index of the part's tile in the tiles that :func:`to_tiles` has cut."""
    return place.part if tiles.shape[0] > 1 else 0, place.number(layout) if tiles.shape[1] > 1 else 0


def _documents(data: Data, place: Place) -> tuple[Array, Array]:
    assert data.query_documents is not None
    assert data.key_documents is not None
    return data.query_documents[place.part], data.key_documents[place.source, place.tile]


def less(a: Array, b: Array) -> Array:
    """Returns ``a < b``, with axes of length 1 in front of the array that has fewer."""
    return jnp.less(*of_one_ndim(a, b))


def of_one_ndim(a: Array, b: Array) -> tuple[Array, Array]:
    """Returns the arrays with as many axes."""
    ndim = max(a.ndim, b.ndim)
    return jnp.expand_dims(a, tuple(range(ndim - a.ndim))), jnp.expand_dims(b, tuple(range(ndim - b.ndim)))
