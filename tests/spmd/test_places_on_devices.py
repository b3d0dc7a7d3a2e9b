"""Ranks may have their arrays on different devices, on different numbers of devices, and in different orders."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pycollective as pc
from pycollective.ranks.setup import devices_of_this_rank
from tests.collective.programs import RUNTIME_ERRORS, meet
from tests.spmd.conftest import LOCAL, SIZE, needs_local

D = max(LOCAL)
RING = [(r, (r + 1) % SIZE) for r in range(SIZE)]


def spread(x: Any, devices: int, first: int = 0) -> jax.Array:
    """Cuts ``x`` into pieces, one on each of ``devices`` local devices, from the device ``first`` on."""
    mesh = Mesh(np.array(jax.local_devices()[first : first + devices]), "d")
    return jax.device_put(x, NamedSharding(mesh, P("d")))


def received(x: Any, world: pc.Communicator) -> Any:
    if world.size == 1:
        return x
    if world.rank % 2 == 0:
        pc.send(x, world, dest=(world.rank + 1) % world.size)
        return pc.recv(x, world)
    y = pc.recv(x, world)
    pc.send(x, world, dest=(world.rank + 1) % world.size)
    return y


OPERATIONS: dict[str, Callable[[Any, pc.Communicator], Any]] = {
    "psum": lambda x, comm: pc.psum(x, comm),
    "psum of a tree": lambda x, comm: pc.psum({"a": x, "b": [x[:3], x * 2]}, comm),
    "pmax": lambda x, comm: pc.pmax(x, comm),
    "all_gather": lambda x, comm: pc.all_gather(x, comm),
    "psum_scatter": lambda x, comm: pc.psum_scatter(x, comm, tiled=True),
    "all_to_all": lambda x, comm: pc.all_to_all(x, comm, 0, 0, tiled=True),
    "ppermute": lambda x, comm: pc.ppermute(x, comm, RING),
    "broadcast": lambda x, comm: pc.broadcast(x, comm, root=SIZE - 1),
    "reduce": lambda x, comm: pc.reduce(x, comm, root=SIZE - 1),
    "gather": lambda x, comm: pc.gather(x, comm, root=SIZE - 1),
    "scatter": lambda x, comm: pc.scatter(x.reshape(SIZE, -1), comm, root=SIZE - 1),
    "scan": lambda x, comm: pc.scan(x, comm),
    "exscan": lambda x, comm: pc.exscan(x, comm),
    "ragged_exchange": lambda x, comm: pc.ragged_exchange(x, jnp.ones(SIZE, int), comm, capacity=len(x))[0],
    "ragged_all_gather": lambda x, comm: pc.ragged_all_gather(x, comm.rank % 2, comm)[0],
    "ragged_gather": lambda x, comm: pc.ragged_gather(x, comm.rank % 2, comm, root=SIZE - 1)[0],
    "ragged_scatter": lambda x, comm: pc.ragged_scatter(x, jnp.ones(SIZE, int), comm, root=SIZE - 1, capacity=2)[0],
    "sendrecv": lambda x, comm: pc.sendrecv(x, comm, source=(comm.rank - 1) % SIZE, dest=(comm.rank + 1) % SIZE),
    "send and recv": received,
    "groups": lambda x, comm: pc.all_gather(x, comm, axis_index_groups=[list(range(SIZE))[::-1]]),
    "loop": lambda x, comm: lax.fori_loop(0, 3, lambda _, x: pc.psum(x, comm) / SIZE + 1, x),
}


ON_HOSTS = pytest.mark.skipif(
    "PYCOLLECTIVE_TEST_STANDIN" in os.environ, reason="LOUD: accelerators need as many copies on each rank"
)


@ON_HOSTS
@pytest.mark.parametrize(
    ("compiler", "name"), [*((pc.jit, name) for name in OPERATIONS), (jax.jit, "psum"), (jax.jit, "loop")]
)
def test_copies(compiler: Any, name: str, world: pc.Communicator) -> None:
    # Rank 0 has its operand on all its devices, rank 1 on two, and rank 2 on one, which is not the first.
    x = np.arange(24.0, dtype=np.float32) + 100 * world.rank
    program = compiler(lambda x: OPERATIONS[name](x + 0, world))
    want = jax.block_until_ready(program(jnp.asarray(x)))
    mine = [spread(x, D), spread(x, min(2, D)), spread(x, 1, first=D - 1)][world.rank % 3]
    for _ in range(3):
        got = jax.block_until_ready(program(mine))
        jax.tree.map(np.testing.assert_array_equal, got, want)


@ON_HOSTS
def test_eagerly(world: pc.Communicator) -> None:
    x = spread(np.arange(24.0, dtype=np.float32), D if world.rank == 0 else 1)
    np.testing.assert_array_equal(pc.psum(x, world), SIZE * np.arange(24.0))


def test_results_of_pmap_are_as_good_as_any(world: pc.Communicator, local: int) -> None:
    y = jax.block_until_ready(pc.pmap(lambda x: lax.psum(x, "i"), "i")(jnp.ones((local, 8))))
    total = SIZE * local
    np.testing.assert_array_equal(pc.psum(y, world), np.full((local, 8), total * SIZE))
    np.testing.assert_array_equal(pc.pmean(y, world), np.full((local, 8), total))
    np.testing.assert_array_equal(pc.all_gather(y, world), np.full((SIZE, local, 8), total))
    np.testing.assert_array_equal(pc.broadcast(y, world), np.full((local, 8), total))
    np.testing.assert_array_equal(jax.jit(lambda y: pc.psum(y, world))(y), np.full((local, 8), total * SIZE))
    np.testing.assert_array_equal(pc.jit(lambda y: pc.pmean(y, world))(y), np.full((local, 8), total))
    along = pc.jit(lambda y: lax.psum(y, "r"), axis_name="r")
    np.testing.assert_array_equal(along(y), np.full((local, 8), total * SIZE))


@pytest.mark.skipif(D < 2, reason="LOUD: needs two local devices")
@pytest.mark.parametrize("count", [6, 1 << 19])
def test_a_mesh_pairs_by_place(count: int, world: pc.Communicator) -> None:
    # Rank 1 has the devices in the opposite order. Devices work together by their places in the mesh.
    devices = devices_of_this_rank()[:D][:: -1 if world.rank == 1 else 1]
    mesh = pc.make_mesh((SIZE, D), ("rank", "device"), devices=devices)
    numbers = world.rank * D + np.arange(D, dtype=np.float32)
    x = np.repeat(numbers[None, :, None], count, axis=2)

    @pc.shard_map(mesh=mesh, in_specs=P("rank", "device"), out_specs=P("rank", "device"))
    def program(x: jax.Array) -> jax.Array:
        along = lax.psum(x, "rank")[..., None]
        gathered = lax.all_gather(x, ("rank", "device"), axis=3, tiled=False).reshape(*x.shape, -1)
        half = lax.ppermute(x, "rank", RING)[..., None]
        whole = lax.ppermute(x, ("rank", "device"), [(i, (i + 1) % (SIZE * D)) for i in range(SIZE * D)])[..., None]
        return jnp.concatenate([along, gathered, half, whole], axis=3)

    got = np.asarray(program(jnp.asarray(x)))[0, :, -1]
    for place in range(D):
        want = [sum(r * D + place for r in range(SIZE)), *range(SIZE * D)]
        want += [(world.rank - 1) % SIZE * D + place, (world.rank * D + place - 1) % (SIZE * D)]
        np.testing.assert_array_equal(got[place], want)


@pytest.mark.skipif(D < 2, reason="LOUD: needs two local devices")
def test_a_mesh_and_a_communicator_in_one_program(world: pc.Communicator) -> None:
    # Device 0 is the last of the mesh, so it has one channel for the axes and another for the communicator.
    devices = devices_of_this_rank()[:D][::-1]
    mesh = pc.make_mesh((SIZE, D), ("rank", "device"), devices=devices)
    comm = pc.world()

    @pc.shard_map(mesh=mesh, in_specs=P("rank", "device"), out_specs=P("rank", "device"))
    def program(x: jax.Array) -> jax.Array:
        for step in range(20):
            x = lax.all_gather(x, "rank").sum(0) / SIZE + step
            x = pc.all_gather(x, comm).sum(0) / SIZE
        return x

    got = program(jnp.full((1, D, 1 << 12), 1.0 + world.rank))
    np.testing.assert_allclose(got, np.full(got.shape, (SIZE + 1) / 2 + 190), rtol=1e-6)


def on_each(function: Callable[..., Any]) -> Any:
    """Makes a program on all of this rank's devices, each of which makes its own calls."""
    mesh = Mesh(np.array(devices_of_this_rank()), "d")
    return pc.jit(jax.shard_map(function, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))


def test_messages_between_devices(world: pc.Communicator) -> None:
    def ring(x: jax.Array) -> jax.Array:
        source, dest = (world.rank - 1) % SIZE, (world.rank + 1) % SIZE
        y = pc.sendrecv(x, world, source=source, dest=dest, send_tag=7, recv_tag=7)
        return pc.sendrecv(y, world, source=dest, dest=source, send_tag=8, recv_tag=8) + y

    numbers = np.arange(D, dtype=np.float32)
    got = on_each(ring)(100 * world.rank + numbers)
    np.testing.assert_array_equal(got, 100 * world.rank + 100 * ((world.rank - 1) % SIZE) + 2 * numbers)


@pytest.mark.skipif(D < 2, reason="LOUD: needs two local devices")
def test_messages_of_any_tag_between_devices(world: pc.Communicator) -> None:
    peer = (world.rank + 1) % SIZE
    program = on_each(lambda x: pc.sendrecv(x, world, source=(world.rank - 1) % SIZE, dest=peer, recv_tag=pc.ANY_TAG))
    text = r"sendrecv: expected a tag from 0 to \d+ in a program on several devices, got any \(rank \d of \d, .*Name"
    with pytest.raises(RUNTIME_ERRORS, match=text):
        jax.block_until_ready(program(np.arange(D, dtype=np.float32)))


@needs_local(4)
def test_axes_that_are_left_to_xla(world: pc.Communicator) -> None:
    mesh = jax.make_mesh((2, 2), ("mine", "its"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mapped = jax.shard_map(
        lambda x: pc.psum(x, world), mesh=mesh, in_specs=P("mine"), out_specs=P("mine"), axis_names={"mine"}
    )
    text = r"allreduce: expected a program on .* manual over all axes of its mesh, got axes \['its'\] that are left to"
    with pytest.raises(NotImplementedError, match=text):
        jax.jit(mapped).lower(jnp.ones((4, 4)))


# Ranks do not communicate while a program is traced, lowered or compiled --------------------------------------


def test_one_rank_compiles_alone(world: pc.Communicator) -> None:
    x = jnp.ones(4)
    if world.rank == 0:
        groups = [list(range(SIZE))[::-1]]
        jax.jit(lambda x: pc.psum(x, world, axis_index_groups=groups)).lower(x).compile()
        jax.jit(jax.grad(lambda x: pc.scan(x, world).sum())).lower(x).compile()
        mesh = pc.make_mesh((SIZE, D), ("a", "b"))
        assert mesh.group_along(("a",))._key != mesh.group_along(("b",))._key
    meet()


@pytest.mark.skipif(SIZE < 4, reason="LOUD: needs 2 x 2 ranks")
def test_a_part_is_made_by_its_ranks_alone(world: pc.Communicator) -> None:
    # The rows are ranks 0, 1 and 2, 3. First only one row makes a call, and then only the other.
    mesh = pc.make_mesh((2, SIZE // 2 * D), ("row", "column"))

    @pc.shard_map(mesh=mesh, in_specs=P("row", "column"), out_specs=P("row", "column"), check_vma=False)
    def program(x: jax.Array, y: jax.Array) -> jax.Array:
        first = lax.axis_index("row") == 0
        x = lax.cond(first, lambda x: lax.all_gather(x, "column").sum(0), lambda x: x, x)
        return lax.cond(first, lambda x: x, lambda x: lax.psum(x, "column"), x) + 0 * y

    got = program(jnp.ones((1, D)), jnp.ones((1, D)))
    np.testing.assert_array_equal(got, np.full((1, D), SIZE // 2 * D))


# Communicators come and go -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(world: pc.Communicator) -> Iterator[list[pc.Communicator]]:
    """Makes 600 communicators of all ranks, which leave few of MPICH's 2048 context ids."""
    if world.size > 2:
        pytest.skip("LOUD: takes minutes where more ranks than cores poll")
    parts = [world.split(0, world.rank) for _ in range(600)]
    yield [part for part in parts if part is not None]
    for part in parts:
        assert part is not None
        part.free()


def test_many_at_once(many: list[pc.Communicator]) -> None:
    np.testing.assert_array_equal(on_each(lambda x: pc.psum(x, many[-1]))(np.ones(D)), np.full(D, SIZE))
    assert pc.psum(1, many[0]) == SIZE


@needs_local(2)
def test_channels_are_given_back(world: pc.Communicator, many: list[pc.Communicator]) -> None:
    # One program with eight communicators compiles faster than eight programs. Each makes D - 1 channels more.
    for _ in range(248 // (8 * (D - 1)) + 1):
        parts = [world.split(0, world.rank) for _ in range(8)]
        program = on_each(lambda x, parts=parts: functools.reduce(lambda x, part: pc.pmax(x, part) + 1, parts, x))
        np.testing.assert_array_equal(program(np.ones(D)), np.full(D, 9.0))
        for part in parts:
            assert part is not None
            part.free()


def test_meshes_come_and_go(world: pc.Communicator) -> None:
    keys = set()
    for i in range(2000):
        mesh = pc.make_mesh((SIZE, D), (f"a{i}", f"b{i}"))
        keys.update(mesh.group_along((name,))._key for name in (f"a{i}", f"b{i}"))
    assert len(keys) == 2
