"""Runs plans for a few steps on the devices of this job, to see what they take."""

from __future__ import annotations

import ctypes
import functools
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pycollective.planning.plans import Measured, Plan
from pycollective.planning.timing import settled_s, slowest_s
from pycollective.ranks.world import world
from pycollective.transport.mpi import MPI

_TURNS = 3  # of all plans, one after the other: what else the machine does disturbs them alike


def measure(plans: Sequence[Plan], step: Callable[..., Any], *args: Any, steps: int = 6) -> list[Measured]:
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
    if jax.local_devices()[0].platform != "cpu":
        return None
    with _small_pages():
        return int(world().mpi.allreduce(max(_peak_of(run) for _ in range(_TURNS)), MPI.MAX))


def _peak_of(run: _Run) -> int:
    """One measurement. An array of an earlier step that XLA frees only in the next one makes it too small by that."""
    before = _give_back()
    with run.started():
        run.call()  # then its arguments are results of a step, as in a training
        _give_back()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: proc(5)
        run.call()
        return _resident("VmHWM") - before


@contextmanager
def _small_pages() -> Iterator[None]:
    """A huge page, of 2 MiB, would count whole when the first of its bytes is written."""
    set_thp_disable = 41  # prctl(2); it fails where there are no huge pages
    ctypes.CDLL(None).prctl(set_thp_disable, 1, 0, 0, 0)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(set_thp_disable, 0, 0, 0, 0)


def _give_back() -> int:
    """Returns freed memory to the system, and the bytes that are still there.

    What is freed counts as resident otherwise, and malloc keeps some for later arrays. XLA frees arguments a little
    after the results are ready.
    """
    gc.collect()
    least = _resident("VmRSS")
    while True:
        time.sleep(0.02)
        ctypes.CDLL(None).malloc_trim(0)
        resident = _resident("VmRSS")
        if resident >= least:  # it ends, since there is less each time until then
            return resident
        least = resident


def _resident(name: str) -> int:
    """A number of bytes from Linux's account of this process."""
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _placed(leaf: Any, sharding: Any) -> jax.Array:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.device_put(leaf, sharding, may_alias=False)  # the step may be given its memory
    return _program(leaf.shape, leaf.dtype, sharding)()


@functools.cache
def _program(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], jax.Array]:
    """Makes an array. One that JAX takes from NumPy would lie in NumPy's memory, which is freed at some later time."""
    value = 0.01 if jnp.issubdtype(dtype, jnp.inexact) else 0
    return jax.jit(lambda: jnp.full(shape, value, dtype), out_shardings=sharding)
