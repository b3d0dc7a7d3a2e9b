"""Fully sharded data parallelism over ranks and devices, against plain data parallelism, and its memory and calls."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import pycollective as pc
from pycollective.parallel import fsdp
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.spmd.cases import own

pytestmark = pytest.mark.usefixtures("promotion_of_optax")

Array = Any
Tree = Any
P = jax.P

AXIS = "data"
LAYERS, WIDTH = 2, 5
LAYER = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), "b": jax.ShapeDtypeStruct((WIDTH,), jnp.float32)}
PARAMS = {
    "stack": {"w": values((LAYERS, WIDTH, WIDTH), seed=1) / 4, "b": values((LAYERS, WIDTH), seed=2)},
    "head": values((WIDTH, 3), seed=3) / 4,
}


def layer(p: Tree, h: Array) -> Array:
    return jnp.tanh(h @ p["w"] + p["b"][None])


def head(w: Array, h: Array) -> Array:
    return jnp.mean((h @ w) ** 2)


def loss(params: Tree, x: Array, layer: Any = layer, head: Any = head) -> Array:
    return head(params["head"], lax.scan(lambda h, p: (layer(p, h), None), x, params["stack"])[0])


def train(params: Tree, grad: Any) -> Tree:
    """Two steps of AdamW."""
    optimizer = optax.adamw(1e-2)
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(grad(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


def sliced(params: Tree, x: Array) -> Tree:
    """A training on slices. Returns the whole parameters."""

    def on_stack(fun: Any, stack: Tree, *args: Any) -> Tree:
        return jax.vmap(lambda tree: fun(tree, *args, AXIS))(stack)

    slices = {"stack": on_stack(fsdp.shard, params["stack"]), "head": fsdp.shard(params["head"], AXIS)}
    parts = fsdp.gathered(layer, LAYER, AXIS), fsdp.gathered(head, params["head"], AXIS)
    slices = train(slices, lambda s: jax.grad(loss)(s, x, *parts))
    return {
        "stack": on_stack(fsdp.unshard, slices["stack"], LAYER),
        "head": fsdp.unshard(slices["head"], params["head"], AXIS),
    }


def rows(world: pc.Communicator, local: int) -> Array:
    return np.asarray(values((world.size * local, 7, WIDTH), seed=4))


def assert_whole(got: Tree, xs: Array) -> None:
    """Compares parameters with those of plain data parallelism."""
    want = train(
        PARAMS, jax.jit(lambda p: jax.tree.map(lambda g: g.mean(0), jax.vmap(jax.grad(loss), (None, 0))(p, xs)))
    )
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=str(path))


def test_a_training_in_pmap(world: pc.Communicator, few: int) -> None:
    xs = rows(world, few)
    got = pc.pmap(sliced, AXIS, in_axes=(None, 0))(PARAMS, own(world, few, xs))
    for device in range(few):
        assert_whole(jax.tree.map(lambda x, device=device: x[device], got), xs)


def test_a_training_in_jit(world: pc.Communicator) -> None:
    xs = rows(world, 1)
    assert_whole(pc.jit(sliced, axis_name=AXIS)(PARAMS, xs[world.rank]), xs)


def test_a_training_in_shard_map_with_types(world: pc.Communicator, few: int) -> None:
    """JAX knows that the whole parameters are the same on all devices."""
    mesh = pc.make_mesh((world.size * few,), (AXIS,), devices=devices_of_this_rank()[:few])
    xs = rows(world, few)
    mapped = pc.shard_map(lambda p, x: sliced(p, x[0]), mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P())
    assert_whole(mapped(PARAMS, own(world, few, xs)), xs)


WIDE = 256
DEPTH = 8


def sum_of_layers(layer: Any, slices: Tree, h: Array) -> Array:
    """The sum of what a stack of layers returns. ``slices``: a list with those of each layer, or a stack of them."""
    if not isinstance(slices, list):
        return jnp.sum(lax.scan(lambda h, s: (layer(s, h), None), h, slices)[0])
    for s in slices:
        h = layer(s, h)
    return jnp.sum(h)


def compiled(world: pc.Communicator, policy: Any, *, stacked: bool) -> Any:
    """Returns a lowered step: gradients of a stack of layers, and an update by AdamW."""
    one = fsdp.gathered(
        lambda w, h: jnp.tanh(h @ w), jax.ShapeDtypeStruct((WIDE, WIDE), jnp.float32), AXIS, policy=policy
    )
    optimizer = optax.adamw(1e-3)

    def step(slices: Tree, state: Any, h: Array) -> Any:
        grads = jax.grad(partial(sum_of_layers, one))(slices, h)
        updates, state = optimizer.update(grads, state, slices)
        return optax.apply_updates(slices, updates), state

    length = WIDE * WIDE // world.size
    slices = jnp.zeros((DEPTH, length)) if stacked else [jnp.zeros(length)] * DEPTH
    return pc.jit(step, axis_name=AXIS, donate_argnums=(0, 1)).lower(
        slices, optimizer.init(slices), jnp.zeros((2, WIDE))
    )


@pytest.mark.parametrize("stacked", [True, False], ids=["scan", "list"])
def test_one_layer_is_gathered_at_a_time(world: pc.Communicator, stacked: bool) -> None:
    """Slices of parameters, gradients and two moments, 16 bytes for each of P / N elements, and about two layers."""
    if world.size == 1:
        pytest.skip("LOUD: needs two ranks: along an axis of one device nothing is gathered")
    layer_bytes = 4 * WIDE**2

    def layers(policy: Any) -> float:
        memory = compiled(world, policy, stacked=stacked).compile().memory_analysis()
        kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return (kept + memory.temp_size_in_bytes) / layer_bytes

    slices = 4 * DEPTH / world.size
    assert layers(jax.checkpoint_policies.dots_saveable) < slices + 3
    if stacked:
        assert layers(jax.checkpoint_policies.everything_saveable) > slices + DEPTH


def test_calls_of_a_step(world: pc.Communicator) -> None:
    """Each layer is gathered twice, but the first one once, since ``h`` needs no gradient. Gradients are scattered."""
    if world.size == 1:
        pytest.skip("LOUD: needs two ranks: along an axis of one device nothing is called")
    text = compiled(world, jax.checkpoint_policies.dots_saveable, stacked=False).as_text()
    calls = re.findall(r"custom_call @pycollective_(?!async_results)(?:device_|async_)?(\w+)\(", text)
    assert sorted(calls) == ["allgather"] * (2 * DEPTH - 1) + ["reduce_scatter"] * DEPTH
