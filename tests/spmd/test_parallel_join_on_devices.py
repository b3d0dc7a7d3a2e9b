"""Uneven inputs over ranks, against one process that has all examples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pycollective as pc
from pycollective.parallel.join import join, mean_over_examples
from tests.cases import values

Array = Any

ROWS = 4


class Loader:
    """Makes its batches when they are asked for."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches

    def __len__(self) -> int:
        return len(self.batches)


def batches_of(rank: int) -> list[tuple[Array, int]]:
    """Rank r has r + 1 batches, and of the last one all rows but one are there; the others are NaN."""
    xs = [np.asarray(values((ROWS, 3), seed=10 * rank + i)) for i in range(rank + 1)]
    xs[-1] = np.where(np.arange(ROWS)[:, None] < ROWS - 1, xs[-1], np.float32(np.nan))
    return [(x, ROWS - (i == rank)) for i, x in enumerate(xs)]


def loader_of(rank: int) -> Any:
    """The kind of loader differs from rank to rank."""
    return Loader(batches_of(rank)) if rank % 2 else batches_of(rank)


def loss(w: Array, x: Array) -> Array:
    return jnp.sum(jnp.tanh(x @ w) ** 2, -1)


def mean_loss(w: Array, x: Array, count: Array) -> Array:
    there = jnp.arange(ROWS) < count
    return jnp.sum(jnp.where(there, loss(w, jnp.where(there[:, None], x, 0.0)), 0.0)) / count.astype(jnp.float32)


def gradient(w: Array, x: Array, rows: Array, active: Array) -> tuple[Array, Array]:
    count = jnp.where(active, rows, 0)
    return mean_over_examples(jax.grad(mean_loss)(w, x, count), count, "i")


START = values((3, 2), seed=1)


def test_training_is_that_of_one_process_with_all_examples(world: pc.Communicator) -> None:
    step = pc.jit(gradient, axis_name="i")
    w, totals, actives = START, [], []
    for (x, rows), active in join(loader_of(world.rank), world):
        grads, total = step(w, x, np.int32(rows), active)
        w = w - np.float32(0.1) * grads
        totals.append(int(total))
        actives.append(active)
    assert actives == [i <= world.rank for i in range(world.size)]

    want, numbers = START, []
    for i in range(world.size):
        rows = np.concatenate([x[:n] for r in range(i, world.size) for x, n in batches_of(r)[i : i + 1]])
        want = want - np.float32(0.1) * jax.grad(lambda w: jnp.mean(loss(w, rows)))(want)
        numbers.append(len(rows))
    assert totals == numbers
    np.testing.assert_allclose(w, want, 1e-5, 1e-6)


def test_the_number_travels_with_the_gradients(world: pc.Communicator) -> None:
    if world.size == 1:
        pytest.skip("LOUD: needs two ranks: along an axis of one device nothing is called")
    arguments = START, np.zeros((ROWS, 3), np.float32), np.int32(3), True
    text = pc.jit(gradient, axis_name="i").lower(*arguments).as_text()
    calls = re.findall(r"custom_call @pycollective_(?!async_results)(?:device_|async_)?(\w+)\(", text)
    assert calls == ["allreduce"]


def test_all_ranks_get_the_same_sentence(world: pc.Communicator) -> None:
    if world.size == 1:
        pytest.skip("LOUD: needs two ranks: one that differs")
    last = world.rank == world.size - 1
    empty: list[Any] = [] if last else [1, 2]
    sentence = (
        rf"join: expected a batch or more on each rank, got none on rank {world.size - 1} and 2 on rank 0. Divide"
    )
    with pytest.raises(ValueError, match=sentence):
        next(join(empty))
    unknown: Iterable[int] = iter([1]) if last else [1, 2]
    sentence = rf"expected loaders with a length on all ranks, got none on rank {world.size - 1}: .* has no len"
    with pytest.raises(TypeError, match=sentence):
        next(join(unknown))
    assert list(join([])) == []
    assert [active for _, active in join([1])] == [True]


def test_the_ranks_of_a_communicator(world: pc.Communicator) -> None:
    part = world.split(world.rank % 2)
    assert len(list(join([0] * (1 + world.rank), part))) == max(
        r + 1 for r in range(world.size) if r % 2 == world.rank % 2
    )
