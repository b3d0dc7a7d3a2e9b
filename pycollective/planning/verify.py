"""Runs plans for a few steps on the devices of this job, to see what they take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pycollective.planning.plans import Plan
from pycollective.ranks.world import world
from pycollective.transport.mpi import MPI


def measure(plans: Sequence[Plan], step: Callable[..., Any], *args: Any, steps: int = 5) -> list[float]:
    """Measures plans on the devices of this job, in turns. All ranks must make this call.

    Args:
        plans: the plans.
        step: the function that they are for.
        args: its arguments, the same on all ranks. Of a :class:`jax.ShapeDtypeStruct` an array is made.
        steps: the number of timed steps of each plan.

    Returns:
        The median time of a step of each plan on the slowest rank, in seconds.
    """
    runs = [_Run(plan, step, args) for plan in plans]
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(steps):
        for run, times in zip(runs, seconds, strict=True):
            run.call()  # brings its arrays into the caches
            world().mpi.Barrier()
            started = time.perf_counter()
            run.call()
            times.append(world().mpi.allreduce(time.perf_counter() - started, MPI.MAX))
    return list(map(statistics.median, seconds))


class _Run:
    """A plan under way: each step takes the state that the one before has returned."""

    def __init__(self, plan: Plan, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._outs = plan.signature.outs
        self._tree = plan.signature.in_tree
        self._step = plan.jit(step)
        shardings = jax.tree.leaves(plan.in_shardings)
        leaves = jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct))
        self._leaves = [_placed(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]

    def call(self) -> None:
        out = jax.block_until_ready(self._step(*jax.tree.unflatten(self._tree, self._leaves)))
        for place, leaf in zip(self._outs, jax.tree.leaves(out), strict=True):
            if place is not None:
                self._leaves[place] = leaf


def _placed(leaf: Any, sharding: Any) -> jax.Array:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.device_put(leaf, sharding)
    value = 0.01 if jnp.issubdtype(leaf.dtype, jnp.inexact) else 0
    make: Callable[[], jax.Array] = jax.jit(lambda: jnp.full(leaf.shape, value, leaf.dtype), out_shardings=sharding)
    return make()
