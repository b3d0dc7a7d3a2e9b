"""Delayed gradients and gossip over JAX's axes, against the algorithms in NumPy with an explicit array per device."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from pycollective.parallel.overlapped_averaging import delayed, gossip
from tests.cases import values

pytestmark = pytest.mark.usefixtures("promotion_of_optax")

Array = Any
Tree = Any
P = jax.sharding.PartitionSpec

PARAMS: Tree = {"w": np.asarray(values((5, 3), seed=1)), "b": np.asarray(values((4,), seed=2)), "s": np.float32(2.0)}


def targets_of(devices: int) -> tuple[Tree, Array]:
    """The loss of a device is half of a slope times the squared distance to a target, and no two have the same."""
    targets = {name: np.asarray(values((devices, *x.shape), seed=i)) for i, (name, x) in enumerate(PARAMS.items())}
    return targets, np.linspace(0.2, 1.4, devices, dtype=np.float32)


def path_of(optimizer: Any, axis: Any, steps: int, cast: bool, params: Tree, targets: Tree, slope: Array) -> Tree:
    """Returns the parameters of a device after each step, and the state in the end."""
    params = jax.tree.map(jnp.asarray, params)
    if cast:
        params = lax.pcast(params, axis, to="varying")

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        grads = jax.tree.map(lambda x, t: slope * (x - t), params, targets)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    (_, state), path = lax.scan(step, (params, optimizer.init(params)), length=steps)
    return path, state


def on_devices(optimizer: Any, devices: int, steps: int) -> tuple[Tree, Any]:
    run = functools.partial(path_of, optimizer, "i", steps, False)
    return jax.jit(jax.vmap(run, (None, 0, 0), axis_name="i"))(PARAMS, *targets_of(devices))


def on_mesh(optimizer: Any, steps: int, axes: dict[str, int], types: bool, cast: bool, out_specs: Any) -> Tree:
    """Returns the paths that four devices have, in a shard_map."""
    axis = tuple(axes) if len(axes) > 1 else next(iter(axes))

    def block(params: Tree, targets: Tree, slope: Array) -> Tree:
        own = jax.tree.map(lambda x: x[0], (targets, slope))
        path, _ = path_of(optimizer, axis, steps, cast, params, *own)
        return path if out_specs == P() else jax.tree.map(lambda x: x[None], path)

    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    specs = {"in_specs": (P(), P(tuple(axes)), P(tuple(axes))), "out_specs": out_specs, "check_vma": types}
    return jax.jit(jax.shard_map(block, mesh=mesh, **specs))(PARAMS, *targets_of(4))


def gradient(params: Tree, targets: Tree, slopes: Array, r: int) -> Tree:
    return {name: slopes[r] * (params[name] - targets[name][r]) for name in params}


def assert_close(got: Tree, want: Tree) -> None:
    for name, x in got.items():
        assert x.dtype == np.float32
        np.testing.assert_allclose(x, want[name], 1e-5, 1e-5, err_msg=name)


def delayed_reference(devices: int, steps: int) -> Tree:
    """Adam on the mean of the gradients of the step before, in NumPy. All devices have the same."""
    targets, slopes = targets_of(devices)
    params: Tree = {name: np.float64(x) for name, x in PARAMS.items()}
    first, second = ({name: np.zeros_like(x) for name, x in params.items()} for _ in range(2))
    pending, path = None, []
    for step in range(steps):
        own = [gradient(params, targets, slopes, r) for r in range(devices)]
        if pending is not None:
            mean = {name: np.mean([g[name] for g in pending], axis=0) for name in params}
            for name, g in mean.items():
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g**2
                scaled = first[name] / (1 - 0.9**step) / (np.sqrt(second[name] / (1 - 0.999**step)) + 0.1)
                params = {**params, name: params[name] - 0.1 * (scaled + 0.01 * params[name])}
        pending = own
        path.append(params)
    return {name: np.array([x[name] for x in path]) for name in PARAMS}


ADAMW = optax.adamw(0.1, eps=0.1, weight_decay=0.01)  # a large eps, so that the size of the gradients matters


@pytest.mark.parametrize("devices", [1, 4])
def test_delayed(devices: int) -> None:
    got, state = on_devices(delayed(ADAMW, "i"), devices, 5)
    want = delayed_reference(devices, 5)
    assert_close(got, {name: np.broadcast_to(x, (devices, *x.shape)) for name, x in want.items()})
    np.testing.assert_array_equal(got["w"][:, 0], np.broadcast_to(PARAMS["w"], (devices, 5, 3)))  # nothing was decayed
    assert (state.inner[0].count == 4).all()


@pytest.mark.parametrize("types", [True, False])
def test_delayed_in_shard_map(types: bool) -> None:
    """JAX knows that all devices have the same parameters."""
    assert_close(on_mesh(delayed(ADAMW, "i"), 3, {"i": 4}, types, False, P()), delayed_reference(4, 3))


def test_the_sum_of_delayed_needs_nothing_of_its_step() -> None:
    def step(grads: Tree, state: Any) -> Any:
        return delayed(optax.sgd(0.1), "i").update(grads, state)

    state = jax.eval_shape(jax.vmap(delayed(optax.sgd(0.1), "i").init, axis_name="i"), {"w": jnp.ones((2, 3))})
    state = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), state)
    jaxpr = jax.make_jaxpr(step, axis_env=[("i", 2)])({"w": jnp.ones(3)}, state).jaxpr
    grads, _, pending = jaxpr.invars
    (summed,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name.startswith("psum"))
    assert summed.invars == [pending]
    assert grads in jaxpr.outvars


@pytest.mark.parametrize("optimizer", [delayed(optax.sgd(0.1), "i"), gossip(optax.sgd(0.1), "i")], ids=["d", "g"])
def test_what_was_received_is_used_after_the_gradients(optimizer: Any) -> None:
    """XLA cannot foresee it, so it keeps the order; see ``late._depending_on``."""

    def step(w: Array, state: Any, x: Array) -> Array:
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return optimizer.update(grads, state, w)[0]

    w = jnp.ones((2, 3, 2))
    mapped = jax.pmap(step, "i", devices=jax.devices()[:2])
    state = jax.vmap(optimizer.init, axis_name="i")(w)
    text = mapped.lower(w, state, jnp.ones((2, 4, 3))).compile().as_text()
    infinities = re.findall(r"(%\S+) = f32\[\S* constant\([{ ]*inf", text)
    assert infinities
    assert any(re.search(rf"compare\(\S+, {re.escape(name)}\), direction=GT", text) for name in infinities)


def gossip_reference(devices: int, steps: int, axes: tuple[int, ...] = ()) -> Tree:
    """Averages with one partner, then a step of SGD with momentum from there, by the gradient before the average."""
    targets, slopes = targets_of(devices)
    own = [{name: np.float64(x) for name, x in PARAMS.items()} for _ in range(devices)]
    traces = [{name: np.zeros_like(x) for name, x in own[0].items()} for _ in range(devices)]
    path = []
    rounds = int(np.ceil(np.log2(devices))) if devices > 1 else 1
    for step in range(steps):
        new = []
        for r in range(devices):
            g = gradient(own[r], targets, slopes, r)
            traces[r] = {name: g[name] + 0.9 * traces[r][name] for name in g}
            other = own[(r - 2 ** (step % rounds)) % devices]
            new.append({name: (own[r][name] + other[name]) / 2 - 0.1 * traces[r][name] for name in g})
        own = new
        path.append(own)
    return {name: np.array([[x[r][name] for x in path] for r in range(devices)]) for name in PARAMS}


@pytest.mark.parametrize("devices", [1, 2, 4, 6])
def test_gossip(devices: int) -> None:
    got, state = on_devices(gossip(optax.sgd(0.1, momentum=0.9), "i"), devices, 7)
    assert_close(got, gossip_reference(devices, 7))
    assert (state.round == 7 % max(1, int(np.ceil(np.log2(devices))))).all()


@pytest.mark.parametrize(("axes", "types"), [({"i": 4}, True), ({"i": 4}, False), ({"i": 2, "j": 2}, True)])
def test_gossip_in_shard_map(axes: dict[str, int], types: bool) -> None:
    axis = "i" if len(axes) == 1 else ("i", "j")
    got = on_mesh(gossip(optax.sgd(0.1, momentum=0.9), axis), 5, axes, types, types, P(tuple(axes)))
    assert_close(got, gossip_reference(4, 5))


@pytest.mark.parametrize(("devices", "steps"), [(8, 3), (4, 2), (2, 1), (3, 60), (6, 60)])
def test_gossip_without_gradients_reaches_the_mean(devices: int, steps: int) -> None:
    """With a power of two exactly, since all numbers here are small integers."""
    starts = jnp.asarray(np.random.default_rng(0).integers(-50, 50, size=(devices, 3)) * 8.0, jnp.float32)
    mean = np.asarray(starts.mean(0))
    optimizer = gossip(optax.sgd(0.1), "i")

    def step(carry: Any, _: None) -> Any:
        w, state = carry
        updates, state = optimizer.update(jnp.zeros_like(w), state, w)
        w = optax.apply_updates(w, updates)
        return (w, state), w

    def run(w: Array) -> Array:
        return lax.scan(step, (w, optimizer.init(w)), length=steps)[1]

    path = jax.jit(jax.vmap(run, axis_name="i", out_axes=1))(starts)
    np.testing.assert_allclose(path.mean(1), np.broadcast_to(mean, (steps, 3)), rtol=1e-5)
    if devices.bit_count() == 1:
        far = [not (x == mean).all() for x in np.asarray(path)]
        assert far == [True] * (steps - 1) + [False]
    np.testing.assert_allclose(path[-1], np.broadcast_to(mean, (devices, 3)), rtol=1e-5)


def test_the_parameters_of_gossip_travel_together_and_need_nothing_of_the_step() -> None:
    optimizer = gossip(optax.sgd(0.1), "i")

    def step(grads: Tree, params: Tree) -> Any:
        return optimizer.update(grads, optimizer.init(params), params)

    jaxpr = jax.make_jaxpr(step, axis_env=[("i", 8)])(PARAMS, PARAMS).jaxpr
    (switch,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond")
    params = jaxpr.invars[len(PARAMS) :]
    assert [v for v in switch.invars[1:] if v in jaxpr.invars] == params
    assert not set(switch.invars) & set(jaxpr.invars[: len(PARAMS)])
    sent = [
        [[v.aval.size for v in eqn.invars] for eqn in branch.jaxpr.eqns if eqn.primitive.name == "ppermute"]
        for branch in switch.params["branches"]
    ]
    assert sent == [[[15 + 4 + 1]]] * 3


def test_bad_calls() -> None:
    for name, optimizer in (("delayed", delayed(ADAMW, "i")), ("gossip", gossip(ADAMW, "i"))):
        with pytest.raises(NameError, match=f"parallel.{name}: expected a call where the axis 'i' is bound, got one"):
            optimizer.init(PARAMS)
    lacking = jax.vmap(lambda x: gossip(ADAMW, "i").update(x, gossip(ADAMW, "i").init(x)), axis_name="i")
    with pytest.raises(ValueError, match="parallel.gossip: expected the parameters as well, got gradients and state"):
        lacking(jnp.ones((2, 3)))


def test_gossip_takes_parameters_that_all_devices_share() -> None:
    """By JAX's types they are the same, and the updates are not."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    optimizer = gossip(optax.sgd(0.1), "i")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))
    def step(w: Array, x: Array) -> Array:
        return optimizer.update(x[0], optimizer.init(w), w)[0][None]

    grads = jnp.arange(8.0).reshape(4, 2)
    np.testing.assert_allclose(step(jnp.ones(2), grads), -0.1 * grads, rtol=1e-6)
