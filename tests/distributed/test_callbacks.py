"""Calls of Python from global programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

from tests.distributed.arrays import RANK, SIZE, check, mesh_of, put, values

Array = Any

X = values((SIZE, 3))


def test_pure_callback_in_shard_map() -> None:
    mesh = mesh_of(SIZE)
    called = []

    def on_host(x: np.ndarray) -> np.ndarray:
        called.append(np.asarray(x).copy())
        return np.asarray(x) * 2

    def block(x: Array) -> Array:
        y = jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return lax.psum(y, "i") + y

    f = jax.jit(jax.shard_map(block, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    check(f(put(X, mesh, "i")), 2 * X.sum(axis=0, keepdims=True) + 2 * X, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(called, [X[RANK : RANK + 1]])  # each rank's own block


def test_io_callback_in_shard_map() -> None:
    mesh = mesh_of(SIZE)
    told: list[tuple[int, float]] = []

    def block(x: Array) -> Array:
        def step(x: Array, k: Array) -> tuple[Array, None]:
            total = lax.psum(x, "i")
            io_callback(lambda k, y: told.append((int(k), float(y))), None, k, total[0, 0])
            return total / SIZE, None

        return lax.scan(step, x, jnp.arange(3))[0]

    f = jax.jit(jax.shard_map(block, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    jax.block_until_ready(f(put(X, mesh, "i")))
    jax.effects_barrier()
    assert [k for k, _ in sorted(told)] == [0, 1, 2]
    np.testing.assert_allclose([y for _, y in told], X[:, 0].sum(), rtol=1e-5)


def test_debug_callback_in_a_global_program() -> None:
    mesh = mesh_of(SIZE)
    seen: list[np.ndarray] = []

    @jax.jit
    def program(x: Array) -> Array:
        total = x.sum(axis=0)
        jax.debug.callback(lambda total: seen.append(np.asarray(total)), total)
        return 2 * total

    check(program(put(X, mesh, "i")), 2 * X.sum(axis=0), rtol=1e-5, atol=1e-5)
    jax.effects_barrier()
    assert len(seen) == (RANK == 0)  # the program's first device calls
    np.testing.assert_allclose(seen, [X.sum(axis=0)] * len(seen), rtol=1e-5)


def test_debug_print(capfd: pytest.CaptureFixture[str]) -> None:
    mesh = mesh_of(SIZE)

    @jax.jit
    def program(x: Array) -> Array:
        jax.debug.print("the sum is {}", x.sum())
        return x + 1

    x = np.arange(2 * SIZE, dtype=np.float32)
    check(program(put(x, mesh, "i")), x + 1)
    jax.effects_barrier()
    assert capfd.readouterr().out == (f"the sum is {x.sum()}\n" if RANK == 0 else "")


def test_pure_callback_in_a_global_program() -> None:
    mesh = mesh_of(SIZE)

    @jax.jit
    def program(x: Array) -> Array:
        y = jax.pure_callback(lambda x: np.asarray(x) * 3, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return y.sum(axis=0)

    check(program(put(X, mesh, "i")), 3 * X.sum(axis=0), rtol=1e-5, atol=1e-5)


def test_a_callback_that_fails_on_every_rank() -> None:
    mesh = mesh_of(SIZE)

    def fails(x: np.ndarray) -> np.ndarray:
        raise ValueError(f"the callback's own error on rank {RANK}")

    def block(x: Array) -> Array:
        return jax.pure_callback(fails, jax.ShapeDtypeStruct(x.shape, x.dtype), lax.psum(x, "i"))

    f = jax.jit(jax.shard_map(block, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    x = put(X, mesh, "i")
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"the callback's own error on rank {RANK}"):
        jax.block_until_ready(f(x))
    check(jax.jit(lambda x: x.sum(axis=0))(x), X.sum(axis=0), rtol=1e-5, atol=1e-5)
