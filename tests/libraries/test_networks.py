"""Training steps over all devices with networks of Equinox, Flax and Haiku, and parameters that Orbax restores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import flax
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import jax_utils, nnx
from jax import lax

import pycollective as pc
from tests.cases import values
from tests.collective.programs import once
from tests.libraries.programs import Way, compare
from tests.spmd.cases import assert_close, own

Array = Any


def inputs(world: pc.Communicator, local: int) -> Array:
    return np.asarray(values((world.size * local, 4, 3)))


# Equinox ----------------------------------------------------------------------------------------------------------


def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(3, 2, 5, 1, key=jax.random.key(0))


def equinox_loss(model: eqx.nn.MLP, x: Array) -> Array:
    return jnp.mean(jax.vmap(model)(x) ** 2)


def equinox_step(x: Array, axis: Any) -> Any:
    """Makes a training step of a model that is closed over, so that Equinox's filters see its arrays and functions."""
    model = mlp()
    loss, grads = eqx.filter_value_and_grad(equinox_loss)(model, x)
    grads = pc.pmean(eqx.filter(grads, eqx.is_inexact_array), axis)
    model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
    return pc.pmean(loss, axis), jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))


def test_equinox_step(way: Way, world: pc.Communicator) -> None:
    compare(world, way, equinox_step, (4, 3))


@eqx.filter_jit
def filtered(model: eqx.nn.MLP, x: Array, comm: pc.Communicator) -> tuple[Array, Any]:
    return eqx.filter_value_and_grad(lambda model: pc.pmean(equinox_loss(model, x), comm))(model)


def test_equinox_filter_jit_over_a_communicator(world: pc.Communicator) -> None:
    x = inputs(world, 1)
    loss, grads = filtered(mlp(), jnp.asarray(x[world.rank]), world)
    losses, all_grads = zip(
        *(eqx.filter_value_and_grad(equinox_loss)(mlp(), x[r]) for r in range(world.size)), strict=True
    )
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    # Each of n ranks has the mean as its loss, and this rank's copy is in one term of it: n / n times its own gradient.
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(all_grads[world.rank]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_equinox_filter_pmap(world: pc.Communicator, local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(model: eqx.nn.MLP, x: Array) -> Array:
        grads = eqx.filter_grad(equinox_loss)(model, x)
        return lax.pmean(jax.tree.leaves(grads), "i")

    def mapped() -> Any:
        return eqx.filter_pmap(step, axis_name="i", in_axes=(None, eqx.if_array(0)))

    x = inputs(world, local)
    want = once(world.size * local, lambda: mapped()(mlp(), jnp.asarray(x)))
    monkeypatch.setattr(jax, "pmap", pc.pmap)
    assert_close(world, local, mapped()(mlp(), jnp.asarray(own(world, local, x))), want)


# Flax -------------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.BatchNorm(use_running_average=False, axis_name="i")(nn.Dense(5)(x))
        return nn.Dense(1)(nn.relu(x))


def linen_step(variables: Any, x: Array) -> Any:
    def loss(params: Any) -> Any:
        y, updates = Normed().apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return jnp.mean(y**2), updates

    (value, updates), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], lax.pmean(grads, "i"))
    return {"params": params, **updates}, lax.pmean(value, "i")


def linen_variables() -> Any:
    return jax.vmap(lambda x: Normed().init(jax.random.key(0), x), axis_name="i")(jnp.ones((1, 4, 3)))


def linen_start() -> Any:
    return jax.tree.map(lambda v: np.asarray(v[0]), linen_variables())


def test_linen_with_replicate(world: pc.Communicator, local: int) -> None:
    """The state of the first step goes into the second."""
    x = inputs(world, local)

    def train(pmap: Any, devices: Any, x: Array) -> Any:
        step = pmap(linen_step, "i", donate_argnums=(0,))
        state = jax_utils.replicate(linen_start(), devices)
        for _ in range(2):
            state, loss = step(state, x)
        return state, loss

    total = world.size * local
    want = once(total, lambda: train(jax.pmap, jax.devices()[:total], x))
    state, loss = train(pc.pmap, jax.local_devices()[:local], own(world, local, x))
    assert_close(world, local, (state, loss), want, 1e-4)
    if local > 1:  # on one device of several Flax takes the leading axis for a copy's
        first = jax_utils.unreplicate(state)
        jax.tree.map(
            lambda y, z: np.testing.assert_allclose(y, z, rtol=1e-4, atol=1e-5),
            first,
            jax.tree.map(lambda z: z[0], want[0]),
        )


def test_linen_under_jit_with_a_name(world: pc.Communicator) -> None:
    x = inputs(world, 1)
    copies = jax_utils.replicate(linen_start(), jax.devices()[: world.size])
    want = once(world.size, lambda: jax.pmap(linen_step, "i", devices=jax.devices()[: world.size])(copies, x))
    got = pc.jit(linen_step, axis_name="i")(linen_start(), x[world.rank])
    assert_close(world, 1, jax.tree.map(lambda y: y[None], got), want, 1e-4)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(3, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, axis_name="i", rngs=rngs)
        self.out = nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.out(nnx.relu(self.norm(self.dense(x))))


def nnx_step(state: Any, x: Array) -> Any:
    model = nnx.merge(nnx.graphdef(NnxNet(nnx.Rngs(0))), state)
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    grads = lax.pmean(grads, "i")
    params = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
    nnx.update(model, params)
    return jax.tree.leaves(nnx.state(model)), lax.pmean(loss, "i")


def test_nnx(world: pc.Communicator, local: int) -> None:
    x = inputs(world, local)
    total = world.size * local
    state = jax.tree.map(np.asarray, nnx.state(NnxNet(nnx.Rngs(0))))
    oracle = jax.pmap(nnx_step, "i", in_axes=(None, 0), devices=jax.devices()[:total])
    want = once(total, lambda: oracle(state, x))
    assert_close(world, local, pc.pmap(nnx_step, "i", in_axes=(None, 0))(state, own(world, local, x)), want, 1e-4)


def test_nnx_pmap(world: pc.Communicator, local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``nnx.pmap`` passes prefixes of states that are objects of its own."""

    def mapped(x: Array) -> Array:
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        axes = nnx.StateAxes({...: None})

        @nnx.pmap(in_axes=(axes, 0), out_axes=0, axis_name="i")
        def run(model: nnx.Linear, x: Array) -> Array:
            grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
            return jax.tree.leaves(lax.pmean(grads, "i"))

        return run(model, x)

    x = inputs(world, local)
    total = world.size * local
    want = once(total, lambda: mapped(jnp.asarray(x)))
    monkeypatch.setattr(jax, "pmap", pc.pmap)
    assert_close(world, local, mapped(jnp.asarray(own(world, local, x))), want, 1e-4)


# Haiku ------------------------------------------------------------------------------------------------------------


def haiku_net(x: Array) -> Array:
    norm = hk.BatchNorm(True, True, 0.9, cross_replica_axis="i")
    return hk.Linear(1)(jax.nn.relu(norm(hk.Linear(5)(x), is_training=True)))


def haiku_step(variables: list[Any], x: Array) -> list[Any]:
    """Makes a training step; parameters and state are dicts in a list."""
    net = hk.transform_with_state(haiku_net)
    params, state = variables

    def loss(params: Any) -> Any:
        y, new = net.apply(params, state, None, x)
        return jnp.mean(y**2), new

    grads, state = jax.grad(loss, has_aux=True)(params)
    return [jax.tree.map(lambda p, g: p - 0.1 * g, params, lax.pmean(grads, "i")), state]


def haiku_start() -> list[Any]:
    init = hk.transform_with_state(haiku_net).init
    made = jax.vmap(init, (None, 0), axis_name="i")(jax.random.key(0), jnp.ones((1, 4, 3)))
    return list(jax.tree.map(lambda v: np.asarray(v[0]), made))


def test_haiku(world: pc.Communicator, local: int) -> None:
    x = inputs(world, local)
    total = world.size * local

    def train(pmap: Any, x: Array, **options: Any) -> Any:
        step = pmap(haiku_step, "i", in_axes=([None, None], 0), **options)
        again = pmap(haiku_step, "i", in_axes=([0, 0], 0), **options)
        return again(step(haiku_start(), x), x)

    want = once(total, lambda: train(jax.pmap, x, devices=jax.devices()[:total]))
    assert_close(world, local, train(pc.pmap, own(world, local, x)), want, 1e-4)


# Orbax ------------------------------------------------------------------------------------------------------------


def test_restored_parameters(world: pc.Communicator, local: int, tmp_path: Path) -> None:
    """Orbax restores arrays that are committed to one device; ``in_axes=None`` takes them to all."""
    saved = linen_start()["params"]
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / f"rank{world.rank}", saved)
        restored = checkpointer.restore(tmp_path / f"rank{world.rank}")
    restored = jax.tree.map(lambda p: jax.device_put(p, jax.local_devices()[0]), restored)
    assert all(leaf.committed for leaf in jax.tree.leaves(restored))

    def step(params: Any, x: Array) -> Any:
        return lax.pmean(jax.tree.map(lambda p: p * jnp.mean(x), params), "i")

    x = inputs(world, local)
    got = pc.pmap(step, "i", in_axes=(None, 0), out_axes=None)(restored, own(world, local, x))
    want = jax.tree.map(lambda p: p * np.mean(x), saved)
    jax.tree.map(lambda y, z: np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-6), got, want)
    again = pc.pmap(step, "i", in_axes=(None, 0), out_axes=None)(pc.broadcast(got), own(world, local, x))
    jax.tree.map(lambda y, z: np.testing.assert_allclose(y, z * np.mean(x), rtol=1e-4, atol=1e-6), again, want)


def test_flax_state_in_lists(world: pc.Communicator, local: int) -> None:
    params = [flax.core.freeze({"w": np.float32(2.0)}), (np.float32(3.0),)]
    x = np.asarray(values((world.size * local, 3)))
    mapped = pc.pmap(
        lambda p, x: [lax.psum(x * p[0]["w"] + p[1][0], "i")], "i", in_axes=([None, (None,)], 0), out_axes=[None]
    )
    (got,) = mapped(params, own(world, local, x))
    np.testing.assert_allclose(got, (2 * x + 3).sum(axis=0), rtol=1e-5)
