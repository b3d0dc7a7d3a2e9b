"""Communicators: ranks, hosts, splits, identity, and the isolation of their traffic."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import serialize_executable
from mpi4py import MPI

import pycollective as pc
from pycollective.ordering import region
from pycollective.ranks import communicator_resources
from pycollective.ranks.communicator import _place_of_host
from pycollective.transport.mpi import own_communicators


def test_world(world: pc.Communicator) -> None:
    assert pc.world() is world
    assert pc.init() is world
    assert pc.init(MPI.COMM_WORLD, devices=1) is world
    assert (world.rank, world.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert world.mpi == MPI.COMM_WORLD
    assert repr(world) == f"Communicator(world, rank {world.rank} of {world.size})"


def test_completion_shows_what_is_public(world: pc.Communicator) -> None:
    shown = [name for name in dir(world) if not name.startswith("_")]
    places = ["rank", "size", "local_rank", "local_size", "host_index", "host_count"]
    assert sorted(shown) == sorted([*places, "mpi", "name", "split", "split_by_host", "free"])


def test_hosts(world: pc.Communicator) -> None:
    # The tests run on one host.
    assert (world.local_rank, world.local_size) == (world.rank, world.size)
    assert (world.host_index, world.host_count) == (0, 1)
    host = world.split_by_host()
    assert (host.rank, host.size) == (world.rank, world.size)
    assert pc.psum(1, host) == world.size
    host.free()


@pytest.mark.parametrize(
    "host_of",
    [lambda rank: 0, lambda rank: rank, lambda rank: rank % 2, lambda rank: rank // 2, lambda rank: -rank % 3],
    ids=["one", "each", "round robin", "blocks", "backwards"],
)
def test_hosts_have_the_order_of_their_lowest_ranks(host_of: Callable[[int], int]) -> None:
    ranks = MPI.COMM_WORLD
    hosts = [host_of(rank) for rank in range(ranks.size)]
    own = hosts[ranks.rank]
    shared = ranks.Split(own - min(hosts))
    neighbours = [rank for rank, host in enumerate(hosts) if host == own]
    assert _place_of_host(ranks, shared) == {
        "local_rank": neighbours.index(ranks.rank),
        "local_size": len(neighbours),
        "host_index": list(dict.fromkeys(hosts)).index(own),
        "host_count": len(set(hosts)),
    }
    shared.Free()


def test_split(world: pc.Communicator) -> None:
    part = world.split(color=world.rank % 2, key=-world.rank)
    assert part is not None
    members = [r for r in range(world.size) if r % 2 == world.rank % 2][::-1]
    assert (part.rank, part.size) == (members.index(world.rank), len(members))
    np.testing.assert_array_equal(pc.all_gather(world.rank, part), members)
    part.free()


def test_split_without_a_color(world: pc.Communicator) -> None:
    part = world.split(color=None if world.rank == 0 else 1)
    assert (part is None) == (world.rank == 0)
    if part is not None:
        assert pc.psum(1, part) == world.size - 1
        part.free()


def test_equal_by_handle(world: pc.Communicator) -> None:
    assert pc.Communicator(MPI.COMM_WORLD) is world
    mine = pc.Communicator(MPI.COMM_SELF)
    assert pc.Communicator(MPI.COMM_SELF) is mine
    assert mine != world
    assert len({mine, world, pc.Communicator(MPI.COMM_SELF)}) == 2
    assert copy.deepcopy({"comm": world})["comm"] is world


def test_the_users_own_communicator(world: pc.Communicator) -> None:
    theirs = MPI.COMM_WORLD.Dup()
    theirs.Set_name("theirs")
    comm = pc.Communicator(theirs)
    assert comm.name == "theirs"
    assert pc.psum(1, comm) == world.size
    comm.free()
    assert theirs.allreduce(1) == world.size  # not freed: it is the user's
    theirs.Free()


def test_the_users_own_communicator_is_freed(world: pc.Communicator) -> None:
    theirs = MPI.COMM_WORLD.Dup()
    comm = pc.Communicator(theirs)
    assert pc.psum(1, comm) == world.size
    theirs.Free()
    assert comm._is_freed
    with pytest.raises(ValueError, match=rf"expected a live communicator, got unnamed, which was freed.*{world.size}"):
        pc.psum(1, comm)


def test_static_argument(world: pc.Communicator) -> None:
    traces = []

    def f(x: jax.Array, comm: pc.Communicator) -> jax.Array:
        traces.append(comm)
        return pc.psum(x, comm)

    g = jax.jit(f, static_argnums=1)
    for comm in (world, pc.world(), pc.Communicator(MPI.COMM_WORLD)):
        assert g(jnp.ones(1), comm) == world.size
    assert len(traces) == 1


def test_user_traffic_does_not_mix(world: pc.Communicator) -> None:
    # The program waits for a message from any rank, with any tag, on the communicator that it gave to init.
    if world.size == 1:
        return
    buffer = np.zeros(1)
    request = world.mpi.Irecv(buffer, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    perm = [(r, (r + 1) % world.size) for r in range(world.size)]
    assert pc.psum(1, world) == world.size
    assert pc.ppermute(world.rank, world, perm) == (world.rank - 1) % world.size
    y = pc.sendrecv(jnp.asarray(1.0), world, source=perm[world.rank - 1][0], dest=perm[world.rank][1])
    assert y == 1.0
    assert not request.Test()
    pc.barrier(world)
    world.mpi.Send(np.full(1, 7.0), dest=perm[world.rank][1])
    request.Wait()
    assert buffer[0] == 7.0


def test_groups_are_made_once(world: pc.Communicator) -> None:
    groups = (tuple(range(world.size)),)
    assert world._groups(groups) is world._groups(groups)
    assert world._reversed() is world._reversed()
    assert world._reversed().rank == world.size - 1 - world.rank


def test_many_communicators(world: pc.Communicator) -> None:
    # An MPI library has a few thousand communicators, MPICH 2048. Freeing one must free its duplicates, too, on
    # each rank; and so must dropping it.
    if world.size > 2:
        pytest.skip("LOUD: takes minutes where more ranks than cores poll")
    taken = [world.mpi.Dup() for _ in range(1500)]  # few are left, so to lose one in each round is an error
    for i in range(420):
        part = world.split(color=0)
        assert part is not None
        if i % 100 == 0:
            assert pc.psum(i, part) == i * world.size
        if i % 4 == 0:
            part.free()
        theirs = MPI.COMM_WORLD.Dup()
        pc.Communicator(theirs)
        theirs.Free()
    for mpi in taken:
        mpi.Free()


def in_use(world: pc.Communicator) -> int:
    """How many communicators this rank has, once those that no rank uses are given back."""
    gc.collect()
    world._resources._release_unused_splits(world.mpi)
    return len(communicator_resources.in_use)


def program_of_a_split(world: pc.Communicator) -> Callable[[jax.Array], jax.Array]:
    part = world.split(color=0)
    f = jax.jit(lambda x: pc.psum(x, part))
    assert f(jnp.ones(3)).tolist() == [world.size] * 3
    part = None
    return f


@pytest.mark.native  # programs by mpi4jax hold their communicators for ever
def test_dropped_splits_are_given_back(world: pc.Communicator) -> None:
    before = in_use(world)
    shared = len(own_communicators)
    world._resources._next_agreement = 0  # earlier tests have made many splits, and the next look would come late
    for i in range(200):
        part = world.split(color=world.rank % 2 if i % 2 else 0)
        assert part is not None
        if i == 5:
            pc.psum(i, part)
        if i == 6:
            jax.jit(lambda x, part=part: pc.psum(x, part))(jnp.ones(2))
        if i == 7:
            pc.jit(lambda x, part=part: pc.psum(x, part))(jnp.ones(2))
        if i == 8:
            pc.pmap(lambda x: lax.psum(x, "i"), "i", comm=part)(jnp.ones((1, 2)))
        if i == 9:
            inner = part.split(color=0)
            pc.psum(i, inner)
            pc.psum(i, inner, axis_index_groups=[range(inner.size)])
        if i in (10, 11):
            swap = lambda x, part=part: pc.isendrecv(x, part, source=part.rank, dest=part.rank)
            pc.wait((jax.jit(swap) if i == 10 else swap)(jnp.ones(2)))
            del swap
    del part, inner
    assert len(communicator_resources.in_use) < before + 2 * 64  # most have gone in the loop
    assert in_use(world) == before
    assert len(own_communicators) == shared


@pytest.mark.parametrize("in_cycles", [False, True])
def test_cycles_are_collected_where_splits_stay(in_cycles: bool, world: pc.Communicator) -> None:
    before = in_use(world)
    collections = []

    def note(phase: str, _: dict[str, int]) -> None:
        collections.append(phase)

    gc.disable()
    gc.callbacks.append(note)
    try:
        for _ in range(200):
            cycle: list[Any] = [world.split(color=0)]
            if in_cycles:
                cycle.append(cycle)
        assert len(communicator_resources.in_use) < before + 2 * 64
        assert bool(collections) == in_cycles
    finally:
        gc.callbacks.remove(note)
        gc.enable()


@pytest.mark.parametrize(
    "what",
    [
        "object",
        "mpi",
        "inner",
        "jit",
        "compiled",
        "lowered",
        "loaded",
        "vjp",
        pytest.param("request", marks=pytest.mark.native),
    ],
)
def test_a_split_that_is_used_stays(what: str, world: pc.Communicator) -> None:
    x = jnp.ones(3)
    made = world.split(color=0)
    assert made is not None
    part: pc.Communicator = made
    inner = part.split(color=0)

    def f(x: jax.Array, part: pc.Communicator = part) -> jax.Array:
        return pc.psum(x, part)

    # Rank 0 keeps it and the others drop it; a program stays on all ranks, to run there.
    own: Any = None
    if what == "object":
        own = part if world.rank == 0 else None
    elif what == "mpi":
        own = part.mpi if world.rank == 0 else None
    elif what == "inner":
        own = inner if world.rank == 0 else None
    elif what == "jit":
        own = program_of_a_split(world)
    elif what == "vjp":
        own = jax.vjp(f, x)[1]
    elif what == "request":
        own = jax.jit(lambda x, part=part: pc.isendrecv(x, part, source=part.rank, dest=part.rank))(x)
    elif what == "loaded":  # it has a number alone
        written = serialize_executable.serialize(jax.jit(region.Region(f)).lower(x).compile())
        own = serialize_executable.deserialize_and_load(*written, execution_devices=jax.local_devices()[:1])
    else:
        own = jax.jit(f).lower(x)
        own = own.compile() if what == "compiled" else own
    key = part._key
    del made, part, inner, f
    in_use(world)
    if own is not None and what in ("object", "inner"):
        assert not own._is_freed
    elif what == "mpi":
        of_other = [k for k in communicator_resources.in_use.values() if k.facts["_program_key"] == key]
        assert len(of_other) == 1
        again = pc.Communicator(of_other[0].mpi if own is None else own)
        assert pc.psum(1, again) == world.size
        assert pc.Communicator(again.mpi) is again
    elif what == "request":
        assert pc.wait(own).tolist() == x.tolist()
    elif own is not None:
        own = own.compile() if what == "lowered" else own
        (result,) = own(x) if what == "vjp" else (own(x),)
        assert result.tolist() == [world.size] * 3


def test_a_function_over_the_ranks_of_a_split(world: pc.Communicator) -> None:
    # All ranks in the opposite order, and pairs of ranks.
    for part in (world.split(color=0, key=-world.rank), world.split(color=world.rank // 2)):
        assert part is not None
        members = [r + 1.0 for r in part.mpi.allgather(world.rank)]
        x = jnp.float32(world.rank + 1)

        def f(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            return lax.psum(x, "i"), lax.axis_index("i"), lax.all_gather(x, "i")

        for total, index, gathered in (
            pc.jit(f, axis_name="i", comm=part)(x),
            jax.tree.map(lambda y: y[0], pc.pmap(f, "i", comm=part)(x[None])),
        ):
            assert total == sum(members)
            assert index == part.rank
            assert gathered.tolist() == members
        part.free()
