"""A mixture of experts over the axes of jax.vmap and jax.shard_map, against all experts on all tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pycollective.parallel.experts import Statistics, experts, route
from pycollective.parallel.tensor import column_parallel, row_parallel
from tests.cases import values

Array = Any
P = jax.sharding.PartitionSpec

TOKENS, EXPERTS, WIDTH, OUT = 24, 8, 3, 2  # of all devices
PARAMS = jnp.asarray(values((EXPERTS, WIDTH, OUT), seed=1)), jnp.asarray(values((EXPERTS, OUT), seed=2))
X = jnp.asarray(values((TOKENS, WIDTH), seed=3))
LOGITS = jnp.asarray(values((TOKENS, EXPERTS), seed=4) + np.linspace(0, 3, EXPERTS, dtype=np.float32)[None])
WEIGHTS = jnp.asarray(values((TOKENS, OUT), seed=5))


def expert(params: tuple[Array, Array], tokens: Array) -> Array:
    """One expert. It does not map zeros to zeros."""
    return jnp.tanh(tokens @ params[0] + jnp.broadcast_to(params[1], (*tokens.shape[:-1], OUT)))


def layer(params: tuple[Array, Array], x: Array, logits: Array, **options: Any) -> tuple[Array, Statistics]:
    """The experts of one device."""
    return experts(lambda tokens: jax.vmap(expert)(params, tokens), x, logits, "i", **options)


def places_by_rule(logits: Array, k: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the experts of each token and their places, by loops."""
    chosen = np.argsort(-np.asarray(logits), axis=1, kind="stable")[:, :k]
    places, filled = np.zeros_like(chosen), np.zeros(logits.shape[1], int)
    for choice in range(k):
        for token, of_token in enumerate(chosen[:, choice]):
            places[token, choice] = filled[of_token]
            filled[of_token] += 1
    return chosen, places


def all_on_all(devices: int, k: int, capacity: int) -> Callable[..., tuple[Array, Array, int]]:
    """Makes a function that applies all experts to all tokens. Choices are dropped by the rule, on each device."""
    ruled = [places_by_rule(part, k, capacity) for part in np.split(np.asarray(LOGITS), devices)]
    chosen, places = (np.concatenate(parts) for parts in zip(*ruled, strict=True))
    kept = places < capacity

    def run(params: tuple[Array, Array], x: Array, logits: Array) -> tuple[Array, Array, int]:
        p = jax.nn.softmax(logits)
        gates = jnp.stack([p[np.arange(TOKENS), chosen[:, j]] for j in range(k)])
        gates = gates / jnp.sum(gates, axis=0, keepdims=True) if k > 1 else gates
        results = jax.vmap(expert, (0, None))(params, x)
        terms = [
            (gates[j] * kept[:, j].astype(np.float32))[:, None] * results[chosen[:, j], np.arange(TOKENS)]
            for j in range(k)
        ]
        shares = np.bincount(chosen[:, 0], minlength=EXPERTS).astype(np.float32) / TOKENS
        return sum(terms), EXPERTS * jnp.sum(shares * p.mean(axis=0)), int((~kept).sum())

    return run


def loss_of(y: Array, balance: Array, weights: Array) -> Array:
    return jnp.sum(jnp.sin(y) * weights) + 3.0 * balance


@pytest.mark.parametrize(
    ("devices", "k", "capacity_factor"),
    [
        (1, 2, math.inf),
        (2, 2, math.inf),
        (4, 3, math.inf),
        (2, 8, 1.0),
        (2, 1, 0.7),
        (4, 2, 0.7),
        (8, 2, 1.25),
        (1, 2, 0.5),
    ],
)
def test_experts_are_all_experts_on_all_tokens(devices: int, k: int, capacity_factor: float) -> None:
    own = TOKENS // devices
    capacity = own if capacity_factor == math.inf else math.ceil(capacity_factor * k * own / EXPERTS)
    whole = all_on_all(devices, k, capacity)

    def cut(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(devices, x.shape[0] // devices, *x.shape[1:]), tree)

    def one_device(params: tuple[Array, Array], x: Array, logits: Array, weights: Array) -> Any:
        def loss(*args: Any) -> Any:
            y, statistics = layer(*args, k=k, capacity_factor=capacity_factor)
            # All devices add the balance loss, and it counts once in the sum of their losses.
            return loss_of(y, statistics.balance_loss / devices, weights), (y, statistics)

        return jax.grad(loss, (0, 1, 2), has_aux=True)(params, x, logits)

    mapped = jax.jit(jax.vmap(one_device, axis_name="i"))
    gradients, (y, statistics) = mapped(*cut((PARAMS, X, LOGITS, WEIGHTS)))

    def loss(*args: Any) -> Any:
        y, balance, dropped = whole(*args)
        return loss_of(y, balance, WEIGHTS), (y, balance, dropped)

    wanted, (want, balance, dropped) = jax.grad(loss, (0, 1, 2), has_aux=True)(PARAMS, X, LOGITS)
    assert (dropped == 0) == (capacity_factor in (math.inf, 1.0))
    assert statistics.dropped.tolist() == [dropped] * devices
    np.testing.assert_allclose(statistics.balance_loss, np.full(devices, balance), rtol=1e-5)
    np.testing.assert_allclose(y.reshape(want.shape), want, rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_both_meanings_of_derivatives(check_vma: bool) -> None:
    """The loss is a sum over the axis; the parameters of the experts are cut along it, those of the router are not."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    router = jnp.asarray(values((WIDTH, EXPERTS), seed=6))

    def gradients(params: tuple[Array, Array], router: Array, x: Array, weights: Array) -> Any:
        def loss(params: tuple[Array, Array], router: Array) -> Array:
            y, statistics = layer(params, x, x @ router, capacity_factor=math.inf)
            if check_vma:
                return lax.psum(loss_of(y, 0.0, weights), "i") + 3.0 * statistics.balance_loss
            return loss_of(y, statistics.balance_loss / 4, weights)

        of_experts, of_router = jax.grad(loss, (0, 1))(params, router)
        return of_experts, of_router if check_vma else lax.psum(of_router, "i")

    specs = (P("i"), P(), P("i"), P("i"))
    run = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=(P("i"), P()), check_vma=check_vma)
    got = jax.jit(run)(PARAMS, router, X, WEIGHTS)

    def whole(params: tuple[Array, Array], router: Array) -> Array:
        p = jax.nn.softmax(X @ router)
        order = jnp.argsort(-p, axis=1, stable=True)
        gates = jnp.where(jnp.argsort(order, axis=1) < 2, p, 0.0)
        results = jax.vmap(expert, (0, None), 1)(params, X)
        y = jnp.einsum("te,teo->to", gates / jnp.sum(gates, axis=1, keepdims=True), results)
        shares = jnp.mean(jax.nn.one_hot(order[:, 0], EXPERTS), axis=0)
        return loss_of(y, EXPERTS * jnp.sum(shares * p.mean(axis=0)), WEIGHTS)

    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.grad(whole, (0, 1))(PARAMS, router)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_with_a_tensor_axis(check_vma: bool) -> None:
    """Each expert's two matrices are cut along an axis of their own. Its devices have the same tokens."""
    mesh = jax.make_mesh((2, 2), ("i", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    up, down = (jnp.asarray(values(shape, seed=n)) for n, shape in enumerate([(EXPERTS, WIDTH, 4), (EXPERTS, 4, OUT)]))

    def of_experts(up: Array, down: Array, x: Array, logits: Array, model: str | None) -> Array:
        def one(up: Array, down: Array, tokens: Array) -> Array:
            if model is None:
                return jnp.tanh(tokens @ up) @ down
            return row_parallel(jnp.tanh(column_parallel(tokens, up, model)), down, model)

        apply = functools.partial(jax.vmap(one), up, down)
        return experts(apply, x, logits, "i", capacity_factor=math.inf)[0]

    def gradients(up: Array, down: Array, x: Array, logits: Array, weights: Array, model: str | None = "model") -> Any:
        def loss(*args: Array) -> Array:
            y = jnp.sum(jnp.sin(of_experts(*args, model)) * weights)
            return lax.psum(y, "i") if check_vma and model else y

        return jax.grad(loss, (0, 1, 2, 3))(up, down, x, logits)

    cut = (P("i", None, "model"), P("i", "model"), P("i"), P("i"))
    run = jax.shard_map(gradients, mesh=mesh, in_specs=(*cut, P("i")), out_specs=cut, check_vma=check_vma)
    got = jax.jit(run)(up, down, X, LOGITS, WEIGHTS)
    arrays = [x[None] for x in (up, down, X, LOGITS, WEIGHTS)]  # one device has all
    want = jax.jit(jax.vmap(functools.partial(gradients, model=None), axis_name="i"))(*arrays)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("k", "capacity"), [(1, 2), (3, 4), (8, 0)])
def test_places_follow_the_rule(k: int, capacity: int) -> None:
    routing = jax.jit(functools.partial(route, k=k, capacity=capacity))(LOGITS)
    chosen, places = places_by_rule(LOGITS, k, capacity)
    np.testing.assert_array_equal(routing.experts, chosen)
    np.testing.assert_array_equal(routing.places, places)
    np.testing.assert_array_equal(routing.kept, places < capacity)
    assert routing.dropped == (places >= capacity).sum()
    np.testing.assert_allclose(
        routing.gates.sum(axis=1), 1.0 if k > 1 else jax.nn.softmax(LOGITS).max(axis=1), rtol=1e-6
    )


def test_the_balance_loss_is_that_of_own_tokens_without_an_axis() -> None:
    parts = LOGITS.reshape(2, TOKENS // 2, EXPERTS)
    own = jax.vmap(functools.partial(route, k=2, capacity=1), axis_name="i")(parts)
    shared = jax.vmap(functools.partial(route, k=2, capacity=1, axis_name="i"), axis_name="i")(parts)
    p = np.asarray(jax.nn.softmax(parts))
    shares = np.stack([np.bincount(x.argmax(axis=1), minlength=EXPERTS) / (TOKENS // 2) for x in p])
    np.testing.assert_allclose(own.balance_loss, EXPERTS * (shares * p.mean(axis=1)).sum(axis=1), rtol=1e-5)
    together = EXPERTS * (shares.mean(axis=0) * p.mean(axis=(0, 1))).sum()
    np.testing.assert_allclose(shared.balance_loss, [together] * 2, rtol=1e-5)
    assert shared.dropped.tolist() == [own.dropped.sum()] * 2
    even = route(jnp.tile(10 * jnp.eye(4), (5, 1)), k=1, capacity=5)
    np.testing.assert_allclose(even.balance_loss, 1.0, rtol=1e-6)


def test_shapes_and_dtypes() -> None:
    """Tokens have more axes, results have other ones, and the computation has half the precision."""
    x, logits = (a.reshape(2, 3, 4, -1).astype(jnp.bfloat16) for a in (X, LOGITS))

    def apply(tokens: Array) -> Array:
        assert tokens.shape == (EXPERTS // 2, 2 * 12, WIDTH)
        return jnp.stack([tokens, -tokens], axis=-1)

    y, statistics = jax.vmap(lambda x, logits: experts(apply, x, logits, "i", capacity_factor=100.0), axis_name="i")(
        x, logits
    )
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(np.float32), jnp.stack([x, -x], axis=-1).astype(np.float32), rtol=2**-6)
    assert statistics.balance_loss.dtype == jnp.float32
    assert not statistics.dropped.any()


def test_results_keep_their_precision() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(values((2, 4, 3), np.float64))
        run = jax.vmap(
            lambda x, logits: experts(lambda t: t, x, logits, "i", k=1, capacity_factor=4.0)[0], axis_name="i"
        )
        y = run(x, jnp.full((2, 4, 2), 1000.0, jnp.float32).at[..., 0].set(0))
        np.testing.assert_array_equal(y, x)  # gates are 1


def test_an_expert_gets_its_tokens_and_zeros() -> None:
    def totals(tokens: Array) -> Array:
        return jnp.broadcast_to(jnp.sum(tokens, axis=1, keepdims=True), tokens.shape)

    def run(x: Array, logits: Array) -> Array:
        return experts(totals, x, 100 * logits, "i", k=1, capacity_factor=math.inf)[0]  # gates are 1

    y = jax.jit(jax.vmap(run, axis_name="i"))(X.reshape(2, -1, WIDTH), LOGITS.reshape(2, -1, EXPERTS))
    chosen = np.asarray(LOGITS).argmax(axis=1)
    want = np.stack([np.asarray(X)[chosen == e].sum(axis=0) for e in chosen])
    np.testing.assert_allclose(y.reshape(want.shape), want, rtol=1e-4, atol=1e-4)


def test_a_layer_is_two_exchanges_without_large_tables() -> None:
    program = jax.make_jaxpr(lambda x, logits: experts(jnp.sin, x, logits, "i"), axis_env=[("i", 4)])
    closed = program(jnp.ones((64, 5)), jnp.ones((64, 8)))
    names = [eqn.primitive.name for eqn in closed.jaxpr.eqns]
    assert names.count("all_to_all") == 2
    largest = max(math.prod(var.aval.shape) for eqn in closed.jaxpr.eqns for var in eqn.outvars)
    assert largest <= 2 * 64 * 8  # k tokens experts; a table of tokens, experts and places has 20 times as many


def test_an_axis_of_two_names() -> None:
    def one_device(x: Array, logits: Array) -> Array:
        return experts(lambda tokens: tokens, x, logits, ("a", "b"), capacity_factor=math.inf)[0]

    x = X.reshape(2, 2, 6, WIDTH)
    run = jax.jit(jax.vmap(jax.vmap(one_device, axis_name="b"), axis_name="a"))
    np.testing.assert_allclose(run(x, LOGITS.reshape(2, 2, 6, EXPERTS)), x, rtol=1e-5)


def test_bad_calls() -> None:
    def run(
        x: Any = (6, 3), logits: Any = (6, 4), dtype: Any = np.float32, apply: Any = jnp.sin, **options: Any
    ) -> None:
        call = functools.partial(experts, apply, axis_name="i", **options)
        jax.make_jaxpr(call, axis_env=[("i", 2)])(jnp.ones(x), jnp.ones(logits, dtype))

    with pytest.raises(ValueError, match="parallel.experts: expected a multiple of 2 experts.*got logits of 5. Each"):
        run(logits=(6, 5))
    for options in ({"k": 5}, {"k": 0}, {"dtype": np.int32}, {"logits": ()}, {"logits": (0, 4)}):
        with pytest.raises(
            ValueError, match=r"parallel.experts: expected floating-point logits .* and k from 1 to exp"
        ):
            run(**options)
    for shape in ((5, 3), (2, 3, 3), ()):
        with pytest.raises(
            ValueError, match=r"parallel.experts: expected x \(..., width\) and logits \(..., experts\), got"
        ):
            run(x=shape)
    for factor in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="parallel.experts: expected a positive capacity_factor, got"):
            run(capacity_factor=factor)
    with pytest.raises(ValueError, match=r"expected a result of apply of shape \(2, 8\) \+ any, got shape \(8, 2"):
        run(apply=lambda tokens: jnp.swapaxes(tokens, 0, 1))
    with pytest.raises(NameError, match="parallel.experts: expected a call where the axis 'i' is bound"):
        experts(jnp.sin, X, LOGITS, "i")
    with pytest.raises(NameError, match="parallel.route: expected a call where the axis 'i' is bound"):
        route(LOGITS, k=1, capacity=1, axis_name="i")
    with pytest.raises(
        ValueError, match="parallel.route: expected floating-point logits .* got float32.24, 8. and k=9"
    ):
        route(LOGITS, k=9, capacity=1)
    for logits, capacity in ((LOGITS, -1), (LOGITS[None], 1)):
        with pytest.raises(
            ValueError, match=r"parallel.route: expected logits \(tokens, experts\) and a capacity from 0"
        ):
            route(logits, k=1, capacity=capacity)
