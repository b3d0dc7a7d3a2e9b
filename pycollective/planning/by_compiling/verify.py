"""Runs plans for a few steps on the devices of this job, to see what they take."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pycollective.planning import allocation
from pycollective.planning.by_compiling.plans import Measured, Plan
from pycollective.planning.timing import settled_s, slowest_s
from pycollective.ranks.world import world
from pycollective.transport.mpi import MPI

_TURNS = 5  # of all plans, one after the other: what else the machine does disturbs them alike
_PEAKS = 5  # measurements of memory


def measure(plans: Sequence[Plan], step: Callable[..., Any], *args: Any, steps: int = 10) -> list[Measured]:
    """Measures plans on the devices of this job, in turns. All ranks must make this call.

    One plan's arrays are in memory at a time.

    Args:
        plans: the plans.
        step: the function that they are for.
        args: its arguments, the same on all ranks. Of a :class:`jax.ShapeDtypeStruct` an array is made.
        steps: the number of timed steps of each plan.

    Returns:
        What each plan took.

    Raises:
        ValueError: this job has another number of devices than a plan.
    """
    runs = [_Run(plan, step, args) for plan in plans]
    memory = list(map(_memory_of, runs))
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(_TURNS):
        for run, times in zip(runs, seconds, strict=True):
            times += _seconds_of(run, -(-steps // _TURNS))
    return [Measured(statistics.median(times), peak) for times, peak in zip(seconds, memory, strict=True)]


class _Run:
    """A plan under way: each step takes the state that the one before has returned."""

    def __init__(self, plan: Plan, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._outs = plan.signature.outs
        self._tree = plan.signature.in_tree
        self._step = plan.jit(step)
        self._shardings = jax.tree.leaves(plan.in_shardings)
        self._given = jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct))
        self._leaves: list[jax.Array] = []

    @contextmanager
    def started(self) -> Iterator[None]:
        """The arguments are in memory for as long."""
        self._leaves = [_placed(leaf, place) for leaf, place in zip(self._given, self._shardings, strict=True)]
        try:
            yield
        finally:
            self._leaves = []

    def call(self) -> None:
        out = jax.block_until_ready(self._step(*jax.tree.unflatten(self._tree, self._leaves)))
        for place, leaf in zip(self._outs, jax.tree.leaves(out), strict=True):
            if place is not None:
                self._leaves[place] = leaf
        for i, leaf in enumerate(self._leaves):
            if leaf.is_deleted():  # it was donated, and no result takes its place
                self._leaves[i] = _placed(self._given[i], self._shardings[i])


def _seconds_of(run: _Run, steps: int) -> Iterator[float]:
    def seconds_of_next() -> float:
        return slowest_s(world().mpi, run.call)

    with run.started():
        settled_s(seconds_of_next)
        for _ in range(steps):
            yield seconds_of_next()


def _memory_of(run: _Run) -> int | None:
    """The peak of a step above what was there before its arguments."""
    with run.started():
        run.call()  # compiles it, and fills what stays for good
        run.call()
    ranks = world().mpi
    if not ranks.allreduce(allocation.has_arrays(), op=MPI.LAND):
        return None
    # Some miss what is there for a short time only. In one, MPI may take buffers that it keeps from then on.
    peak = sorted(_peak_of(run) for _ in range(_PEAKS))[-2]
    return int(ranks.allreduce(peak, op=MPI.MAX))


def _peak_of(run: _Run) -> float:
    """One measurement. It is too small by an array of an earlier run that XLA has not yet freed when this begins."""
    before = allocation.settled()
    with run.started():
        run.call()  # then its arguments are results of a step, as in a training
        allocation.settled()
        with allocation.peak() as most:
            run.call()
    return most.nbytes - before


def _placed(leaf: Any, sharding: Any) -> jax.Array:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _program(leaf.shape, leaf.dtype, sharding)()
    if isinstance(leaf, jax.Array) and _is_key(leaf.dtype):  # JAX places no keys on devices of other processes
        keys = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(leaf))
        return jax.jit(keys, out_shardings=sharding)(jax.device_put(jax.random.key_data(leaf), sharding))
    return jax.device_put(leaf, sharding, may_alias=False)  # the step may be given its memory


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


@functools.cache
def _program(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], jax.Array]:
    """Makes an array. One that JAX takes from NumPy would lie in NumPy's memory, which is freed at some later time."""
    value = 0.01 if jnp.issubdtype(dtype, jnp.inexact) else 0
    make = partial(jnp.zeros, shape) if _is_key(dtype) else partial(jnp.full, shape, value)
    return jax.jit(lambda: make(dtype=dtype), out_shardings=sharding)
