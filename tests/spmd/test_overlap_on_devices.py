"""Programs whose sums overlap with other work, on accelerators or where a setting forces it; and elsewhere."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from pycollective.config import config
from pycollective.named_axes import fusion, overlap
from pycollective.primitives import lowering
from pycollective.ranks import accelerators
from pycollective.ranks.setup import devices_of_this_rank
from pycollective.transport import handlers, native
from tests.cases import values
from tests.spmd.cases import STEP_TOLERANCE, compare, step
from tests.spmd.conftest import needs_local

Array = Any


@pytest.fixture(autouse=True)
def each_sum_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "config", dataclasses.replace(config, bucket_bytes=0))


def test_training(world: pc.Communicator, local: int) -> None:
    params = [np.asarray(values((16, 16), seed=k)) for k in range(6)]
    xs = np.asarray(values((world.size * local, 8, 16)))
    compare(world, local, step, params, xs, in_axes=(None, 0), tolerance=STEP_TOLERANCE)


def mixed(x: Array) -> tuple[Array, ...]:
    """Has sums in every place, results and operands that are read again, and other collectives between."""
    a = jnp.sin(x @ x)
    s, again = lax.psum(a, "i"), lax.psum((a, 2.0), "i")
    b = a @ a
    t = lax.pmax(b, "i")
    everything = lax.all_gather(b @ b, "i").sum(axis=0)
    c = lax.psum(jnp.cos(s @ x), "i")
    d = a @ b
    looped, _ = lax.scan(lambda y, _: (lax.psum(jnp.tanh(y), "i") / 8 + jnp.tanh(y @ d / 100), None), x, None, length=3)
    return a, s, again, b, t, everything, c, d, looped


def test_mixed(world: pc.Communicator, local: int) -> None:
    xs = np.asarray(values((world.size * local, 8, 8)))
    compare(world, local, mixed, xs)


def are_accelerators() -> bool:
    return accelerators.kind_of(devices_of_this_rank()[0]) in lowering.ACCELERATORS


def two_sums(x: Array, swap: bool) -> tuple[Array, ...]:
    """Sums the third and the second power of ``x``, which are computed in one order or the other."""
    if swap:
        b = x @ x
        a = b @ x
    else:
        a = x @ x @ x
        b = x @ x
    s, t = lax.psum(a, "i"), lax.psum(b, "i")
    return s, t, a @ b @ a


def assert_sums(world: pc.Communicator, results: tuple[Array, ...]) -> None:
    """Checks the sums of ``two_sums`` of :func:`own`."""
    scale = 1.0 + np.arange(world.size)
    np.testing.assert_allclose(results[0], np.eye(128) * (scale**3).sum())
    np.testing.assert_allclose(results[1], np.eye(128) * (scale**2).sum())


def own(world: pc.Communicator) -> Array:
    return jnp.eye(128) * (1.0 + world.rank)


def assert_they_meet(world: pc.Communicator, swaps: list[bool]) -> None:
    """Calls one function for each of ``swaps``. The sums have equal shapes: only wrong numbers show a wrong order."""
    f = pc.jit(two_sums, axis_name="i", static_argnums=1)
    for swap in swaps:
        assert_sums(world, f(own(world), swap))


def test_ranks_that_compute_in_different_orders(world: pc.Communicator) -> None:
    assert_they_meet(world, [world.rank % 2 == 1] * 3)


def test_a_rank_that_traces_once_more_alone(world: pc.Communicator) -> None:
    """That rank keeps the order that all ranks have agreed on, although it now computes in another order."""
    assert_they_meet(world, [call > 0 and world.rank % 2 == 1 for call in range(3)])


@pytest.mark.parametrize("swap", [False, True])
def test_a_rank_that_has_compiled_ahead(world: pc.Communicator, swap: bool) -> None:
    """Its program cannot be traced again if the ranks do not agree, so its sums keep the order of the program."""
    f = pc.jit(two_sums, axis_name="i", static_argnums=1)
    x = own(world)
    assert_sums(world, f.lower(x, swap).compile()(x) if world.rank % 2 else f(x, swap))
    assert_sums(world, f(x, swap))


def test_a_sum_that_could_overtake(world: pc.Communicator) -> None:
    """The last sum could begin before the second, which needs the first. In a program compiled ahead it does not."""

    @pc.jit(axis_name="i")
    def f(x: Array) -> tuple[Array, ...]:
        s = lax.psum(x @ x, "i")
        return lax.psum(s @ x, "i"), lax.psum(x @ x @ x, "i")

    x = own(world)
    scale = 1.0 + np.arange(world.size)
    totals = (scale**2).sum() * scale.sum(), (scale**3).sum()
    results = f.lower(x).compile()(x) if world.rank % 2 else f(x)
    for y, total in zip(results, totals, strict=True):
        np.testing.assert_allclose(y, np.eye(128) * total)


def test_a_program_from_before_the_ranks_agreed(world: pc.Communicator) -> None:
    f = pc.jit(two_sums, axis_name="i", static_argnums=1)
    x = own(world)
    early = f.lower(x, True).compile()
    assert_sums(world, f(x, True))
    assert_sums(world, f.lower(x, True).compile()(x))
    if world.size > 1 and (are_accelerators() or config.overlap == "on"):
        with pytest.raises(RuntimeError, match="expected a program that was lowered after the first call"):
            early(x)
    else:
        assert_sums(world, early(x))


@needs_local(2)
def test_a_rank_whose_group_is_on_one_host_orders_its_sums_too(
    world: pc.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of the same mesh may be on several hosts: either all ranks compare their orders, or none does."""
    if are_accelerators():
        pytest.skip("LOUD: sums of several accelerators of a rank do not move")
    mesh = pc.make_mesh((world.size, 2), ("data", "model"), devices=devices_of_this_rank()[:2])
    for module in (overlap, handlers):
        monkeypatch.setattr(module, "config", dataclasses.replace(config, overlap="auto"))
    monkeypatch.setattr(native, "spans_hosts", lambda number: number == mesh.comm._key[0])

    def f(x: Array) -> tuple[Array, ...]:
        early = x[:, :4]
        return lax.psum(early @ early.T, "model"), lax.psum(early, "model")

    summed = pc.shard_map(f, mesh=mesh, in_specs=jax.P(("data", "model")), out_specs=jax.P("data"))
    x = jnp.ones((16, 8))
    late, early = summed(x)
    np.testing.assert_array_equal(late, np.full((8, 8), 8.0))
    np.testing.assert_array_equal(early, np.full((8, 4), 2.0))
    text = summed.lower(x).as_text()
    sums = re.findall(r"custom_call @pycollective_\w*allreduce\([^\n]*: \([^)]*, tensor<([0-9x]+)xf", text)
    assert sums == ["8x4", "8x8"]
