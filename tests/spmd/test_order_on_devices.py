"""Calls keep one order, whatever the number of devices and the duration of each program."""

from __future__ import annotations

import concurrent.futures
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from pycollective.ranks.setup import devices_of_this_rank
from tests.spmd.cases import own, stacked
from tests.spmd.conftest import needs_local


def test_programs_on_one_device_and_on_several(world: pc.Communicator, local: int) -> None:
    # No program uses the result of another, so only the package keeps their order.
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
    # The function is traced for one device while programs on several devices wait to run.
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
    # XLA may run independent operations of a program at once, in another order on each device.
    @pc.pmap(axis_name="i")
    def fun(x: jax.Array) -> list[jax.Array]:
        return [lax.psum((k + 1) * x[: k % 5 + 1], "i") for k in range(60)]

    xs = stacked(world, local, shape=(5,))
    for _ in range(20):
        got = fun(own(world, local, xs))
    for k, y in enumerate(got):
        want = (k + 1) * xs.sum(axis=0)[: k % 5 + 1]
        np.testing.assert_allclose(y, np.broadcast_to(want, y.shape), rtol=1e-4, atol=1e-4)


def test_programs_that_jax_dispatches_itself(world: pc.Communicator, local: int) -> None:
    """JAX dispatches programs under a transform and in plain jax.jit; here on several devices and on one."""
    n, devices = world.size * local, jax.local_devices()[:local]
    spec = jax.sharding.PartitionSpec("d")

    @pc.pmap(axis_name="i")
    def mapped(x: jax.Array, m: jax.Array) -> jax.Array:
        return lax.psum(lax.psum(x, "i") + 0 * (m @ m).sum(), "i").sum()

    def slow(x: jax.Array, m: jax.Array) -> jax.Array:
        return pc.psum(pc.psum(x, world) + 0 * (m @ m).sum(), world)

    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    plain = jax.jit(jax.shard_map(slow, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    ones = [lambda x: pc.psum(x, world), jax.jit(lambda x: pc.psum(x, world)), pc.jit(lambda x: pc.psum(x, world))]
    m = jnp.ones((local, 150, 150))
    results = []
    choose = random.Random(2)  # the same on all ranks
    for step in range(120):
        k = float(step % 7 + 1)
        kind = choose.choice(["gradient", "plain", "one", "one"])
        if kind == "gradient":
            value, slope = jax.value_and_grad(lambda x: mapped(x, m).sum())(jnp.full((local, 4), k))
            results += [(4 * k * n * n * local, value), (n * n, slope)]
        elif kind == "plain":
            results.append((k * world.size**2, plain(jnp.full((local, 3), k), m.reshape(-1, 150))))
        else:
            results.append((k * world.size, choose.choice(ones)(jnp.float32(k))))
    for want, got in results:
        np.testing.assert_allclose(got, np.full(got.shape, want), rtol=1e-6)


def test_programs_on_one_device_and_on_another(world: pc.Communicator, local: int) -> None:
    """XLA keeps no order between these programs, and each rank chooses its devices for itself."""
    heavy = pc.jit(lambda x, m: pc.psum(x + 0 * (m @ m).sum(), world))
    light = pc.jit(lambda x: pc.psum(x, world))
    choose = random.Random(world.rank)
    results = []
    for step in range(60):
        k = step % 7 + 1.0
        device = choose.choice(jax.local_devices()[:local])
        x = jax.device_put(jnp.full(3, k), device)
        results.append((k, heavy(x, jax.device_put(jnp.ones((150, 150)), device)) if step % 2 else light(x)))
    for k, got in results:
        np.testing.assert_allclose(got, np.full(3, k * world.size), rtol=1e-6)


def test_a_compiled_program_takes_its_turn(world: pc.Communicator, local: int) -> None:
    @pc.pmap(axis_name="i")
    def slow(x: jax.Array, m: jax.Array) -> dict[str, jax.Array]:
        return {"sum": lax.psum(lax.psum(x, "i") + 0 * (m @ m).sum(), "i")}

    x, m = jnp.ones((local, 4)), jnp.ones((local, 150, 150))
    lowered = slow.lower(x, m)
    compiled = lowered.compile()
    n = world.size * local
    results = []
    for step in range(40):
        k = float(step + 1)
        results += [(k * n * n, compiled(k * x, m)["sum"]), (k * world.size, pc.psum(jnp.float32(k), world))]
    for want, got in results:
        np.testing.assert_allclose(got, np.full(got.shape, want), rtol=1e-6)
    # In all else it is like a compiled program of JAX.
    assert compiled.out_tree == lowered.out_tree == jax.tree.structure({"sum": 0})
    assert compiled.out_info["sum"].shape == (local, 4)
    assert set(compiled.output_shardings) == {"sum"}
    assert compiled.in_tree == jax.tree.structure(((0, 0), {}))
    assert "allreduce" in compiled.as_text()
    assert compiled.cost_analysis()["flops"] > 0
    like_jax = jax.jit(lambda x, m: x).lower(x, m).compile()
    for bad in ((x,), (x[:, :2], m)):
        with pytest.raises(TypeError) as expected:
            like_jax(*bad)
        with pytest.raises(TypeError) as got:
            compiled(*bad)
        assert str(got.value) == str(expected.value)


def test_two_python_threads(world: pc.Communicator, local: int) -> None:
    f = pc.pmap(lambda x: lax.psum(x, "i"), "i")
    g = jax.jit(lambda x: pc.psum(x, world))
    h = pc.jit(lambda x: pc.psum(x, world))
    calls = [lambda: f(jnp.ones(local)), lambda: g(1.0), lambda: h(1.0), lambda: pc.psum(1.0, world)]
    wants = [world.size * local, world.size, world.size, world.size]

    def all_of_them() -> list[Any]:
        return [call() for call in calls]

    for call in calls:
        call()
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        for call in calls:
            with pytest.raises(RuntimeError, match=r"from one Python thread, 'MainThread'.* got one from 'other_0'"):
                pool.submit(call).result()
    for want, got in zip(wants, all_of_them(), strict=True):
        np.testing.assert_allclose(got, np.full(np.shape(got), want))


@pytest.mark.parametrize("how", ["in_shardings", "out_shardings", "constraint", "device_put"])
def test_devices_that_a_sharding_names(how: str, world: pc.Communicator) -> None:
    # The argument has no device yet. The programs between run on one device.
    devices = devices_of_this_rank()[:4]
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    inside = {"constraint": lax.with_sharding_constraint, "device_put": jax.device_put}.get(how, lambda x, _: x)
    options = {how: cut} if how.endswith("shardings") else {}
    several = pc.jit(lambda x: pc.psum(inside(x @ x.T, cut), world), **options)
    x = np.ones((200, 200), np.float32)
    results = [(several(k * x), pc.psum(jnp.float32(k), world)) for k in range(1, 16)]
    for k, (y, z) in enumerate(results, start=1):
        np.testing.assert_array_equal(y, np.full_like(x, 200 * k * k * world.size))
        assert z == k * world.size


@needs_local(2)
def test_under_a_mesh_that_is_set(world: pc.Communicator) -> None:
    # jax.set_mesh gives its devices to all programs. Our programs that have their own mesh may run under it.
    devices = devices_of_this_rank()[:4]
    one = pc.jit(lambda x: pc.psum(x, world))
    mapped = pc.pmap(lambda x: lax.psum(x, "i"), "i", devices=devices)
    total = np.full((2,), world.size, np.float32)
    x = np.ones((len(devices), 2), np.float32)
    np.testing.assert_array_equal(one(np.ones(2, np.float32)), total)
    with jax.set_mesh(jax.sharding.Mesh(np.array(devices), ("d",))):
        for _ in range(3):
            np.testing.assert_array_equal(mapped(x)[0], len(devices) * total)
        with pytest.raises(NotImplementedError, match="left to XLA. Call it outside jax.shard_map and jax.set_mesh"):
            pc.psum(jnp.ones(3), world)
    np.testing.assert_array_equal(one(np.ones(2, np.float32)), total)
    np.testing.assert_array_equal(mapped(x)[0], len(devices) * total)
