"""Arguments on other devices are moved, as jax.pmap moves them, and results fit the user's meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pycollective as pc
from pycollective.ranks.setup import devices_of_this_rank
from tests.spmd.cases import own, stacked

Array = Any


def devices(count: int) -> tuple[jax.Device, ...]:
    return devices_of_this_rank()[:count]


def elsewhere(local: int) -> dict[str, Callable[[Array], Array]]:
    """Returns ways to put an array, whose first axis counts the local devices, on other devices than pc.pmap's."""
    theirs = jax.sharding.Mesh(np.array(devices(local)[::-1]), ("other",))
    last = devices_of_this_rank()[-1]
    return {
        "other order": lambda x: jax.device_put(x, NamedSharding(theirs, P("other"))),
        "other axis": lambda x: jax.device_put(x, NamedSharding(theirs, P())),
        "one device": lambda x: jax.device_put(x, last),
        "results": lambda x: pc.pmap(lambda x: 1 * x, "mine", devices=devices(local)[::-1])(x),
    }


def test_arguments_are_moved(world: pc.Communicator, local: int) -> None:
    xs = stacked(world, local)
    mine = own(world, local, xs)
    mesh = pc.make_mesh((-1,), ("i",), devices=devices(local))
    mapped = pc.pmap(lambda x: lax.psum(x, "i") + lax.axis_index("i").astype(x.dtype), "i")
    total = pc.shard_map(lambda x: lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    named = pc.jit(lambda x: lax.psum(x, "i"), axis_name="i")
    want = own(world, local, xs.sum(axis=0) + np.arange(world.size * local, dtype=np.float32)[:, None, None])
    ranks = xs.reshape(world.size, local, *xs.shape[1:]).sum(axis=0)
    for where, put in elsewhere(local).items():
        x = put(mine)
        for _ in range(3):  # the first call finds out that it must move the argument, the next ones know it
            np.testing.assert_allclose(mapped(x), want, rtol=1e-5, atol=1e-5, err_msg=where)
        np.testing.assert_allclose(mapped(np.asarray(x)), want, rtol=1e-5, atol=1e-5, err_msg=where)
        np.testing.assert_allclose(total(x)[0], xs.sum(axis=0), rtol=1e-5, atol=1e-5, err_msg=where)
        np.testing.assert_allclose(named(x), ranks, rtol=1e-5, atol=1e-5, err_msg=where)


def test_arguments_under_a_transform_are_moved(world: pc.Communicator, local: int) -> None:
    mine = own(world, local, stacked(world, local))
    mapped = pc.pmap(lambda x: jnp.sin(lax.psum(x, "i")), "i")
    gradient = jax.grad(lambda x: jnp.sum(jnp.cos(mapped(x))))
    batched = jax.vmap(mapped, in_axes=1)  # the second axis has the same length on all ranks
    gradients, batches = gradient(mine), batched(mine)
    for where, put in elsewhere(local).items():
        x = put(mine)
        np.testing.assert_allclose(gradient(x), gradients, rtol=1e-5, atol=1e-5, err_msg=where)
        np.testing.assert_allclose(batched(x), batches, rtol=1e-5, atol=1e-5, err_msg=where)


def test_shared_parameters_committed_to_one_device(world: pc.Communicator, local: int) -> None:
    # orbax and pc.broadcast return such arrays.
    xs = stacked(world, local)
    for device in {devices(local)[0], devices(local)[-1]}:
        w = jax.device_put(np.full((), 3, np.float32), device)
        step = pc.pmap(lambda w, x: lax.pmean(w["a"][0] * x, "i"), "i", in_axes=(None, 0))
        got = step({"a": [w]}, own(world, local, xs))
        np.testing.assert_allclose(got[0], 3 * xs.mean(axis=0), rtol=1e-5, atol=1e-5)


def test_results_fit_meshes_of_the_user(world: pc.Communicator, local: int) -> None:
    mine = own(world, local, stacked(world, local))
    y = pc.pmap(lambda x: 2 * x, "i", devices=devices(local))(mine)
    sharding = NamedSharding(jax.sharding.Mesh(np.array(devices(local)), ("i",)), P("i"))
    z = jax.device_put(mine, sharding)
    np.testing.assert_array_equal(jax.jit(lambda y, z: y + z)(y, z), 3 * mine)
    np.testing.assert_array_equal(jax.device_put(y, sharding), 2 * mine)
    if local > 1:
        assert y.sharding == sharding
        assert jax.typeof(y).shape == mine.shape


def test_each_others_results(world: pc.Communicator, local: int) -> None:
    # The result of pc.pmap goes to pc.shard_map over two axes, to pc.jit over a name, and round again.
    n = world.size * local
    xs = stacked(world, local)
    mesh = pc.make_mesh((-1, 1), ("data", "model"), devices=devices(local))
    mapped = pc.pmap(lambda x: x + lax.psum(x, "i"), "i")
    shared = pc.shard_map(
        lambda x: x + lax.psum(x, ("data", "model")),
        mesh=mesh,
        in_specs=P("data", "model"),
        out_specs=P("data", "model"),
    )
    named = pc.jit(lambda x: x + lax.pmean(x, "ranks"), axis_name="ranks")
    x: Array = own(world, local, xs)
    want = xs
    for _ in range(2):
        x = mapped(shared(mapped(x)))
        for _ in range(3):
            want = want + want.sum(axis=0)
        x = named(x)
        ranks = want.reshape(world.size, local, *want.shape[1:])
        want = (ranks + ranks.mean(axis=0)).reshape(n, *want.shape[1:])
    np.testing.assert_allclose(x, own(world, local, want), rtol=1e-4)


def test_shardings_of_jit(world: pc.Communicator, local: int) -> None:
    mesh = jax.sharding.Mesh(np.array(devices(local)), ("d",))
    cut, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    x = own(world, local, stacked(world, local))
    double = pc.jit(
        lambda x, k: {"y": 2 * x, "k": k + 1}, in_shardings=(cut, whole), out_shardings={"y": cut, "k": whole}
    )
    for _ in range(2):
        got = double(x, np.float32(1))
        np.testing.assert_array_equal(got["y"], 2 * x)
        assert (got["y"].sharding, got["k"].sharding, float(got["k"])) == (cut, whole, 2.0)
    kept = pc.jit(lambda x: x, out_shardings=cut)(x)  # nothing is computed
    assert kept.sharding == cut
