"""Masks, windows, documents, bias and dropout of blockwise attention, against plain attention over whole sequences."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pycollective.jax_support.jaxprs import inner_jaxprs
from pycollective.parallel import sequence
from pycollective.parallel.sequence import blockwise_attention, ring_attention
from pycollective.parallel.ulysses import ulysses
from pycollective.parallel.zigzag import unzigzag, zigzag, zigzag_positions
from tests.cases import values

Array = Any
P = jax.P

LOWEST = float(np.finfo(np.float32).min)


def plain_attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    *,
    causal: bool = False,
    mask: Array | None = None,
    segment_ids: Any = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: Any = None,
    factors: Array | None = None,
) -> Array:
    """Attention as its formula says, with a table of all scores, of arrays (batch, positions, heads, dim)."""
    wide = np.promote_types(q.dtype, np.float32)
    q, k, v = (jnp.moveaxis(x.astype(wide), -2, -3) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[-3] // k.shape[-3], axis=-3) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + jnp.broadcast_to(bias.astype(wide), scores.shape)
    i, j = np.arange(scores.shape[-2])[:, None], np.arange(scores.shape[-1])[None]
    seen = np.ones(scores.shape, bool)
    if causal:
        seen &= i >= j
    if local_window_size is not None:
        left, right = local_window_size
        seen &= (i - j <= left) & (j - i <= right)
    if mask is not None:
        seen &= np.asarray(mask)
    if segment_ids is not None:
        of_queries, of_keys = segment_ids
        seen &= (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
    if query_seq_lengths is not None:
        seen &= i < query_seq_lengths[:, None, None, None]
    if key_value_seq_lengths is not None:
        seen &= j < key_value_seq_lengths[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -0.7 * float(jnp.finfo(wide).max)))
    if factors is not None:
        weights = weights * jnp.where(seen.any(axis=-1, keepdims=True), factors, 1).astype(wide)
    y = jnp.moveaxis(weights @ v, -3, -2)
    if query_seq_lengths is not None:
        y = y * (i < query_seq_lengths[:, None, None])[..., None].astype(wide)
    return y


class Case(NamedTuple):
    """An example; ``queries`` and ``keys`` are those of one device."""

    devices: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    options: dict[str, Any]
    ring: dict[str, Any]
    bias: tuple[int, ...] | None = None
    batch: int = 2
    dtype: Any = np.float32

    def arrays(self) -> list[Array]:
        """Returns whole q, k and v, weights of the result, and the bias if there is one."""
        t, s = self.devices * self.queries, self.devices * self.keys
        shapes = [(t, self.heads, 3), (s, self.key_heads, 3), (s, self.key_heads, 2), (t, self.heads, 2)]
        found = [jnp.asarray(values((self.batch, *shape), self.dtype, n)) for n, shape in enumerate(shapes)]
        return found + ([] if self.bias is None else [jnp.asarray(values(self.bias, self.dtype, 7))])


def random_bools(*shape: int) -> np.ndarray:
    return np.asarray(values(shape, np.float32, 11)) > 0


def documents(length: int, *starts: tuple[int, ...]) -> np.ndarray:
    """Returns the numbers of documents, one row for each tuple of their first positions."""
    return np.stack([np.searchsorted(each, np.arange(length), side="right") for each in starts]).astype(np.int32)


ids = documents(16, (3, 4, 9), (8, 15))
CASES: dict[str, Case] = {
    "zigzag": Case(4, 4, 4, 4, 2, {"causal": True}, {"zigzag": True, "keys_at_once": 1, "queries_at_once": 1}),
    "zigzag, more keys, one key head": Case(2, 2, 6, 3, 1, {"causal": True}, {"zigzag": True, "keys_at_once": 2}),
    "window": Case(4, 4, 4, 2, 1, {"local_window_size": (3, 1)}, {"queries_at_once": 2, "keys_at_once": 3}),
    "window, in zigzag": Case(4, 4, 4, 2, 2, {"causal": True, "local_window_size": (2, 9)}, {"zigzag": True}, (16, 16)),
    "window without the query and beyond the keys": Case(
        3, 5, 3, 2, 2, {"local_window_size": (3, -2)}, {"keys_at_once": 2}
    ),
    "documents, bias": Case(
        2, 8, 8, 4, 2, {"causal": True, "segment_ids": (ids, ids)}, {"zigzag": True, "keys_at_once": 3}, (4, 16, 16)
    ),
    "documents that some lack": Case(
        2,
        3,
        8,
        2,
        1,
        {"segment_ids": (documents(6, (1, 5), (2, 3)) + 2, ids)},
        {"keys_at_once": 3, "queries_at_once": 1},
        (2, 1, 1, 16),
    ),
    "lengths": Case(
        2,
        4,
        5,
        4,
        2,
        {"query_seq_lengths": np.array([8, 3, 5], np.int32), "key_value_seq_lengths": np.array([4, 7, 0], np.int32)},
        {"keys_at_once": 2},
        (1, 8, 1),
        batch=3,
    ),
    "mask, float64": Case(
        2,
        4,
        3,
        4,
        2,
        {"mask": random_bools(2, 4, 8, 6) & (np.arange(8) % 3 > 0)[:, None]},
        {"keys_at_once": 2, "queries_at_once": 2},
        (4, 8, 6),
        dtype=np.float64,
    ),
}


def over_devices(case: Case, attention: Callable[..., Array], *, in_zigzag: bool) -> Callable[..., Any]:
    """Makes a function of whole arrays of ``attention`` of a device's arrays: the result and gradients."""

    def cut(x: Array, axis: int) -> Array:
        x = jnp.asarray(x)
        return jnp.stack(jnp.split(zigzag(x, case.devices, axis) if in_zigzag else x, case.devices, axis))

    def joined(x: Array, axis: int) -> Array:
        x = jnp.concatenate(list(x), axis)
        return unzigzag(x, case.devices, axis) if in_zigzag else x

    cuts = {"mask": -2, "query_seq_lengths": None, "key_value_seq_lengths": None}
    options = dict(case.options)
    parts: dict[str, Any] = {}
    for name, x in case.options.items():
        if name == "segment_ids":
            parts[name] = tuple(cut(each, -1) for each in options.pop(name))
        elif name in cuts:
            axis = cuts[name] if name == "mask" and np.shape(x)[-2] > 1 else None
            x = jnp.asarray(options.pop(name))
            parts[name] = jnp.stack([x] * case.devices) if axis is None else cut(x, axis)

    def of_device(parts: dict[str, Any], q: Array, k: Array, v: Array, weights: Array, *bias: Array) -> Any:
        def run(q: Array, k: Array, v: Array, *bias: Array) -> Array:
            return attention(q, k, v, bias=bias[0] if bias else None, **options, **parts)

        y, back = jax.vjp(run, q, k, v, *bias)
        return y, back(weights.astype(y.dtype))

    def run(*arrays: Array) -> Any:
        *four, bias = arrays if case.bias else (*arrays, None)
        blocks = [cut(x, -3) for x in four]
        alike = bias is not None and (bias.ndim < 2 or bias.shape[-2] == 1)
        if bias is not None:
            blocks.append(jnp.stack([bias] * case.devices) if alike else cut(bias, -2))
        y, (dq, dk, dv, *dbias) = jax.vmap(of_device, axis_name="i")(parts, *blocks)
        bias_gradients = [x.sum(axis=0) if alike else joined(x, -2) for x in dbias]
        return joined(y, -3), joined(dq, -3), joined(dk, -3), joined(dv, -3), *bias_gradients

    return run


def of_plain(case: Case, **more: Any) -> Callable[..., Any]:
    def run(*arrays: Array) -> Any:
        q, k, v, weights, *bias = arrays
        y, back = jax.vjp(functools.partial(plain_attention, **case.options, **more), q, k, v, *bias)
        return y, *back(weights.astype(y.dtype))

    return run


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, tolerance, tolerance * max(1.0, float(np.abs(b).max(initial=0))))


@pytest.mark.parametrize("name", CASES)
def test_a_ring_is_plain_attention(name: str) -> None:
    case = CASES[name]
    with jax.enable_x64(case.dtype == np.float64):
        arrays = case.arrays()
        ring = functools.partial(ring_attention, axis_name="i", **case.ring)
        run = over_devices(case, ring, in_zigzag=case.ring.get("zigzag", False))
        got, want = jax.jit(run)(*arrays), jax.jit(of_plain(case))(*arrays)
        assert_close(got, want, 1e-12 if case.dtype == np.float64 else 2e-5)
        assert got[0].dtype == case.dtype


def test_options_mean_what_they_mean_in_jax() -> None:
    """Queries without any key included: they get the mean of all values."""
    q, k, v = (jnp.asarray(values((3, 8, heads, 3), seed=n)) for n, heads in enumerate((4, 2, 2)))
    options = {
        "bias": jnp.asarray(values((4, 8, 8), seed=7)),
        "mask": jnp.asarray(random_bools(3, 1, 8, 8) & (np.arange(8) != 6)[:, None]),
        "query_seq_lengths": jnp.array([8, 3, 5]),
        "key_value_seq_lengths": jnp.array([4, 7, 0]),
        "local_window_size": 3,
    }
    for causal in (False, True):
        want = jax.nn.dot_product_attention(q, k, v, **options, is_causal=causal)
        got = jax.jit(functools.partial(blockwise_attention, causal=causal, keys_at_once=3, **options))(q, k, v)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert np.abs(want[2, 0]).max() > 0.01  # no key is in the third sequence


def test_a_bias_that_masks() -> None:
    """Infinite and lowest numbers as a bias give what JAX gives: zero weights, equal ones, or NaN."""
    q, k, v = (jnp.asarray(values((1, 4, 1, 2), seed=n)) for n in range(3))
    bias = jnp.zeros((1, 4, 4)).at[0, 0, :2].set(-jnp.inf).at[0, 1].set(-jnp.inf).at[0, 2].set(LOWEST)
    for options in ({}, {"key_value_seq_lengths": jnp.array([3])}):
        want = jax.nn.dot_product_attention(q, k, v, bias=bias, **options)
        got = blockwise_attention(q, k, v, bias=bias, keys_at_once=1, **options)
        rows = [0, 3] if options else slice(None)  # in JAX masked keys have a larger score than these
        np.testing.assert_allclose(got[:, rows], want[:, rows], rtol=1e-5)
    assert np.isnan(got[0, 1]).all()


DROPPED = Case(4, 4, 4, 4, 2, {"causal": True}, {"dropout_rate": 0.4, "dropout_key": jax.random.key(3)}, (4, 16, 16))


def factors_by_definition(case: Case) -> np.ndarray:
    """Returns the factors of dropout of a case, from the random bits of each weight."""
    threefry, t = jax.extend.random.threefry_2x32, case.devices * case.queries
    key = jax.random.bits(case.ring["dropout_key"], (2,), jnp.uint32)
    of_rows = jax.vmap(lambda pair, n: threefry(pair, n), (None, 0))
    places = jnp.stack(jnp.meshgrid(*[jnp.arange(t, dtype=jnp.uint32)] * 2, indexing="ij"), axis=-1).reshape(-1, 2)
    numbers = jnp.stack(
        jnp.meshgrid(*(jnp.arange(n, dtype=jnp.uint32) for n in (case.batch, case.heads)), indexing="ij")
    )
    heads = of_rows(key, numbers.reshape(2, -1).T)
    bits = jax.vmap(of_rows, (0, None))(heads, places)[..., 0].reshape(case.batch, case.heads, t, t)
    kept = np.asarray(bits) >= case.ring["dropout_rate"] * 2**32
    return kept / (1 - case.ring["dropout_rate"])


@pytest.mark.parametrize(("devices", "in_zigzag"), [(2, True), (4, False)])
def test_dropout_is_the_same_on_any_number_of_devices(devices: int, in_zigzag: bool) -> None:
    case = DROPPED._replace(devices=devices, queries=16 // devices, keys=16 // devices)
    factors = factors_by_definition(DROPPED).astype(np.float32)
    assert abs((factors == 0).mean() - 0.4) < 0.03
    assert len({x.tobytes() for x in factors.reshape(-1, 16, 16)}) == case.batch * case.heads
    ring = functools.partial(ring_attention, axis_name="i", zigzag=in_zigzag, keys_at_once=3, **case.ring)
    got = jax.jit(over_devices(case, ring, in_zigzag=in_zigzag))(*case.arrays())
    assert_close(got, jax.jit(of_plain(case, factors=jnp.asarray(factors)))(*case.arrays()), 2e-5)


def test_dropout_in_ulysses_has_the_numbers_of_all_heads() -> None:
    case = DROPPED._replace(options={}, bias=None, key_heads=1)
    factors = jnp.asarray(factors_by_definition(DROPPED), jnp.float32)

    def attention(q: Array, k: Array, v: Array, bias: None) -> Array:
        first = lax.axis_index("i") * q.shape[-2]
        return blockwise_attention(q, k, v, bias=bias, first_head=first, **case.ring)

    got = jax.jit(over_devices(case, ulysses(attention, "i"), in_zigzag=False))(*case.arrays())
    assert_close(got, jax.jit(of_plain(case, factors=factors))(*case.arrays()), 2e-5)


@pytest.mark.parametrize(("devices", "heads", "key_heads"), [(4, 8, 2), (4, 12, 6), (2, 6, 3), (4, 4, 1)])
def test_ulysses_with_fewer_key_heads_than_devices(devices: int, heads: int, key_heads: int) -> None:
    case = Case(devices, 2, 3, heads, key_heads, {}, {})
    seen = []

    def attention(q: Array, k: Array, v: Array, bias: None) -> Array:
        seen.append((q.shape[-2], k.shape[-2]))
        return plain_attention(q, k, v, bias, causal=True)

    got = jax.jit(over_devices(case, ulysses(attention, "i"), in_zigzag=False))(*case.arrays())
    assert_close(got, jax.jit(of_plain(case._replace(options={"causal": True})))(*case.arrays()), 2e-5)
    assert seen[0] == (heads // devices, max(1, int(np.lcm(devices, key_heads)) // devices))


def computed(case: Case, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[int]:
    """Returns how many pairs of a part and a tile each device computes, forward and backward."""
    counts: collections.Counter[int] = collections.Counter()
    scores = sequence._scores

    def counted(*args: Any) -> Array:
        jax.debug.callback(lambda device: counts.update([int(device)]), lax.axis_index("i"))
        return scores(*args)

    monkeypatch.setattr(sequence, "_scores", counted)
    mesh = jax.make_mesh((case.devices,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def gradient(ids: Array, q: Array, k: Array, v: Array) -> Array:
        documents = {"segment_ids": ids} if options.get("segment_ids") is not None else {}
        return jax.grad(lambda q: jnp.sum(ring_attention(q, k, v, "i", **{**options, **documents})))(q)

    blocks = P(None, "i")
    run = jax.shard_map(gradient, mesh=mesh, in_specs=(blocks,) * 4, out_specs=blocks)
    q, k, v, _ = case.arrays()
    ids = options.get("segment_ids")
    jax.block_until_ready(jax.jit(run)(np.zeros(q.shape[:2], np.int32) if ids is None else ids, q, k, v))
    jax.effects_barrier()
    return [counts[device] for device in range(case.devices)]


def test_zigzag_gives_each_device_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2P chunks, each device's queries see 2P + 1. In blocks device r computes r + 1 of P."""
    case = Case(4, 4, 4, 1, 1, {}, {}, batch=1)
    assert computed(case, monkeypatch, causal=True, zigzag=True) == [2 * 9] * 4


def test_what_is_outside_of_masks_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(4, 4, 4, 1, 1, {}, {}, batch=1)
    assert computed(case, monkeypatch, causal=True) == [2, 4, 6, 8]
    # Queries 4r and 4r + 1 see keys from 4r - 1 on, and queries 4r + 2 and 4r + 3 those from 4r + 1 on.
    window = {"local_window_size": (1, 0), "keys_at_once": 2, "queries_at_once": 2}
    assert computed(case, monkeypatch, **window) == [2 * 3, 2 * 4, 2 * 4, 2 * 4]
    # A document of one block, one of two, and one of one block.
    ids = documents(16, (4, 12))
    assert computed(case, monkeypatch, segment_ids=ids) == [2, 4, 4, 2]


def messages(jaxpr: Any) -> int:
    return sum(
        (eqn.primitive.name == "ppermute")
        + eqn.params.get("length", 1) * sum(messages(inner) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


@pytest.mark.parametrize(
    ("window", "options", "distances"),
    [
        ((4, 0), {}, [0, 1]),
        ((5, 0), {}, [0, 1, 2]),
        ((4, 4), {}, [0, 1, 7]),
        ((0, 8), {}, [0, 6, 7]),
        ((0, 8), {"causal": True}, [0]),
        ((2, 0), {"zigzag": True}, [0, 1, 7]),
        ((31, 0), {}, list(range(8))),
        ((-9, 12), {}, [0, 5, 6]),
    ],
)
def test_a_window_needs_few_messages(window: tuple[int, int], options: dict[str, Any], distances: list[int]) -> None:
    """Of 8 devices with 4 positions each. Only distances at which a query sees a key are in the ring."""
    ring = functools.partial(ring_attention, axis_name="i", local_window_size=window, **options)

    def run(*blocks: Array) -> Any:
        return jax.value_and_grad(lambda *blocks: jnp.sum(ring(*blocks)), (0, 1, 2))(*blocks)

    sent = messages(jax.make_jaxpr(run, axis_env=[("i", 8)])(*[jnp.ones((4, 1, 2))] * 3).jaxpr)
    steps = len(distances) - 1
    assert sent == steps + steps + (steps + (distances[-1] > 0))


def test_types() -> None:
    """With all options at once; the bias is the same on all devices, and the batch is cut along another axis."""
    mesh = jax.make_mesh((2, 2), ("data", "i"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    case = Case(2, 4, 4, 4, 2, {}, {})
    q, k, v, weights = case.arrays()
    ids, lengths = documents(8, (3,), (2, 6)), np.array([7, 5], np.int32)
    bias = jnp.asarray(values((4, 1, 8), seed=7))

    def gradients(bias: Array, ids: Array, lengths: Array, q: Array, k: Array, v: Array, weights: Array) -> Any:
        def loss(bias: Array, q: Array) -> Array:
            y = ring_attention(
                *(q, k, v, "i"),
                bias=bias,
                segment_ids=ids,
                key_value_seq_lengths=lengths,
                query_seq_lengths=lengths,
                local_window_size=(4, 1),
                dropout_rate=0.3,
                dropout_key=jax.random.key(1),
            )
            return lax.psum(jnp.sum(jnp.sin(y) * weights), ("data", "i"))

        return jax.grad(loss, (0, 1))(bias, q)

    both = P("data", "i")
    specs = (P(), both, P("data"), both, both, both, both)
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=(P(), both))
    got = jax.jit(mapped)(bias, ids, lengths, q, k, v, weights)

    def whole(bias: Array, q: Array) -> Array:
        y = [  # each device along "data" has its own first element of the batch
            blockwise_attention(
                *(x[place : place + 1] for x in (q, k, v)),
                bias=bias,
                segment_ids=ids[place : place + 1],
                key_value_seq_lengths=lengths[place : place + 1],
                query_seq_lengths=lengths[place : place + 1],
                local_window_size=(4, 1),
                dropout_rate=0.3,
                dropout_key=jax.random.key(1),
            )
            for place in range(2)
        ]
        return jnp.sum(jnp.sin(jnp.concatenate(y)) * weights)

    assert_close(got, jax.jit(jax.grad(whole, (0, 1)))(bias, q), 2e-5)


def test_second_derivatives_with_masks() -> None:
    case = Case(2, 3, 3, 2, 1, {"local_window_size": (1, 1), "segment_ids": (documents(6, (2,), (4,)) % 2,) * 2}, {})
    q, k, v, weights = case.arrays()
    bias = jnp.asarray(values((2, 6, 6), seed=7))
    case.options["mask"] = jnp.asarray(random_bools(6, 6) & (np.arange(6) > 0)[:, None])  # the first query sees no key

    def second(attention: Callable[..., Array]) -> Callable[..., Array]:
        def gradient(*arrays: Array) -> Any:
            return jax.grad(lambda *arrays: jnp.sum(jnp.sin(attention(*arrays)) * weights), (0, 1, 2, 3))(*arrays)

        return jax.jit(lambda *arrays: jax.jvp(gradient, arrays, arrays)[1])

    ids = case.options.pop("segment_ids")
    blocks = functools.partial(blockwise_attention, keys_at_once=2, segment_ids=ids, **case.options)
    plain = functools.partial(plain_attention, segment_ids=ids, **case.options)
    got = second(lambda q, k, v, bias: blocks(q, k, v, bias=bias))(q, k, v, bias)
    assert_close(got, second(plain)(q, k, v, bias), 1e-4)


def test_zigzag_cuts_and_joins() -> None:
    x = jnp.arange(24).reshape(2, 12)
    for devices in (1, 2, 3):
        cut = zigzag(x, devices, 1)
        np.testing.assert_array_equal(unzigzag(cut, devices, -1), x)
        positions = jax.vmap(lambda _: zigzag_positions(12 // devices, "i"), axis_name="i")(jnp.zeros(devices))
        np.testing.assert_array_equal(cut[0], positions.ravel())
    with pytest.raises(ValueError, match=r"parallel.zigzag: expected a sequence of a multiple of 2 \* devices"):
        zigzag(x, 5, 1)
    with pytest.raises(ValueError, match=r"parallel.unzigzag: expected .*, got shape \(2, 12\) and 0 devices"):
        unzigzag(x, 0)
    with pytest.raises(ValueError, match="parallel.zigzag_positions: expected an even length, from 0, got 3"):
        jax.vmap(lambda _: zigzag_positions(3, "i"), axis_name="i")(jnp.zeros(2))


def test_bad_options() -> None:
    def run(queries: int = 4, **options: Any) -> None:
        block = [jnp.ones((2, queries, 2, 3))] + [jnp.ones((2, 4, 2, 3))] * 2
        jax.make_jaxpr(functools.partial(ring_attention, axis_name="i", **options), axis_env=[("i", 2)])(*block)

    fits: list[tuple[dict[str, Any], str]] = [
        ({"bias": jnp.ones((3, 4, 8))}, r"bias of floating and of shape \[2, 2, 4, 8\], or .*, got float32\[3, 4, 8\]"),
        ({"bias": jnp.ones((1, 2, 2, 4, 8))}, "bias of floating"),
        ({"bias": jnp.ones((2, 4, 8), int)}, "bias of floating"),
        ({"mask": jnp.ones((2, 4, 4), bool)}, r"mask of bool"),
        ({"mask": jnp.ones((2, 4, 8))}, r"mask of bool"),
        ({"segment_ids": jnp.ones((2, 1), int)}, r"segment_ids of queries of integer and of shape \[2, 4\]"),
        ({"segment_ids": (jnp.ones((2, 4), int), jnp.ones((2, 3), int))}, "segment_ids of keys of integer"),
        ({"segment_ids": (jnp.ones((2, 4), int), None)}, "segment_ids of queries and of keys, got None for one"),
        ({"query_seq_lengths": jnp.ones((1,), int)}, r"query_seq_lengths of integer and of shape \[2\]"),
        ({"key_value_seq_lengths": jnp.ones((2,))}, "key_value_seq_lengths of integer"),
        ({"dropout_rate": 1.0, "dropout_key": jax.random.key(0)}, "a dropout_rate from 0 to less than 1"),
        (
            {"dropout_rate": 0.5},
            "a dropout_rate .*, with a dropout_key unless it is 0, got dropout_rate=0.5 and",
        ),
        ({"queries_at_once": 3}, "queries_at_once that divides 4, the queries of a chunk, got 3"),
        ({"queries_at_once": 0}, "queries_at_once that divides 4, the queries of a chunk, got 0"),
        ({"queries": 3, "zigzag": True}, "zigzag order: an even number of queries and of keys, got 3 queries"),
    ]
    for options, text in fits:
        with pytest.raises(ValueError, match=f"parallel.ring_attention: expected {text}"):
            run(**options)
    types: list[tuple[dict[str, Any], str]] = [
        ({"dropout_rate": jnp.ones(())}, "dropout_rate: a Python number"),
        ({"local_window_size": 1.5}, r"local_window_size: an integer, or \(left, right\), got 1.5"),
        ({"local_window_size": (1, 2, 3)}, r"local_window_size: an integer"),
    ]
    for options, text in types:
        with pytest.raises(TypeError, match=f"parallel.ring_attention: expected {text}"):
            run(**options)
