"""A mixture of experts that are cut along ranks and devices, against the same over JAX's axes."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from pycollective.parallel.experts import experts
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.spmd.cases import compare, own

Array = Any
P = jax.P

EXPERTS, TOKENS, WIDTH = 8, 5, 3  # experts of all devices, tokens of each


def layer(params: Array, x: Array, logits: Array, **options: Any) -> Any:
    return experts(lambda tokens: jnp.tanh(tokens @ params), x, logits, "i", **options)


def gradients(params: Array, x: Array, logits: Array, weights: Array) -> Any:
    """Returns the result and statistics, and the gradients of a loss. Choices are dropped."""

    def loss(*args: Array) -> Any:
        y, statistics = layer(*args, capacity_factor=0.7)
        return jnp.sum(jnp.sin(y) * weights) + statistics.balance_loss, (y, statistics)

    return jax.grad(loss, (0, 1, 2), has_aux=True)(params, x, logits)


def arrays(devices: int) -> list[Array]:
    """Returns parameters, tokens, logits and weights of the result, with one block for each device."""
    shapes = [(EXPERTS // devices, WIDTH, WIDTH), (TOKENS, WIDTH), (TOKENS, EXPERTS), (TOKENS, WIDTH)]
    return [np.asarray(values((devices, *shape), seed=seed)) for seed, shape in enumerate(shapes)]


def test_in_pmap(world: pc.Communicator, few: int) -> None:
    compare(world, few, gradients, *arrays(world.size * few))


def test_in_jit(world: pc.Communicator) -> None:
    xs = arrays(world.size)
    got = pc.jit(gradients, axis_name="i")(*(x[world.rank] for x in xs))
    want = jax.jit(jax.vmap(gradients, axis_name="i"))(*xs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b[world.rank], rtol=1e-4, atol=1e-5)
    assert want[1][1].dropped[0] > 0


def test_in_shard_map_with_types(world: pc.Communicator, few: int) -> None:
    """JAX knows that the statistics are the same on all devices. The balance loss counts once."""
    devices = world.size * few
    mesh = pc.make_mesh((devices,), ("i",), devices=devices_of_this_rank()[:few])

    def step(*blocks: Array) -> Any:
        *args, weights = (x[0] for x in blocks)

        def loss(*args: Array) -> Any:
            y, statistics = layer(*args)
            return lax.psum(jnp.sum(jnp.sin(y) * weights), "i") + statistics.balance_loss, statistics

        grads, statistics = jax.grad(loss, (0, 1, 2), has_aux=True)(*args)
        return jax.tree.map(lambda x: x[None], grads), statistics

    xs = arrays(devices)
    run = pc.shard_map(step, mesh=mesh, in_specs=P("i"), out_specs=(P("i"), P()))
    got, statistics = run(*(own(world, few, x) for x in xs))

    def untyped(params: Array, x: Array, logits: Array, weights: Array) -> Any:
        def loss(*args: Array) -> Any:
            y, statistics = layer(*args)
            return jnp.sum(jnp.sin(y) * weights) + statistics.balance_loss / devices, statistics

        return jax.grad(loss, (0, 1, 2), has_aux=True)(params, x, logits)

    want, of_all = jax.jit(jax.vmap(untyped, axis_name="i"))(*xs)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, own(world, few, b), rtol=1e-4, atol=1e-5)
    for a, b in zip(statistics, of_all, strict=True):
        np.testing.assert_allclose(a, b[0], rtol=1e-5)


def test_a_layer_is_three_calls(world: pc.Communicator) -> None:
    """Where ranks share the axis: two exchanges of tokens, and one sum of all statistics."""
    if world.size == 1:
        pytest.skip("LOUD: needs two ranks: along an axis of one device nothing is called")
    block = [x[0] for x in arrays(world.size)]
    text = pc.jit(layer, axis_name="i").lower(*block[:3]).as_text()
    calls = re.findall(r"custom_call @pycollective_(?!async_results)(?:device_|async_)?(\w+)\(", text)
    assert sorted(calls) == ["allreduce", "alltoall", "alltoall"]
