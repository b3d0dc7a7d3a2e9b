"""Global arrays and this package's own calls in the same processes: in turn, not in one program over several ranks."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pycollective as pc
from tests.distributed.arrays import RANK, SIZE, by_mpi, check, mesh_of, put, values

Array = Any

TOTAL = SIZE * (SIZE + 1) / 2
"""The sum of what all ranks have, where each has its rank plus one."""


def test_both_in_turn(world: pc.Communicator) -> None:
    """Nothing waits for a result; all ranks have the same order of calls."""
    line, turned = mesh_of(SIZE), mesh_of(SIZE, order=range(SIZE)[::-1])
    part = world.split(color=0, key=-world.rank)
    assert part is not None
    ring = [(m, (m + 1) % SIZE) for m in range(SIZE)]
    mapped = jax.shard_map(lambda x: lax.psum(x, "i"), mesh=turned, in_specs=P("i"), out_specs=P(), check_vma=False)
    moved = jax.shard_map(lambda x: lax.ppermute(x, "i", ring), mesh=line, in_specs=P("i"), out_specs=P("i"))
    own, rows = jnp.full(3, RANK + 1.0), np.repeat(np.arange(1.0, SIZE + 1, dtype=np.float32)[:, None], 3, axis=1)
    straight, backwards = put(rows, line, "i"), put(rows, turned, "i")
    programs: dict[str, tuple[Any, Any, Any]] = {
        "eager": (lambda x: pc.psum(x, world), own, TOTAL),
        "another communicator": (lambda x: pc.psum(x, part), own, TOTAL),
        "pc.jit": (pc.jit(lambda x: lax.psum(x, "r") + pc.ppermute(x, part, [(0, 0)]), axis_name="r"), own, None),
        "pc.pmap": (pc.pmap(lambda x: lax.psum(x, "i"), "i"), own[None], TOTAL),
        "jax.jit of ours": (jax.jit(lambda x: pc.pmax(x, world)), own, SIZE),
        "slow sum": (
            jax.jit(lambda x: x.sum(axis=0) + 0 * jnp.tanh(jnp.ones((200, 200)) @ jnp.ones((200, 200))).sum()),
            straight,
            TOTAL,
        ),
        "sum": (jax.jit(lambda x: x.sum(axis=0)), straight, TOTAL),
        "mapped": (jax.jit(mapped), backwards, TOTAL),
        "moved": (jax.jit(moved), straight, (RANK - 1) % SIZE + 1),
    }
    first = world.mpi.allreduce(RANK if part.rank == 0 else 0) == RANK
    results = []
    choose = random.Random(5)  # the same on all ranks
    for step in range(400):
        name = choose.choice(list(programs))
        function, x, want = programs[name]
        k = step % 5 + 1.0
        want = TOTAL + (RANK + 1) * first if want is None else want
        results.append((name, k * want, function(k * x)))
    for name, want, got in results:
        got = np.asarray(got.addressable_data(0))
        np.testing.assert_allclose(got, np.full(got.shape, want), rtol=1e-6, err_msg=name)


def test_ours_alone_in_a_program_over_all_ranks(world: pc.Communicator) -> None:
    mesh = mesh_of(SIZE)
    x = values((SIZE, 3))

    def block(x: Array) -> Array:
        return pc.psum(x, world) + pc.ppermute(x, world, [(m, (m + 1) % SIZE) for m in range(SIZE)])

    f = jax.jit(jax.shard_map(block, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    check(f(put(x, mesh, "i")), x.sum(axis=0) + np.roll(x, 1, axis=0), rtol=1e-5, atol=1e-6)


@by_mpi
def test_both_in_one_program_are_refused(world: pc.Communicator) -> None:
    mesh = mesh_of(SIZE)
    x = put(values((SIZE, 3)), mesh, "i")
    block = lambda x: pc.psum(x, world) + lax.psum(x, "i")
    f = jax.jit(jax.shard_map(block, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    refusal = (
        r"pycollective\.distributed: expected collectives of one kind in a program over several processes, got JAX's "
        rf"own and this package's in \S+ \(rank {RANK} of {SIZE}\)\. Write jax\.lax's with the mesh's axes"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=refusal):
            f(x)
    check(jax.jit(lambda x: x + 1)(x), values((SIZE, 3)) + 1, rtol=1e-6)


def test_axes_over_ranks(world: pc.Communicator) -> None:
    """pc.shard_map, pc.jit and pc.pmap take each rank's own block, as without global arrays."""
    xs = values((SIZE, 4, 3))
    own = jnp.asarray(xs[RANK])
    mesh = pc.make_mesh((SIZE // 2, 2), ("a", "b"))
    f = pc.shard_map(
        lambda x: lax.psum(x, "b") + lax.all_gather(x, "a").sum(axis=0),
        mesh=mesh,
        in_specs=P(("a", "b")),
        out_specs=P(("a", "b")),
        check_vma=False,
    )
    grid = xs.reshape(SIZE // 2, 2, 4, 3)
    want = grid.sum(axis=1, keepdims=True) + grid.sum(axis=0, keepdims=True)
    np.testing.assert_allclose(f(own), want.reshape(xs.shape)[RANK], rtol=1e-5, atol=1e-5)

    loss = lambda w, x: (jnp.tanh(x @ w) ** 2).sum()
    step = pc.jit(lambda w, x: lax.psum(jax.grad(loss)(w, x), "r"), axis_name="r")
    w = values((3, 2))
    np.testing.assert_allclose(step(w, own), jax.grad(loss)(w, xs.reshape(-1, 3)), rtol=1e-4, atol=1e-4)


def test_from_one_to_the_other(world: pc.Communicator) -> None:
    mesh = mesh_of(SIZE)
    xs = values((SIZE, 2, 3))
    own = pc.psum(jnp.asarray(xs[RANK]), world) * (RANK + 1)
    rows = jax.make_array_from_process_local_data(put(xs, mesh, "i").sharding, np.asarray(own)[None])
    total = jax.jit(lambda x: x.sum(axis=0))(rows)
    want = xs.sum(axis=0) * TOTAL
    check(total, want, rtol=1e-5, atol=1e-5)
    again = pc.jit(lambda x: pc.psum(x, world))(total.addressable_data(0))
    np.testing.assert_allclose(again, want * SIZE, rtol=1e-5, atol=1e-4)


def test_global_arrays_are_compared_where_they_are_replicated(world: pc.Communicator) -> None:
    line, x = mesh_of(SIZE), np.arange(2.0 * SIZE, dtype=np.float32)
    cut, whole = put(x, line, "i"), put(x, line)
    own = jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, [jnp.asarray(x + RANK)])
    pc.assert_equal_across([whole, jnp.asarray(x)])
    with pytest.raises(AssertionError, match=rf"by at most {SIZE - 1}, at \[0\]: 0.0 on rank 0, {SIZE - 1}.0 on rank"):
        pc.assert_equal_across({"x": own})
    text = r"arrays .* that this rank has as a whole, got an array cut up among ranks, NamedSharding\(.*\) at \['x'\]"
    with pytest.raises(TypeError, match=text):
        pc.assert_equal_across({"x": cut})
    alone = world.split(color=world.rank)
    assert alone is not None
    pc.assert_equal_across(cut.addressable_data(0), alone)
    alone.free()


def test_devices(world: pc.Communicator) -> None:
    """JAX's numbers are MPI's, and a rank's own device is the one that ours drives."""
    assert jax.process_index() == world.rank
    assert [device.process_index for device in jax.devices()] == list(range(SIZE))
    assert pc.psum(jnp.ones(2), world).devices() == set(jax.local_devices())


def test_a_second_initialize_is_refused() -> None:
    refusal = r"expected a process in which JAX has not started, got jax\.distributed\.initialize\(\)"
    with pytest.raises(RuntimeError, match=refusal):
        pc.distributed.initialize()
