"""Many sums travel in few calls, with the same results for each size of the buckets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from pycollective.config import Config
from pycollective.named_axes import fusion
from pycollective.primitives import reductions
from tests.cases import values
from tests.spmd.cases import STEP_TOLERANCE, compare, own, step

Array = Any


def tree(world: pc.Communicator, local: int) -> dict[str, Array]:
    """Returns leaves of many sizes and dtypes, stacked over all devices."""
    n = world.size * local
    sizes = [0, 1, 3, 100, 5000, 40_000, 7]
    leaves = {f"f{k}": values((n, size), seed=k) for k, size in enumerate(sizes)}
    leaves |= {f"b{k}": values((n, size), "bfloat16", seed=k) for k, size in enumerate((5, 300))}
    return leaves | {"i": values((n, 2, 2), "int32"), "c": values((n, 9), "complex64")}


def calls(text: str) -> int:
    # Begun, or whole.
    return len(re.findall(r"custom_call @pycollective_(device_|async_)?allreduce(?!_done)\w*\(", text))


@pytest.mark.parametrize("bucket_bytes", [0, 64, 20_000, 4 << 20])
def test_any_bucket(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch, world: pc.Communicator, local: int) -> None:
    chosen = Config(bucket_bytes=bucket_bytes)
    monkeypatch.setattr(fusion, "config", chosen)
    monkeypatch.setattr(reductions, "config", chosen)
    leaves = tree(world, local)
    got = pc.pmap(lambda t: lax.psum(t, "i"), "i")({name: own(world, local, x) for name, x in leaves.items()})
    for name, xs in leaves.items():
        wide = {"b": np.float32, "i": np.int32, "c": np.complex64}.get(name[0], np.float32)
        want = xs.astype(wide).sum(axis=0)
        tolerance = 2**-7 if name[0] == "b" else 1e-4
        for part in np.asarray(got[name]):
            assert part.dtype == xs.dtype
            np.testing.assert_allclose(part.astype(wide), want, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("donated", [False, True])
def test_one_array_several_times(donated: bool, world: pc.Communicator, local: int) -> None:
    """Results are written while other operands are still read, so no result may lie in another one's operand."""
    x = np.asarray(values((world.size * local, 60_000), "int32"))

    def f(x: Array) -> Any:
        return lax.psum((x, x, -x), "i"), lax.psum(x, "i")

    got = pc.pmap(f, "i", donate_argnums=(0,) if donated else ())(own(world, local, x))
    for y, sign in zip(jax.tree.leaves(got), (1, 1, -1, 1), strict=True):
        np.testing.assert_array_equal(y, np.broadcast_to(sign * x.sum(0), y.shape))


def test_a_training_step_is_one_call(world: pc.Communicator, few: int) -> None:
    params = [np.asarray(values((4, 4), seed=k)) for k in range(12)]
    xs = np.asarray(values((world.size * few, 2, 4)))
    mapped = pc.pmap(step, "i", in_axes=(None, 0))
    assert calls(mapped.lower(params, own(world, few, xs)).as_text()) == 1
    compare(world, few, step, params, xs, in_axes=(None, 0), tolerance=STEP_TOLERANCE)


def test_a_step_in_a_scan(world: pc.Communicator, few: int) -> None:
    def train(params: list[Array], x: Array) -> Any:
        return lax.scan(lambda p, _: step(p, x)[::-1], params, None, length=3)

    params = [np.asarray(values((4, 4), seed=k)) for k in range(6)]
    xs = np.asarray(values((world.size * few, 2, 4)))
    mapped = pc.pmap(train, "i", in_axes=(None, 0))
    assert calls(mapped.lower(params, own(world, few, xs)).as_text()) == 1
    compare(world, few, train, params, xs, in_axes=(None, 0), tolerance=1e-4)


def one_after_another(x: Array) -> Array:
    y = lax.psum(x, "i")
    z = lax.psum(jnp.sin(y), "i")  # this sum depends on the first
    return z + lax.psum(x * z, "i")


def across_others(x: Array) -> Array:
    a = lax.psum(x, "i")
    b = lax.pmax(x, "i")
    c = lax.psum(2 * x, "i")
    d = lax.all_gather(x, "i").sum(axis=0)
    return a + b + c + d + lax.psum(3 * x, "i")


@pytest.mark.parametrize(("fun", "number"), [(one_after_another, 3), (across_others, 4)])
def test_nothing_moves_past_what_it_needs(
    fun: Callable[[Array], Array], number: int, world: pc.Communicator, few: int
) -> None:
    xs = np.asarray(values((world.size * few, 5)))
    assert calls(pc.pmap(fun, "i").lower(own(world, few, xs)).as_text()) == number
    compare(world, few, fun, xs, tolerance=1e-4)


def test_the_tree_of_one_call_on_a_communicator(world: pc.Communicator) -> None:
    x = jnp.arange(3.0)
    together = pc.jit(lambda x: pc.psum({"a": x, "b": [x + 1, 2 * x[:2]]}, world))
    apart = pc.jit(lambda x: (pc.psum(x, world), pc.psum(2 * x, world)))
    assert calls(together.lower(x).as_text()) == 1
    assert calls(apart.lower(x).as_text()) == 2
    got = together(x)
    np.testing.assert_allclose(got["a"], world.size * x)
    np.testing.assert_allclose(got["b"][0], world.size * (x + 1))
    np.testing.assert_allclose(got["b"][1], world.size * 2 * x[:2])


def test_derivatives_and_batches_of_a_tree_on_a_communicator(world: pc.Communicator) -> None:
    def loss(a: Array, b: Array) -> Array:
        ya, yb, _ = pc.psum((jnp.sin(a), b**2, jnp.ones(2)), world)
        return jnp.sum(ya**2) + jnp.sum(yb)

    a, b = jnp.arange(3.0), jnp.asarray(2.0)
    ga, gb = jax.grad(loss, argnums=(0, 1))(a, b)
    n = world.size
    np.testing.assert_allclose(ga, n * 2 * n * jnp.sin(a) * jnp.cos(a), rtol=1e-5)
    np.testing.assert_allclose(gb, n * 2 * b, rtol=1e-5)
    only_a = jax.grad(loss)(a, b)
    np.testing.assert_allclose(only_a, ga, rtol=1e-6)
    batched = jax.vmap(loss, in_axes=(0, None))(jnp.stack([a, 2 * a]), b)
    np.testing.assert_allclose(batched, [loss(a, b), loss(2 * a, b)], rtol=1e-5)
