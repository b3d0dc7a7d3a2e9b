"""Transforms of programs over named axes that JAX treats differently once the axes have become ranks.

The oracle is ``jax.vmap(axis_name=)`` on one process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pycollective as pc
from pycollective.ranks.setup import devices_of_this_rank
from tests.spmd.cases import assert_close, own
from tests.transforms import LOOPS, Array, batches, doubled, until_small


def over_axis(y: Array) -> Array:
    return lax.psum(y, "i")


def every(x: Array) -> dict[str, Any]:
    return {name: loop(over_axis, x) for name, loop in LOOPS.items()}


@pytest.mark.parametrize("batch", ["inside", "outside"])
def test_a_batched_condition_ends_each_loop_by_itself(batch: str, world: pc.Communicator, few: int) -> None:
    xs = batches(world.size * few)
    want = jax.jit(jax.vmap(jax.vmap(every), axis_name="i"))(xs)
    if batch == "inside":
        got = pc.pmap(jax.vmap(every), "i")(own(world, few, xs))
    else:
        got = jax.vmap(pc.pmap(every, "i"), in_axes=1, out_axes=1)(own(world, few, xs))
    assert_close(world, few, got, want)


@pytest.mark.parametrize("check", [True, False], ids=["typed", "untyped"])
def test_a_batched_loop_in_shard_map(check: bool, world: pc.Communicator, few: int) -> None:
    xs = batches(world.size * few)
    both = lambda x: (doubled(over_axis, x), until_small(over_axis, x))
    want = jax.jit(jax.vmap(jax.vmap(both), axis_name="i"))(xs)
    mesh = pc.make_mesh((world.size * few,), ("i",), devices=devices_of_this_rank()[:few])
    mapped = pc.shard_map(jax.vmap(jax.vmap(both)), mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check)
    assert_close(world, few, mapped(own(world, few, xs)), want)


def test_a_batched_loop_over_ranks(world: pc.Communicator) -> None:
    xs = batches(world.size)
    want = jax.jit(jax.vmap(jax.vmap(partial(doubled, over_axis)), axis_name="i"))(xs)[world.rank]
    loop = pc.jit(partial(doubled, over_axis), axis_name="i")
    np.testing.assert_allclose(jax.vmap(loop)(xs[world.rank]), want, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(loop))(xs[world.rank]), want, rtol=1e-5)
