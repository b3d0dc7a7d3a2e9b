"""Tensor parallelism over ranks and devices, against the whole computation."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import pycollective as pc
from pycollective.ranks.setup import devices_of_this_rank
from tests.spmd.cases import own
from tests.unit.test_parallel_tensor import AXIS, CUTS, TOKENS, WHOLE, cut_loss, specs, stacked, whole_loss

Tree = Any
P = jax.P


def assert_trees(got: Any, want: Any) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, 2e-5, 2e-5, err_msg=str(path))


@pytest.fixture(scope="module")
def want() -> Any:
    """The loss, and the gradients of the whole parameters."""
    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(whole_loss))(WHOLE, TOKENS))


@pytest.mark.parametrize("sequence_axis", [None, 1])
def test_a_transformer_in_pmap(world: pc.Communicator, few: int, want: Any, sequence_axis: int | None) -> None:
    devices = world.size * few
    step = jax.value_and_grad(functools.partial(cut_loss, sequence_axis=sequence_axis))
    parts = jax.tree.map(lambda x: own(world, few, x), stacked(WHOLE, devices))
    got = pc.pmap(step, AXIS, in_axes=(0, None))(parts, TOKENS)
    loss, grads = want
    assert_trees(got, (np.full(few, loss), jax.tree.map(lambda x: own(world, few, x), stacked(grads, devices))))


def test_a_transformer_in_jit(world: pc.Communicator, want: Any) -> None:
    step = pc.jit(jax.value_and_grad(cut_loss), axis_name=AXIS)
    got = step(jax.tree.map(lambda x: x[world.rank], stacked(WHOLE, world.size)), TOKENS)
    loss, grads = want
    assert_trees(got, (loss, jax.tree.map(lambda x: x[world.rank], stacked(grads, world.size))))


def test_a_transformer_in_shard_map_with_types(world: pc.Communicator, few: int, want: Any) -> None:
    """Beside an axis of data. JAX knows which gradients are the same on all devices."""
    data = 2 if few > 1 else 1
    mesh = pc.make_mesh((world.size * few // data, data), (AXIS, "data"), devices=devices_of_this_rank()[:few])

    def blocks(tree: Tree) -> Tree:
        """This rank's part of arrays that are cut along the ranks."""
        return {
            name: x if (cut := CUTS[name]) is None else np.split(x, world.size, cut)[world.rank]
            for name, x in tree.items()
        }

    def step(params: Tree, tokens: Any) -> Any:
        return jax.value_and_grad(lambda p: jax.lax.pmean(cut_loss(p, tokens, 1), "data"))(params)

    mapped = pc.shard_map(step, mesh=mesh, in_specs=(specs(CUTS), P("data")), out_specs=(P(), specs(CUTS)))
    loss, grads = want
    assert_trees(mapped(blocks(WHOLE), TOKENS), (loss, blocks(grads)))


def test_a_bare_optimizer_that_clips_by_the_norm_of_parts_is_refused(world: pc.Communicator) -> None:
    clip = optax.clip_by_global_norm(1.0)

    @pc.jit(axis_name=AXIS)
    def step(params: Tree) -> Tree:
        return clip.update(jax.grad(cut_loss)(params, TOKENS), optax.EmptyState())[0]

    params = jax.tree.map(lambda x: x[world.rank], stacked(WHOLE, world.size))
    refused = pytest.raises(ValueError, match=rf"optax's clip_by_global_norm .* \(rank {world.rank} of {world.size}\)")
    with refused if world.size > 1 else contextlib.nullcontext():
        step(params)
