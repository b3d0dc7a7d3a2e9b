"""Attention over a cut sequence, over the axes of jax.vmap and jax.shard_map, against attention over the whole one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pycollective.jax_support.jaxprs import all_equations, inner_jaxprs
from pycollective.parallel import buckets
from pycollective.parallel.sequence import ring_attention
from pycollective.parallel.ulysses import ulysses
from tests.cases import values

Array = Any
Arrays = tuple[Array, Array, Array]
P = jax.sharding.PartitionSpec


def whole_attention(q: Array, k: Array, v: Array, *, causal: bool = False, scale: float | None = None) -> Array:
    """Attention as its formula says, in float32 at least, of whole sequences."""
    wide = np.promote_types(q.dtype, np.float32)
    q, k, v = (jnp.moveaxis(x.astype(wide), -2, 0) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[0] // k.shape[0], axis=0) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = np.arange(q.shape[-2])[:, None] >= np.arange(k.shape[-2])[None]
        scores = jnp.where(np.broadcast_to(seen, scores.shape), scores, -jnp.inf)
    return jnp.moveaxis(jax.nn.softmax(scores) @ v, 0, -2)


class Shape(NamedTuple):
    """Sizes of one example; ``queries`` and ``keys`` are those of one device."""

    devices: int
    queries: int
    keys: int
    heads: int = 2
    key_heads: int = 2
    dim: int = 3
    value_dim: int = 3
    batch: tuple[int, ...] = ()
    dtype: Any = np.float32

    def arrays(self) -> Arrays:
        """Returns whole q, k and v."""
        blocks = [
            (self.queries, self.heads, self.dim),
            (self.keys, self.key_heads, self.dim),
            (self.keys, self.key_heads, self.value_dim),
        ]
        q, k, v = (
            jnp.asarray(values((*self.batch, self.devices * length, *rest), self.dtype, seed))
            for seed, (length, *rest) in enumerate(blocks)
        )
        return q, k, v

    def with_weights(self) -> tuple[Array, Array, Array, Array]:
        """Returns whole q, k and v, and weights of the result."""
        q, k, v = self.arrays()
        return q, k, v, jnp.asarray(values((*q.shape[:-1], v.shape[-1]), self.dtype, seed=9))


def cut(x: Array, devices: int) -> Array:
    """Cuts the positions of a whole array into blocks, stacked along a new axis in front."""
    return jnp.stack(jnp.split(x, devices, axis=-3))


def joined(x: Array) -> Array:
    return jnp.concatenate(list(x), axis=-3)


def over_vmap(fun: Callable[..., Any], devices: int) -> Callable[..., Any]:
    """Makes a function of whole arrays of a function of blocks."""
    mapped = jax.vmap(fun, axis_name="i")
    return lambda *arrays: jax.tree.map(joined, mapped(*(cut(x, devices) for x in arrays)))


def with_gradients(attention: Callable[..., Array]) -> Callable[..., Any]:
    """Returns a function of arrays and weights: the result of the arrays, and the gradients of <result, weights>."""

    def run(*args: Array) -> Any:
        y, back = jax.vjp(attention, *args[:-1])
        return y, back(args[-1])

    return run


def assert_close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        b = np.asarray(b, np.float64)
        assert a.shape == b.shape
        np.testing.assert_allclose(
            np.asarray(a, np.float64), b, tolerance, tolerance * max(1.0, np.abs(b).max(initial=0))
        )


RINGS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "one device": (Shape(1, 5, 5), {}),
    "causal on one device": (Shape(1, 5, 5), {"causal": True}),
    "two devices": (Shape(2, 4, 4, batch=(3,)), {"scale": 0.3}),
    "causal": (Shape(4, 3, 3, batch=(2, 1)), {"causal": True}),
    "more keys": (Shape(3, 2, 5, value_dim=4), {}),
    "causal, more keys": (Shape(3, 2, 5), {"causal": True}),
    "causal, more queries": (Shape(3, 5, 2), {"causal": True, "keys_at_once": 1}),
    "no batch": (Shape(2, 2, 2, batch=(0,)), {"causal": True}),
    "grouped": (Shape(2, 4, 4, heads=6, key_heads=2, value_dim=5), {"causal": True}),
    "one key head": (Shape(4, 2, 2, heads=3, key_heads=1, batch=(2,)), {}),
    "tiles": (Shape(2, 6, 6, heads=4, batch=(2,)), {"causal": True, "keys_at_once": 2}),
    "filled tiles": (Shape(2, 5, 7), {"keys_at_once": 3}),
    "empty tile": (Shape(2, 5, 5, key_heads=1), {"causal": True, "keys_at_once": 2}),
}


@pytest.mark.parametrize("name", RINGS)
def test_a_ring_is_attention_over_the_whole_sequence(name: str) -> None:
    shape, options = RINGS[name]
    whole = {key: value for key, value in options.items() if key != "keys_at_once"}
    ring = with_gradients(functools.partial(ring_attention, axis_name="i", **options))
    got = jax.jit(over_vmap(ring, shape.devices))(*shape.with_weights())
    want = jax.jit(with_gradients(functools.partial(whole_attention, **whole)))(*shape.with_weights())
    assert_close(got, want)


def test_a_ring_is_the_attention_of_jax() -> None:
    """The order of grouped heads, the mask and the scale are those of jax.nn."""
    arrays = Shape(2, 4, 4, heads=4, key_heads=2, batch=(2,)).arrays()
    ring = over_vmap(functools.partial(ring_attention, axis_name="i", causal=True), 2)
    assert_close(ring(*arrays), jax.nn.dot_product_attention(*arrays, is_causal=True))


def test_bfloat16_is_added_up_in_float32() -> None:
    shape = Shape(4, 16, 16, dtype=jnp.bfloat16, heads=4, key_heads=2, dim=8, value_dim=8)
    ring = with_gradients(functools.partial(ring_attention, axis_name="i", causal=True, keys_at_once=8))
    got = jax.jit(over_vmap(ring, 4))(*shape.with_weights())
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
    wide = [x.astype(np.float32) for x in shape.with_weights()]
    want = jax.jit(with_gradients(functools.partial(whole_attention, causal=True)))(*wide)
    assert_close(got, want, 2**-6)
    # Many equal values: a sum in bfloat16 would stop to grow at 256 ones.
    ones = [jnp.ones((2, 512, 1, 1), jnp.bfloat16)] * 3
    y = jax.vmap(lambda q, k, v: ring_attention(q, k, v, "i"), axis_name="i")(*ones)
    np.testing.assert_allclose(y.astype(np.float32), 1.0, rtol=2**-8)


def test_large_scores_do_not_overflow() -> None:
    q, k, v, weights = Shape(2, 4, 4).with_weights()
    ring = with_gradients(functools.partial(ring_attention, axis_name="i", causal=True))
    got = jax.jit(over_vmap(ring, 2))(100 * q, 100 * k, v, weights)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    assert_close(got[0], whole_attention(100 * q, 100 * k, v, causal=True))


def test_blocks_that_no_query_sees_are_not_looked_at() -> None:
    q, k, v, weights = Shape(3, 2, 2).with_weights()
    k, v = (x.at[4:].set(jnp.nan) for x in (k, v))  # of the last device
    ring = with_gradients(functools.partial(ring_attention, axis_name="i", causal=True))
    y, (dq, _, _) = jax.jit(over_vmap(ring, 3))(q, k, v, weights)
    np.testing.assert_array_equal(np.isfinite([y, dq]).all(axis=(0, 2, 3)), np.arange(6) < 4)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_both_meanings_of_derivatives(strategy: str, check_vma: bool) -> None:
    """The loss is a sum over the axis. Keys are the same on all devices; batches are cut along another axis."""
    mesh = jax.make_mesh((2, 2), ("data", "i"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    q, k, v = Shape(2, 3, 3, batch=(4,)).arrays()
    attentions: dict[str, Callable[..., Array]] = {
        "ring": functools.partial(ring_attention, axis_name="i", causal=True),
        "ulysses": ulysses(functools.partial(whole_attention, causal=True), "i"),
    }
    attention = attentions[strategy]

    def gradients(q: Array, k: Array, v: Array, weights: Array) -> Any:
        def loss(q: Array, k: Array, v: Array) -> Array:
            y = jnp.sum(jnp.sin(attention(q, k, v)) * weights)
            return lax.psum(y, ("data", "i")) if check_vma else y

        dq, dk, dv = jax.grad(loss, (0, 1, 2))(q, k, v)
        return dq, dk if check_vma else lax.psum(dk, ("data", "i")), dv

    cut_both = P("data", "i")
    specs = (cut_both, P(None), cut_both, cut_both)
    mapped = jax.shard_map(
        gradients, mesh=mesh, in_specs=specs, out_specs=(cut_both, P(None), cut_both), check_vma=check_vma
    )
    shared = k[:2, :3]
    weights = jnp.asarray(values(q.shape, seed=5))
    got = jax.jit(mapped)(q, shared, v, weights)

    def whole(q: Array, shared: Array, v: Array) -> Array:
        return jnp.sum(jnp.sin(whole_attention(q, jnp.tile(shared, (2, 2, 1, 1)), v, causal=True)) * weights)

    assert_close(got, jax.grad(whole, (0, 1, 2))(q, shared, v))


def test_derivatives_of_higher_order() -> None:
    arrays = Shape(2, 3, 3).arrays()

    def second(attention: Callable[..., Array]) -> Callable[..., Any]:
        gradient = jax.grad(lambda *arrays: jnp.sum(jnp.sin(attention(*arrays))), (0, 1, 2))

        def product(*arrays: Array) -> Array:
            return sum(jnp.vdot(a, b) for a, b in zip(gradient(*arrays), arrays, strict=True))

        return lambda *arrays: (jax.jvp(gradient, arrays, arrays)[1], jax.grad(product, (0, 1, 2))(*arrays))

    ring = functools.partial(ring_attention, axis_name="i", causal=True, keys_at_once=2)
    want = jax.jit(second(functools.partial(whole_attention, causal=True)))(*arrays)
    assert_close(jax.jit(over_vmap(second(ring), 2))(*arrays), want, 1e-4)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(over_vmap(ring, 2), arrays, arrays)


def calls(jaxpr: Any, name: str) -> int:
    """Returns how often a program calls a primitive, each time that a loop does counted."""
    return sum(
        (eqn.primitive.name == name)
        + eqn.params.get("length", 1) * sum(calls(inner, name) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def test_the_number_of_messages() -> None:
    block = [jnp.ones((2, 1, 4))] * 3
    attention = functools.partial(ring_attention, axis_name="i", keys_at_once=1)
    forward = jax.make_jaxpr(attention, axis_env=[("i", 5)])(*block).jaxpr
    assert calls(forward, "ppermute") == 4
    both = jax.make_jaxpr(with_gradients(attention), axis_env=[("i", 5)])(*block, block[0]).jaxpr
    assert calls(both, "ppermute") == 4 + 4 + 5


def order_of(jaxpr: Any) -> list[str]:
    """Returns the names of the primitives in the order of the program."""
    return [eqn.primitive.name for eqn in all_equations(jaxpr)]


def test_a_block_travels_while_it_is_computed() -> None:
    program = jax.make_jaxpr(functools.partial(ring_attention, axis_name="i"), axis_env=[("i", 4)])
    names = order_of(program(*[jnp.ones((2, 1, 4))] * 3).jaxpr)
    assert names.index("ppermute") < names.index("dot_general")


def test_memory_grows_with_the_length_of_a_block_alone() -> None:
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def temporary_bytes(length: int) -> int:
        ring = functools.partial(ring_attention, axis_name="i", keys_at_once=32)
        run = jax.shard_map(with_gradients(ring), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        block = jax.ShapeDtypeStruct((2 * length, 2, 8), np.float32)
        analysis = jax.jit(run).lower(*[block] * 4).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)

    short, long = temporary_bytes(512), temporary_bytes(2048)
    assert long < 4.4 * short
    assert long < 2048 * 2048 * 4  # the scores of one head of a block


@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 3, 3, heads=4, key_heads=4),
        Shape(4, 2, 3, heads=8, key_heads=4, value_dim=5, batch=(2,)),
        Shape(1, 4, 4),
    ],
    ids=["equal", "grouped", "one device"],
)
def test_ulysses_is_attention_over_the_whole_sequence(shape: Shape) -> None:
    attention = functools.partial(whole_attention, causal=True)
    cut_attention = over_vmap(ulysses(attention, "i"), shape.devices)
    arrays, args = shape.arrays(), shape.with_weights()
    assert_close(jax.jit(with_gradients(cut_attention))(*args), jax.jit(with_gradients(attention))(*args))
    both = [jax.jit(lambda x, f=f: jax.jvp(f, x, tuple(2 * a for a in x)))(arrays) for f in (cut_attention, attention)]
    assert_close(*both)


def test_ulysses_over_two_axes_and_with_more_arguments() -> None:
    arrays = Shape(4, 2, 2, heads=4, key_heads=4).arrays()
    mask = jnp.asarray(values((8, 8), bool, seed=7) | np.eye(8, dtype=bool))[None]
    attention = ulysses(jax.nn.dot_product_attention, ("a", "b"))
    blocks = [cut(x, 4).reshape(2, 2, *cut(x, 4).shape[1:]) for x in arrays]
    inner = jax.vmap(functools.partial(attention, mask=mask), axis_name="b")
    y = jax.vmap(inner, axis_name="a")(*blocks)
    assert_close(joined(y.reshape(4, 2, 4, 3)), jax.nn.dot_product_attention(*arrays, mask=mask))


def test_small_arrays_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    block = [jnp.ones((2, 4, 4))] * 3

    def exchanges() -> int:
        program = jax.make_jaxpr(ulysses(whole_attention, "i"), axis_env=[("i", 2)])(*block)
        return calls(program.jaxpr, "all_to_all")

    assert exchanges() == 2
    monkeypatch.setattr(buckets, "_BUCKET_BYTES", 64)
    assert exchanges() == 4


def bad(*shapes: tuple[int, ...], axis_name: Any = "i", **options: Any) -> None:
    block = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    env = [(name, 2) for name in (axis_name if isinstance(axis_name, tuple) else (axis_name,))]
    jax.make_jaxpr(functools.partial(ring_attention, axis_name=axis_name, **options), axis_env=env)(*block)


def test_bad_rings() -> None:
    good = (4, 2, 3)
    for shapes in [
        ((2, 3), (2, 3), (2, 3)),
        (good, good, (5, 2, 3)),
        (good, (4, 2, 5), (4, 2, 5)),
        ((1, *good), (2, *good), (2, *good)),
        (good, (4, 3, 3), (4, 3, 3)),
        (good, (4, 0, 3), (4, 0, 3)),
        (good, (0, 2, 3), (0, 2, 3)),
        ((0, 2, 3), good, good),
        ((4, 2, 0), (4, 2, 0), good),
        (good, good, (4, 2, 0)),
    ]:
        with pytest.raises(ValueError, match=r"parallel.ring_attention: expected q \(..., T/P, heads, dim\), k"):
            bad(*shapes)
    with pytest.raises(ValueError, match="expected an axis with one name, got axis_name=.'a', 'b'."):
        bad(good, good, good, axis_name=("a", "b"))
    with pytest.raises(TypeError, match="expected scale: a Python number, got .*Multiply q by it"):
        bad(good, good, good, scale=jnp.ones(()))
    with pytest.raises(ValueError, match="expected keys_at_once of at least 1, got 0"):
        bad(good, good, good, keys_at_once=0)
    for dtypes in ("float32", "bfloat16", "float32"), ("int32", "int32", "int32"):
        block = [jax.ShapeDtypeStruct(good, dtype) for dtype in dtypes]
        with pytest.raises(ValueError, match=f"q, k and v of one floating-point dtype, got q {dtypes[0]}.4, 2, 3., k"):
            jax.make_jaxpr(functools.partial(ring_attention, axis_name="i"), axis_env=[("i", 2)])(*block)
    with pytest.raises(NameError, match="parallel.ring_attention: expected a call where the axis 'i' is bound"):
        ring_attention(jnp.ones(good), jnp.ones(good), jnp.ones(good), "i")


def test_bad_ulysses() -> None:
    good = jnp.ones((4, 2, 3))
    with pytest.raises(NameError, match="parallel.ulysses: expected a call where the axis 'i' is bound"):
        ulysses(whole_attention, "i")(good, good, good)

    def run(attention: Callable[..., Array], *arrays: Array) -> None:
        jax.make_jaxpr(ulysses(attention, "i"), axis_env=[("i", 2)])(*arrays)

    for arrays, expected in (
        (
            (good[:, :1], good, good),
            r"q \(..., positions, heads, dim\) with a multiple of 2 heads, got .*Cut the sequence by",
        ),
        ((good, jnp.ones((4, 3, 3)), good), r"k \(.*\) with a number of key heads that divides the 2 heads, got"),
        ((good, good, good[:, :0]), r"v \(..., positions, heads, dim\), got shape \(4, 0, 3\)"),
    ):
        with pytest.raises(ValueError, match=f"parallel.ulysses: expected {expected}"):
            run(whole_attention, *arrays)
    with pytest.raises(ValueError, match=r"expected a result of attention of shape \(8, 1\) \+ \(any,\), got shape"):
        run(lambda q, k, v: q[:4], good, good, good)
