"""One order of calls, however many devices each program has and however long it takes."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pycollective as pc
from tests.spmd.cases import own, stacked


def test_programs_on_one_device_and_on_several(world: pc.Communicator, local: int) -> None:
    # No program uses another's result, and all ranks but the first are late by turns.
    @pc.pmap(axis_name="i")
    def slow(x: jax.Array, m: jax.Array) -> jax.Array:
        return lax.psum(lax.psum(x, "i") + 0 * (m @ m).sum(), "i")

    fast = pc.pmap(lambda x: lax.psum(x, "i"), "i")
    on_one = pc.jit(lambda x: lax.psum(x, "r"), axis_name="r")
    named = pc.pmap(lambda x: pc.psum(x, world))
    n = world.size * local
    x = jnp.asarray(own(world, local, np.ones((n, 4), np.float32)))
    m = jnp.ones((local, 150, 150))
    one = jnp.ones(4)
    results = []
    choose = random.Random(0)  # the same on all ranks
    for step in range(600):
        kind = choose.choice(["slow", "fast", "one", "eager", "communicator"])
        k = step % 7 + 1
        if kind == "slow":
            results.append((k * n * n, slow(k * x, m)))
        elif kind == "fast":
            results.append((k * n, fast(k * x)))
        elif kind == "one":
            results.append((k * world.size, on_one(k * one)))
        elif kind == "eager":
            results.append((k * world.size, pc.psum(k * one, world)))
        else:
            results.append((k * world.size, named(k * x)))
    for want, got in results:
        np.testing.assert_allclose(got, np.full(got.shape, want), rtol=1e-6)


def test_one_function_on_several_devices_and_on_one(world: pc.Communicator, local: int) -> None:
    # It is traced for one device while programs on several wait to run.
    @pc.pmap(axis_name="i")
    def slow(x: jax.Array, m: jax.Array) -> jax.Array:
        return lax.psum(lax.psum(x, "i") + 0 * (m @ m).sum(), "i")

    results = []
    choose = random.Random(1)  # the same on all ranks
    for step in range(60):
        devices = local if step < 10 else choose.choice([1, local])
        n, k = world.size * devices, step % 7 + 1
        m = jnp.ones((devices, 150, 150))
        results.append((k * n * n, slow(jnp.full((devices, 4), k, jnp.float32), m)))
    for want, got in results:
        np.testing.assert_allclose(got, np.full(got.shape, want), rtol=1e-6)


def test_independent_calls_of_one_program(world: pc.Communicator, local: int) -> None:
    # XLA may run independent calls of a program at once, in another order on each device.
    @pc.pmap(axis_name="i")
    def fun(x: jax.Array) -> list[jax.Array]:
        return [lax.psum((k + 1) * x[: k % 5 + 1], "i") for k in range(60)]

    xs = stacked(world, local, shape=(5,))
    for _ in range(20):
        got = fun(own(world, local, xs))
    for k, y in enumerate(got):
        want = (k + 1) * xs.sum(axis=0)[: k % 5 + 1]
        np.testing.assert_allclose(y, np.broadcast_to(want, y.shape), rtol=1e-4, atol=1e-4)
