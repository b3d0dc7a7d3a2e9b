"""Transforms of programs with collectives: JAX's rules take for granted that nobody transforms an ordered effect.

The oracle is ``jax.vmap(axis_name=)`` on one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from tests.transforms import (
    BATCH,
    DIFFERENTIABLE,
    LOOPS,
    Array,
    Sum,
    batches,
    doubled,
    with_batched_bound,
    with_rules,
)


def plain(f: Callable[[Array], Any]) -> Callable[[Array], Any]:
    return f


def jvp(f: Callable[[Array], Any]) -> Callable[[Array], Any]:
    return lambda x: jax.jvp(f, (x,), (jnp.cos(x),))


def grad(f: Callable[[Array], Any]) -> Callable[[Array], Any]:
    total = lambda x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(x)))
    return jax.value_and_grad(total)


CASES = [(name, f, transform) for name, f in LOOPS.items() for transform in (plain, jvp)]
CASES += [(name, f, t) for name, f in DIFFERENTIABLE.items() for t in (plain, jvp, grad)]
CASES += [("with_batched_bound", with_batched_bound, t) for t in (plain, jvp)]
CASES += [("with_rules", with_rules, t) for t in (plain, grad)]


def every(psum: Sum, x: Array) -> dict[str, Any]:
    """All programs and their transforms, of a batch; for loops also the transforms of the batched program."""
    found = {}
    for name, f, transform in CASES:
        one = partial(f, psum)
        found[f"{name}, batch of {transform.__name__}"] = jax.vmap(transform(one))(x)
        if name in LOOPS and transform is not plain:
            found[f"{name}, {transform.__name__} of batch"] = transform(jax.vmap(one))(x)
    return found


def test_batches_and_derivatives(world: pc.Communicator) -> None:
    xs = batches(world.size)
    want = jax.jit(jax.vmap(partial(every, lambda y: lax.psum(y, "i")), axis_name="i"))(xs)
    got = pc.jit(partial(every, lambda y: pc.psum(y, world)))(xs[world.rank])
    for name in want:
        for ours, theirs in zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True):
            if theirs.dtype != jax.dtypes.float0:
                np.testing.assert_allclose(ours, theirs[world.rank], rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_batched_condition_ends_each_loop_by_itself(world: pc.Communicator) -> None:
    x = batches(world.size)[world.rank]
    mine = partial(doubled, lambda y: pc.psum(y, world))
    want = jnp.stack([mine(each) for each in x])
    np.testing.assert_array_equal(jax.vmap(mine)(x), want)
    np.testing.assert_array_equal(jax.jit(jax.vmap(mine))(x), want)
    pair = jnp.stack([x, x[::-1]], axis=1)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(mine))(pair), jnp.stack([want, want[::-1]], axis=1))
    with jax.disable_jit():
        np.testing.assert_array_equal(jax.vmap(mine)(x), want)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work for lax.while_loop"):
        jax.grad(lambda x: jax.vmap(mine)(x).sum())(x)


def test_a_trip_makes_one_call_for_the_whole_batch(world: pc.Communicator) -> None:
    loop = partial(doubled, lambda y: pc.psum(y, world))
    text = jax.jit(jax.vmap(loop)).lower(jnp.ones(BATCH)).as_text()
    assert text.count("@pycollective_allreduce") == 2, text  # before the loop, and in it
