"""Attention over a sequence that is cut along ranks and devices, against the same over JAX's axes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from pycollective.parallel.sequence import ring_attention
from pycollective.parallel.ulysses import ulysses
from pycollective.parallel.zigzag import zigzag_positions
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.spmd.cases import compare, own

Array = Any
P = jax.P

ATTENTION: dict[str, Callable[..., Array]] = {
    "ring": functools.partial(ring_attention, axis_name="i", causal=True, keys_at_once=2),
    "ulysses": ulysses(functools.partial(jax.nn.dot_product_attention, is_causal=True), "i"),
}


def with_options(q: Array, k: Array, v: Array) -> Array:
    """A ring in which devices skip other blocks than their neighbours, and not all distances are needed."""
    positions = zigzag_positions(len(q), "i")
    return ring_attention(
        *(q, k, v, "i"),
        causal=True,
        zigzag=True,
        bias=jnp.cos(positions.astype(q.dtype))[:, None],
        segment_ids=positions // 7,
        key_value_seq_lengths=jnp.asarray(5, jnp.int32),
        local_window_size=(3, 0),
        dropout_rate=0.25,
        dropout_key=jax.random.key(4),
        keys_at_once=1,
        queries_at_once=1,
    )


def blocks(devices: int) -> list[Array]:
    """Returns q, k, v and weights of the result, with one block for each device: 4 positions, 16 heads, 8 of keys."""
    shapes = [(devices, 4, heads, 2) for heads in (16, 8, 8, 16)]
    return [np.asarray(values(shape, seed=seed)) for seed, shape in enumerate(shapes)]


def gradients(name: str, q: Array, k: Array, v: Array, weights: Array) -> Any:
    """Returns the result, and the gradients of a loss to which all devices contribute. Inside a function of an axis."""

    def loss(*args: Array) -> tuple[Array, Array]:
        y = {**ATTENTION, "options": with_options}[name](*args)
        return jnp.sum(jnp.sin(y) * weights), y

    return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)


def test_in_pmap(world: pc.Communicator, few: int) -> None:
    table: dict[str, Callable[..., Any]] = {
        name: functools.partial(gradients, name) for name in (*ATTENTION, "options")
    }
    compare(world, few, table, *blocks(world.size * few))


@pytest.mark.parametrize("name", ATTENTION)
def test_in_jit_with_gradients_outside(world: pc.Communicator, name: str) -> None:
    *qkv, weights = blocks(world.size)
    attention = pc.jit(ATTENTION[name], axis_name="i")
    y, back = jax.vjp(attention, *(x[world.rank] for x in qkv))
    got = back(jnp.cos(y) * weights[world.rank])
    want, _ = jax.jit(jax.vmap(functools.partial(gradients, name), axis_name="i"))(*qkv, weights)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b[world.rank], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ATTENTION)
def test_in_shard_map_with_types(world: pc.Communicator, few: int, name: str) -> None:
    """Keys and values are the same for all; the gradient of the summed loss is the sum of all devices'."""
    devices = world.size * few
    mesh = pc.make_mesh((devices,), ("i",), devices=devices_of_this_rank()[:few])
    q, k, v, weights = blocks(devices)
    shared = (k[0], v[0])

    def step(q: Array, shared: tuple[Array, Array], weights: Array) -> Any:
        def loss(shared: tuple[Array, Array]) -> Array:
            return lax.psum(jnp.sum(jnp.sin(ATTENTION[name](q[0], *shared)) * weights[0]), "i")

        return jax.value_and_grad(loss)(shared)

    run = pc.shard_map(step, mesh=mesh, in_specs=(P("i"), P(), P("i")), out_specs=P())
    got = run(own(world, few, q), shared, own(world, few, weights))

    def whole(shared: tuple[Array, Array]) -> Array:
        def joined(x: Array) -> Array:
            return jnp.concatenate(list(x))

        k, v = (joined(jnp.stack([x] * devices)) for x in shared)
        y = jax.nn.dot_product_attention(joined(q), k, v, is_causal=True)
        return jnp.sum(jnp.sin(y) * joined(weights))

    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.value_and_grad(whole)(shared)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_the_calls(world: pc.Communicator) -> None:
    """Where ranks share the axis: a ring sends keys and values in one call, Ulysses all three arrays."""
    if world.size != 2:
        pytest.skip("LOUD: needs two ranks: a loop of more steps is a loop in the program")
    block = [x[0] for x in blocks(world.size)[:3]]
    found = {}
    for name, attention in ATTENTION.items():
        text = pc.jit(attention, axis_name="i").lower(*block).as_text()
        found[name] = re.findall(r"custom_call @pycollective_(?!async_results)(?:device_|async_)?(\w+)\(", text)
    assert found == {"ring": ["ppermute"], "ulysses": ["alltoall", "alltoall"]}
