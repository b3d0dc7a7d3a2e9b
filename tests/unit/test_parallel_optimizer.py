"""ZeRO over the axis of jax.vmap, against the inner optimizer on averaged gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from pycollective.parallel import buckets, clip_by_global_norm, shard_state, unshard_state, zero
from tests.cases import values

pytestmark = pytest.mark.usefixtures("promotion_of_optax")

Array = Any
Tree = Any
P = jax.sharding.PartitionSpec

# 5 and 3 are no multiples of the numbers of devices, and a scalar has fewer elements than there are devices.
PARAMS = {
    "w": values((5, 3), seed=1),
    "b": [values((3,), seed=2), np.float32(2.0)],
    "half": values((4, 2), "bfloat16", seed=3),
    "none": np.zeros((0, 2), np.float32),
}


def loss(params: Tree, x: Array) -> Array:
    y = jnp.tanh(x @ params["w"] + params["b"][0][None])
    return jnp.mean(y**2) * params["b"][1] + jnp.sum(jnp.sin(params["half"].astype(jnp.float32))) * x[0, 0]


def train(optimizer: Any, params: Tree, x: Array, *, average: bool, steps: int = 4) -> tuple[Tree, Any]:
    """Returns the parameters and the state after some steps, on one of the devices along "i"."""
    state = optimizer.init(params)
    for _ in range(steps):
        grads = jax.grad(loss)(params, x)
        updates, state = optimizer.update(lax.pmean(grads, "i") if average else grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def on_devices(fun: Callable[..., Any], devices: int, *args: Tree) -> Any:
    """Runs ``fun(*args, x)`` on so many devices, each with its own ``x``."""
    xs = jnp.asarray(values((devices, 7, 5), seed=4))
    return jax.jit(jax.vmap(fun, (None,) * len(args) + (0,), axis_name="i"))(*args, xs)


INNER: dict[str, tuple[Any, Any]] = {
    name: (inner, inner)
    for name, inner in {
        "sgd": optax.sgd(0.1, momentum=0.9),
        "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
        "lion": optax.lion(1e-3),
        "decay of some": optax.adamw(
            1e-2, weight_decay=0.1, mask={"w": True, "b": False, "half": False, "none": False}
        ),
        "clip of elements": optax.chain(optax.clip(0.1), optax.adam(1e-2)),
    }.items()
}
INNER["clip of the norm"] = (
    optax.chain(clip_by_global_norm(0.05, "i"), optax.adamw(1e-2)),
    optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2)),
)


@pytest.mark.parametrize(
    ("name", "stage", "devices"),
    [*((name, 2, 4) for name in INNER), ("adamw", 1, 4), ("adamw", 2, 1), ("clip of the norm", 1, 2)],
)
def test_zero_is_the_inner_optimizer(name: str, stage: int, devices: int) -> None:
    sliced, whole = INNER[name]
    got, _ = on_devices(lambda p, x: train(zero(sliced, "i", stage=stage), p, x, average=False), devices, PARAMS)
    want, _ = on_devices(lambda p, x: train(whole, p, x, average=True), devices, PARAMS)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        tolerance = 1e-5 if a.dtype == np.float32 else 2**-7  # of bfloat16, sums in another order
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), tolerance, tolerance, err_msg=str(path))
        assert (a == a[:1]).all()  # the same on all devices


def test_each_device_has_a_part_of_the_state() -> None:
    _, state = on_devices(lambda p, x: train(zero(optax.adam(1e-2), "i"), p, x, average=False), 4, PARAMS)
    per_device = [x.size // 4 for x in jax.tree.leaves(state[0].mu)]
    assert sorted(per_device) == sorted([-(-15 // 4), 1, 1, 2, 0])


@pytest.mark.parametrize("stage", [1, 2])
def test_the_gradients_travel_in_the_wire_dtype(stage: int) -> None:
    """And not as a sum, which would travel in float32."""

    def update(p: Tree, x: Array) -> Tree:
        optimizer = zero(optax.sgd(1.0), "i", stage=stage, wire_dtype=jnp.bfloat16)
        return optimizer.update(jax.grad(loss)(p, x), optimizer.init(p), p)[0]

    text = str(jax.make_jaxpr(lambda p, x: update(p, x), axis_env=[("i", 2)])(PARAMS, jnp.ones((7, 5))))
    assert set(re.findall(r":(\w+)\[\d+,\d+\] = all_to_all", text)) == {"bf16"}
    assert not re.findall("= (?:reduce_scatter|psum)[^\n]*f32", text)
    got = on_devices(update, 2, PARAMS)
    want = on_devices(lambda p, x: jax.tree.map(lambda g: -lax.pmean(g, "i"), jax.grad(loss)(p, x)), 2, PARAMS)
    np.testing.assert_allclose(got["w"], want["w"], rtol=2**-6, atol=2**-8)
    assert got["w"].dtype == jnp.float32


def test_small_leaves_travel_together() -> None:
    params = [jnp.ones((16, 16)) for _ in range(100)] + [jnp.ones((512, 512)), jnp.ones(3, jnp.bfloat16)]

    def update(p: Tree) -> Tree:
        optimizer = zero(optax.sgd(1.0), "i")
        return optimizer.update(p, optimizer.init(p), p)[0]

    text = str(jax.make_jaxpr(update, axis_env=[("i", 2)])(params))
    assert text.count("= reduce_scatter") == text.count("= all_gather") == 3


def test_a_bucket_is_not_overfilled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_BUCKET_BYTES", 64)
    arrays = [jnp.full((2, k), float(k)) for k in (1, 2, 3, 4, 1, 0)]
    seen: list[int] = []

    def double(x: Array) -> Array:
        seen.append(x.size * 4)
        return 2 * x

    for x, y in zip(arrays, buckets.in_buckets(double, arrays), strict=True):
        np.testing.assert_array_equal(y, 2 * x)
    assert sorted(seen) == [8 * 4, 8 * (1 + 2 + 3 + 1)]


def test_an_empty_array_may_come_first() -> None:
    arrays = [jnp.ones((2, 0)), jnp.ones((2, 3))]
    assert [x.shape for x in buckets.in_buckets(lambda x: 2 * x, arrays)] == [(2, 0), (2, 3)]


def test_a_state_goes_to_another_number_of_devices() -> None:
    """It is saved as the inner optimizer's own state, and training goes on as if nothing had happened."""
    inner = optax.adamw(1e-2)

    def first(p: Tree, x: Array) -> tuple[Tree, Any]:
        p, state = train(zero(inner, "i"), p, x, average=False, steps=3)
        return p, unshard_state(inner, state, p, "i")

    params, states = on_devices(first, 2, PARAMS)
    params, state = (jax.tree.map(lambda x: x[0], tree) for tree in (params, states))
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, inner.init(PARAMS))

    def sharded(p: Tree, s: Any, x: Array) -> Tree:
        own = shard_state(inner, s, "i")
        return zero(inner, "i").update(jax.grad(loss)(p, x), own, p)

    def whole(p: Tree, s: Any, x: Array) -> Tree:
        return inner.update(lax.pmean(jax.grad(loss)(p, x), "i"), s, p)[0]

    got, own = on_devices(sharded, 4, params, state)
    want = on_devices(whole, 4, params, state)
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-6)
    assert own[0].mu["w"].shape == (4, 4)


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="parallel.zero: expected stage=1 or stage=2, got stage=3"):
        zero(optax.adam(1e-2), "i", stage=3)
    with pytest.raises(TypeError, match="parallel.zero: expected wire_dtype to be a floating-point dtype, got 'int8'"):
        zero(optax.adam(1e-2), "i", wire_dtype="int8")
    with pytest.raises(
        NameError, match="parallel.zero: expected a call where the axis 'i' is bound, got one where it is"
    ):
        zero(optax.adam(1e-2), "i").init(PARAMS)


def test_gradients_that_are_summed_already_are_refused() -> None:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(p: Tree, x: Array, cast: bool) -> Tree:
        optimizer = zero(optax.adamw(1e-2), "i")
        grads = jax.grad(loss)(lax.pcast(p, "i", to="varying") if cast else p, x[0])
        return optax.apply_updates(p, optimizer.update(grads, optimizer.init(p), p)[0])

    def run(cast: bool) -> Tree:
        mapped = jax.shard_map(lambda p, x: step(p, x, cast), mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
        return jax.jit(mapped)(PARAMS, jnp.asarray(values((1, 7, 5), seed=4)))

    assert run(True)["w"].shape == (5, 3)
    with pytest.raises(
        ValueError, match="expected gradients of each device's own examples, got one that JAX has summed"
    ):
        run(False)


def test_a_bucket_has_arrays_of_one_type() -> None:
    """What is the same along the axis of the model stays so, by JAX's types, beside a part of an array."""
    mesh = jax.make_mesh((2, 2), ("i", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"same": P(), "part": P("model")}
    optimizer = zero(optax.sgd(1.0), "i")

    def step(p: Tree, x: Array) -> Tree:
        grads = jax.tree.map(lambda w: w * x[0], lax.pcast(p, "i", to="varying"))
        return optimizer.update(grads, optimizer.init(p), p)[0]

    params = {"same": jnp.ones(3), "part": jnp.arange(4.0)}
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("i")), out_specs=specs)
    got = jax.jit(mapped)(params, jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(got["same"], -2 * np.ones(3))
    np.testing.assert_allclose(got["part"], -2 * np.arange(4.0))


LABELS = {"w": "adam", "b": ["none", "adam"], "half": "sgd", "none": "none"}
PARTLY = {
    "masked": optax.masked(optax.adam(1e-2), {"w": True, "b": [False, True], "half": True, "none": False}),
    "several": optax.multi_transform(
        {"adam": optax.adamw(1e-2), "sgd": optax.sgd(0.1, momentum=0.9), "none": optax.set_to_zero()}, LABELS
    ),
    "by a function": optax.multi_transform(
        {"adam": optax.adam(1e-2), "none": optax.set_to_zero()},
        lambda p: jax.tree.map_with_path(lambda path, _: "adam" if "w" in str(path) else "none", p),
    ),
    "accumulated": optax.MultiSteps(
        optax.masked(optax.adam(1e-2), {"w": True, "b": False, "half": True, "none": True}), 3
    ),
    "a key": optax.chain(
        optax.GradientTransformation(lambda _: jax.random.key(0), lambda u, s, _=None: (u, s)), optax.adam(1e-2)
    ),
}


@pytest.mark.parametrize("name", PARTLY)
def test_a_state_of_some_parameters_is_saved(name: str) -> None:
    """It comes back as it was, and is as the inner optimizer makes it."""
    inner = PARTLY[name]

    def save(p: Tree, x: Array) -> tuple[Any, Any, Any]:
        state = zero(inner, "i").init(p)
        _, state = zero(inner, "i").update(jax.grad(loss)(p, x), state, p)
        saved = unshard_state(inner, state, p, "i")
        _, want = inner.update(lax.pmean(jax.grad(loss)(p, x), "i"), inner.init(p), p)
        return saved, want, (state, shard_state(inner, saved, "i"))

    saved, want, (state, again) = on_devices(save, 2, PARAMS)

    def numbers(tree: Any) -> list[Array]:
        keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(tree)]
        leaves = zip(jax.tree.leaves(tree), keys, strict=True)
        return [jax.random.key_data(x) if key else x.astype(jnp.float32) for x, key in leaves]

    assert jax.tree.structure(saved) == jax.tree.structure(want)
    for a, b in zip(numbers(saved), numbers(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-6)  # some are in bfloat16
    for a, b in zip(numbers(state), numbers(again), strict=True):
        np.testing.assert_array_equal(a, b)
