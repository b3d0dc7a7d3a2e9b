"""Independent subnets over ranks and devices, against the same program over JAX's axes."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pycollective as pc
from pycollective.parallel.subnets import draw_subnets, join_subnets, take_subnet
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.spmd.cases import compare, own

Array = Any
Tree = Any
P = jax.P

SIZES = {"h1": 8, "h2": 16}
SPEC = {"w1": (None, "h1"), "b1": ("h1",), "w2": ("h1", "h2"), "w3": ("h2", None), "b3": (None,)}


def params() -> Tree:
    shapes: dict[str, tuple[int, ...]] = {"w1": (5, 8), "b1": (8,), "w2": (8, 16), "w3": (16, 2), "b3": (2,)}
    return {name: np.asarray(values(shape, seed=i)) for i, (name, shape) in enumerate(shapes.items())}


def loss(p: Tree, x: Array) -> Array:
    h = jnp.tanh(x @ p["w1"] + p["b1"][None])
    return jnp.mean((jnp.tanh(h @ p["w2"]) @ p["w3"] + p["b3"][None] - 1.0) ** 2)


def train(p: Tree, x: Array) -> Tree:
    """A round of two steps. Each device has another key: that of the first counts."""
    units = draw_subnets(jax.random.key(lax.axis_index("i")), SIZES, "i")
    subnet = take_subnet(p, SPEC, units, "i")
    for _ in range(2):
        subnet = jax.tree.map(lambda w, g: w - 0.1 * g, subnet, jax.grad(loss)(subnet, x))
    return join_subnets(p, subnet, SPEC, units, "i")


def rows(world: pc.Communicator, local: int) -> Array:
    return np.asarray(values((world.size * local, 7, 5), seed=9))


def test_in_pmap_and_in_shard_map_with_types(world: pc.Communicator, few: int) -> None:
    xs = rows(world, few)
    compare(world, few, train, params(), xs, in_axes=(None, 0))
    mesh = pc.make_mesh((world.size * few,), ("i",), devices=devices_of_this_rank()[:few])
    run = pc.shard_map(lambda p, x: train(p, x[0]), mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    got = run(params(), own(world, few, xs))
    want = jax.jit(jax.vmap(train, (None, 0), axis_name="i", out_axes=None))(params(), xs)
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], 1e-5, 1e-6, err_msg=name)


def test_in_jit(world: pc.Communicator) -> None:
    """A round is three calls: for the key, for the parts, and for the mean of what is not divided."""
    xs = rows(world, 1)
    run = pc.jit(train, axis_name="i")
    got = run(params(), xs[world.rank])
    want = jax.jit(jax.vmap(train, (None, 0), axis_name="i", out_axes=None))(params(), xs)
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], 1e-5, 1e-6, err_msg=name)
    text = run.lower(params(), xs[0]).as_text()
    calls = re.findall(r"custom_call @pycollective_(?!async_results)(?:device_|async_)?(\w+)\(", text)
    assert sorted(calls) == ["allgather", "allreduce", "allreduce"]
