"""Strategies of ``pycollective.parallel`` over ranks and devices, against the same programs over JAX's axes."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import pycollective as pc
from pycollective import parallel
from pycollective.parallel.per_device import as_varying
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.spmd.cases import compare, own

pytestmark = pytest.mark.usefixtures("promotion_of_optax")

Array = Any
Tree = Any
P = jax.P


def params() -> Tree:
    return {"w": np.asarray(values((5, 3), seed=1)), "b": np.asarray(values((3,), seed=2)), "s": np.float32(2)}


def loss(p: Tree, x: Array) -> Array:
    return jnp.mean(jnp.tanh(x @ p["w"] + p["b"][None]) ** 2) * p["s"]


def sharded(p: Tree, x: Array) -> Tree:
    """Two steps of AdamW whose state is cut along "i", with a clipped norm. Returns the state as a whole, too."""
    inner = optax.chain(parallel.clip_by_global_norm(0.1, "i"), optax.adamw(1e-2))
    optimizer = parallel.zero(inner, "i")
    state = optimizer.init(p)
    for _ in range(2):
        updates, state = optimizer.update(jax.grad(loss)(p, x), state, p)
        p = optax.apply_updates(p, updates)
    return p, parallel.unshard_state(inner, state, p, "i")


def whole(p: Tree, x: Array) -> Tree:
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    state = inner.init(p)
    for _ in range(2):
        updates, state = inner.update(lax.pmean(jax.grad(loss)(p, x), "i"), state, p)
        p = optax.apply_updates(p, updates)
    return p, state


def rows(world: pc.Communicator, local: int) -> Array:
    return np.asarray(values((world.size * local, 7, 5), seed=4))


def test_zero_in_pmap(world: pc.Communicator, local: int) -> None:
    xs = rows(world, local)
    compare(world, local, sharded, params(), xs, in_axes=(None, 0))
    got = pc.pmap(sharded, "i", in_axes=(None, 0))(params(), own(world, local, xs))
    want = pc.pmap(whole, "i", in_axes=(None, 0))(params(), own(world, local, xs))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_zero_in_jit(world: pc.Communicator) -> None:
    xs = rows(world, 1)
    got = pc.jit(sharded, axis_name="i")(params(), xs[world.rank])
    want = jax.jit(jax.vmap(whole, (None, 0), axis_name="i"))(params(), xs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b[world.rank], rtol=1e-5, atol=1e-6)


def test_zero_in_shard_map_with_types(world: pc.Communicator, local: int) -> None:
    """JAX knows that the updates are the same on all devices."""
    mesh = pc.make_mesh((world.size * local,), ("i",), devices=devices_of_this_rank()[:local])
    optimizer = parallel.zero(optax.adamw(1e-2), "i")

    def step(p: Tree, x: Array) -> Tree:
        grads = jax.grad(loss)(lax.pcast(p, "i", to="varying"), x[0])
        return optax.apply_updates(p, optimizer.update(grads, optimizer.init(p), p)[0])

    xs = rows(world, local)
    got = pc.shard_map(step, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())(params(), own(world, local, xs))
    means = jax.tree.map(lambda x: x.mean(0), jax.vmap(jax.grad(loss), (None, 0))(params(), xs))
    inner = optax.adamw(1e-2)
    want = optax.apply_updates(params(), inner.update(means, inner.init(params()), params())[0])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_step_is_two_calls(world: pc.Communicator) -> None:
    """Where ranks share the axis: one reduces the gradients of all leaves to slices, one gathers all updates."""
    if world.size == 1:
        pytest.skip("LOUD: needs two ranks: along an axis of one device nothing is called")
    optimizer = parallel.zero(optax.adamw(1e-2), "i")

    def step(p: Tree, x: Array) -> Tree:
        return optimizer.update(jax.grad(loss)(p, x), optimizer.init(p), p)[0]

    text = pc.jit(step, axis_name="i").lower(params(), jnp.ones((7, 5))).as_text()
    calls = re.findall(r"custom_call @pycollective_(?!async_results)(?:device_|async_)?(\w+)\(", text)
    assert calls == ["reduce_scatter", "allgather"]


@pytest.mark.parametrize("types", [False, True])
def test_what_looks_at_whole_matrices(world: pc.Communicator, local: int, types: bool) -> None:
    """Each device orthogonalizes some of the matrices. In step 1 one device has a NaN, and all devices skip it."""
    muon = optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(0.1), optax.MultiSteps(optax.contrib.muon(1e-1), 2)), 5
    )

    def train(optimizer: Any, p: Tree, grad: Any) -> Any:
        def step(carry: Any, i: Array) -> Any:
            p, state = carry
            updates, state = optimizer.update(grad(p, i), state, p)
            return (optax.apply_updates(p, updates), state), None

        (p, state), _ = lax.scan(step, (p, optimizer.init(p)), jnp.arange(5))
        return p, state.total_notfinite

    def grads(p: Tree, x: Array, i: Array) -> Tree:
        found = jax.grad(lambda p: loss(p, x) + jnp.sum((x @ p["v"]) ** 2))(p)
        return found | {"s": jnp.where((i == 1) & (x[0, 0] > 50), jnp.nan, found["s"])}

    def by_zero(p: Tree, x: Array) -> Any:
        return train(parallel.zero(muon, "i"), p, lambda p, i: grads(as_varying(p, "i"), x, i))

    p = params() | {"v": np.asarray(values((5, 4), seed=6))}
    xs = rows(world, local)
    xs[-1, 0, 0] = 60
    mine = own(world, local, xs)
    if types:
        mesh = pc.make_mesh((world.size * local,), ("i",), devices=devices_of_this_rank()[:local])
        mapped = pc.shard_map(lambda p, x: by_zero(p, x[0]), mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
        got = mapped(p, mine)
    else:
        got = jax.tree.map(lambda x: x[0], pc.pmap(by_zero, "i", in_axes=(None, 0))(p, mine))

    def mean(p: Tree, i: Array) -> Tree:
        return jax.tree.map(lambda g: g.mean(0), jax.vmap(grads, (None, 0, None))(p, xs, i))

    want = jax.jit(lambda p: train(muon, p, mean))(p)
    assert want[1] == 1
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("types", [False, True], ids=["specs", "types"])
def test_a_clipped_norm_on_a_mesh(world: pc.Communicator, types: bool) -> None:
    """Ranks along "d" have slices, devices along "m" have columns: the norm is that of all parameters."""
    mesh = pc.make_mesh((world.size, 2), ("d", "m"), devices=devices_of_this_rank()[:2])
    specs = {"w": P(None, "m"), "b": P()}
    p = {"w": np.asarray(values((5, 4), seed=1)), "b": np.asarray(values((3,), seed=2))}
    clip = parallel.clip_by_global_norm(0.1, "d", specs=None if types else specs)
    optimizer = parallel.zero(optax.chain(clip, optax.sgd(1.0)), "d")

    def step(p: Tree, x: Array) -> Tree:
        grads = jax.tree.map(lambda w: jnp.sin(w) * x[0], lax.pcast(p, "d", to="varying") if types else p)
        return optimizer.update(grads, optimizer.init(p), p)[0]

    xs = np.arange(1.0, world.size + 1, dtype=np.float32)
    mapped = pc.shard_map(step, mesh=mesh, in_specs=(specs, P("d")), out_specs=specs, check_vma=types)
    got = mapped(p, xs[world.rank : world.rank + 1])
    whole = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    want, _ = whole.update(jax.tree.map(lambda w: jnp.sin(w) * xs.mean(), p), whole.init(p), p)
    for name in p:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5)


@pytest.mark.parametrize("way", ["around", "inside"])
def test_all_ranks_skip_a_step_with_a_nan_of_one(world: pc.Communicator, way: str) -> None:
    """By optax's function ranks would take different branches, and wait for each other."""
    adam = optax.adam(1e-2)
    if way == "around":
        optimizer = parallel.apply_if_finite(parallel.zero(adam, "i"), 5, "i")
    else:
        optimizer = parallel.zero(parallel.apply_if_finite(adam, 5, "i"), "i")

    def steps(p: Tree, x: Array) -> tuple[Tree, Array]:
        state = optimizer.init(p)
        for scale in (1.0, x, 1.0):  # the second step has the NaN
            updates, state = optimizer.update(jax.tree.map(lambda w, s=scale: w * s, p), state, p)
            p = optax.apply_updates(p, updates)
        return p, state.total_notfinite

    bad = np.float32(np.nan if world.rank == world.size - 1 else 1)
    got, skipped = pc.jit(steps, axis_name="i")(params(), bad)
    state, want = adam.init(params()), params()
    for _ in range(2):
        updates, state = adam.update(want, state, want)
        want = optax.apply_updates(want, updates)
    assert skipped == 1
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
