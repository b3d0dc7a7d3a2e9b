"""Which ranks make XLA's communicators, and when: only those that call, in whatever order they come to it.

XLA has one communicator for each list of devices, its clique, as long as the process lives. So a test that is about the
first use of a clique takes devices in an order that no other test takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import pycollective as pc
from pycollective.distributed.cliques import Cliques, learn_from_each_compilation
from pycollective.jax_support.jax_dispatch import compiler
from tests.collective.programs import RUNTIME_ERRORS, meet
from tests.distributed.arrays import RANK, SIZE, by_mpi, check, mesh_of, needs_four, put, values

Array = Any


def sum_over(mesh: Mesh) -> Any:
    """A jitted sum over all devices of a mesh, of an array whose first dimension lies on them."""
    names = mesh.axis_names
    total = lambda x: lax.psum(x, names)
    return jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P(names), out_specs=P(), check_vma=False))


def check_sum(ranks: Sequence[int]) -> None:
    mesh = mesh_of(len(ranks), order=ranks)
    x = values((len(ranks), 3))
    check(sum_over(mesh)(put(x, mesh, "i")), x.sum(axis=0, keepdims=True), rtol=1e-5, atol=1e-6)


def test_some_ranks_while_others_do_nothing() -> None:
    for ranks in ([SIZE - 1], [SIZE - 1, 0], list(range(SIZE))[1:]):
        if RANK in ranks:
            check_sum(ranks)
    meet()


def test_some_ranks_while_others_wait_for_none_of_them() -> None:
    """Rank 0 comes to its programs when the others have theirs behind them, and the other way round."""
    others = list(range(1, SIZE))[::-1]
    comm = MPI.COMM_WORLD
    if RANK == 0:
        check_sum([0])
        comm.send("rank 0 is done", 1)
        comm.recv(source=1)
    else:
        if RANK == 1:
            comm.recv(source=0)
        check_sum(others)
        if RANK == 1:
            comm.send("the others are done", 0)


@needs_four
def test_each_pair_its_own_programs() -> None:
    own = [1, 0] if RANK < 2 else [3, 2]
    for _ in range(1 + 2 * (RANK // 2)):  # one pair has more programs than the other
        check_sum(own)
    check_sum([3, 1, 0, 2])


def branches(order: Sequence[int], first: Callable[[Array], Array], second: Callable[[Array], Array]) -> Any:
    """What a program gives that takes one branch on the first row of a mesh, and another one on the others."""
    mesh = mesh_of(2, SIZE // 2, order=order)
    x = values((*mesh.devices.shape, 3))
    block = lambda x: lax.cond(lax.axis_index("i") == 0, first, second, x)
    f = jax.jit(jax.shard_map(block, mesh=mesh, in_specs=P("i", "j"), out_specs=P("i", "j"), check_vma=False))
    return f(put(x, mesh, "i", "j")), x


def test_a_branch_that_one_row_takes() -> None:
    y, x = branches([1, 3, 0, 2] if SIZE == 4 else [1, 0], lambda x: lax.psum(x, "j"), lambda x: x)
    want = x.copy()
    want[0] = x[0].sum(axis=0)
    check(y, want, rtol=1e-5, atol=1e-6)


def test_rows_that_come_to_two_cliques_in_opposite_order() -> None:
    """The cliques of the first row and of all have the same first device, which is all that XLA tells MPI of them."""
    y, x = branches(
        [2, 1, 3, 0] if SIZE == 4 else [1, 0],
        lambda x: lax.psum(lax.psum(x, "j"), ("i", "j")),
        lambda x: lax.psum(lax.psum(x, ("i", "j")), "j"),
    )
    total = x[0].sum(axis=0) * len(x[0]) + x[1].sum(axis=0)
    want = np.broadcast_to(np.stack([total, total * len(x[1])])[:, None], x.shape)
    check(y, want, rtol=1e-5, atol=1e-5)


@needs_four
def test_pairs_that_come_to_two_programs_in_opposite_order() -> None:
    pair, everybody = [2, 0] if RANK in (2, 0) else [1, 3], [2, 0, 1, 3]
    for ranks in (pair, everybody) if RANK in (2, 0) else (everybody, pair):
        check_sum(ranks)


def test_one_rank_compiles_alone() -> None:
    mesh = mesh_of(SIZE, order=np.roll(range(SIZE), 1))
    x = values((SIZE, 3))
    f = sum_over(mesh)
    if RANK == SIZE - 1:
        f.lower(put(x, mesh, "i")).compile()
    meet()  # the others do not compile before that
    check(f(put(x, mesh, "i")), x.sum(axis=0, keepdims=True), rtol=1e-5, atol=1e-6)


def test_ranks_compile_in_different_orders() -> None:
    shapes = [(SIZE // 2, 2), (2, SIZE // 2), (SIZE, 1)]
    orders = [[0, 3, 2, 1], [3, 0, 1, 2], [1, 2, 3, 0]] if SIZE == 4 else [[0, 1], [1, 0], [0, 1]]
    programs = []
    for shape, order in zip(shapes, orders, strict=True):
        mesh = mesh_of(*shape, order=order)
        x = values((SIZE, 5))
        rows = jax.shard_map(
            lambda x: lax.psum(x, "i") + lax.all_gather(x, "j").sum(axis=0) + lax.ppermute(x, ("i", "j"), [(0, 0)]),
            mesh=mesh,
            in_specs=P(("i", "j")),
            out_specs=P(("i", "j")),
            check_vma=False,
        )
        programs.append((jax.jit(rows), put(x, mesh, ("i", "j")), x.reshape(*shape, 5)))
    compiled = {k: programs[k][0].lower(programs[k][1]).compile() for k in np.roll(range(3), RANK).tolist()}
    meet()
    for k, (_, given, x) in enumerate(programs):
        want = x.sum(axis=0, keepdims=True) + x.sum(axis=1, keepdims=True)
        want[0, 0] += x[0, 0]
        check(compiled[k](given), want.reshape(SIZE, 5), rtol=1e-5, atol=1e-5)


@by_mpi
def test_ranks_that_call_with_different_shapes() -> None:
    """It is an error on each rank, and does not hurt the clique. No rank has made either call before on this clique."""
    order = np.roll(range(SIZE), 2 if SIZE == 4 else 1).tolist()
    mesh = mesh_of(SIZE, order=order)
    own = jnp.ones((1, 101 + (RANK == 1)))
    cut = put(values((SIZE,)), mesh, "i").sharding
    x = jax.make_array_from_single_device_arrays((SIZE, own.shape[1]), cut, [own])
    with pytest.raises(RUNTIME_ERRORS) as error:
        jax.block_until_ready(sum_over(mesh)(x))
    said = " ".join(str(error.value).split())
    assert "pycollective.allreduce: CollectiveMismatch: expected the same call on every rank, got allreduce(" in said
    assert f"(rank {order.index(RANK)} of {SIZE}, communicator global arrays{order})" in said
    assert "allreduce(float32[101], op=sum)" in said
    assert "allreduce(float32[102], op=sum)" in said
    check(sum_over(mesh)(put(values((SIZE, 3)), mesh, "i")), values((SIZE, 3)).sum(axis=0, keepdims=True), rtol=1e-5)


@by_mpi
def test_ranks_that_call_different_collectives() -> None:
    mesh = mesh_of(SIZE, order=[0, 2, 1, 3] if SIZE == 4 else [1, 0])
    reduction = lax.pmax if RANK == 1 else lax.psum
    block = lambda x: reduction(x, "i")
    f = jax.jit(jax.shard_map(block, mesh=mesh, in_specs=P("i"), out_specs=P(), check_vma=False))
    with pytest.raises(RUNTIME_ERRORS, match=r"expected the same call on every rank, got allreduce\(.*, op=(sum|max)"):
        jax.block_until_ready(f(put(values((SIZE, 11)), mesh, "i")))


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """A directory of all ranks with programs that JAX has compiled, and the list of JAX's events."""
    folder = MPI.COMM_WORLD.bcast(str(tmp_path_factory.mktemp("cache")) if RANK == 0 else None)
    options = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    events: list[str] = []
    listener = lambda event, **_: events.append(event)
    jax.monitoring.register_event_listener(listener)
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield Path(folder), events
    jax.monitoring.unregister_event_listener(listener)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    meet()


def test_the_compilation_cache(cache: tuple[Path, list[str]]) -> None:
    folder, events = cache
    mesh = mesh_of(SIZE)
    x = values((SIZE, 3))

    def program(x: Array) -> Array:
        return jnp.cos(x).sum(axis=0)

    for turn in range(2):
        given = put(x, mesh, "i")
        events.clear()
        check(jax.jit(program)(given), np.cos(x).sum(axis=0), rtol=1e-5, atol=1e-5)
        meet()
        assert any("program" in file.name for file in folder.iterdir())
        # JAX lets the first process write; another one has other keys, and compiles.
        hits = events.count("/jax/compilation_cache/cache_hits")
        assert hits == (1 if turn == 1 and RANK == 0 else 0)
        jax.clear_caches()


def serialized(mesh: Mesh, x: np.ndarray) -> Any:
    return serialize_executable.serialize(sum_over(mesh).lower(put(x, mesh, "i")).compile())


def test_a_serialized_program() -> None:
    mesh = mesh_of(SIZE)
    x = values((SIZE, 3))
    program = serialize_executable.deserialize_and_load(*serialized(mesh, x))
    check(program(put(x, mesh, "i")), x.sum(axis=0, keepdims=True), rtol=1e-5, atol=1e-6)


def not_learned(monkeypatch: pytest.MonkeyPatch, mesh: Mesh, x: np.ndarray) -> Any:
    """A program as it comes from another process."""
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "compile_or_get_cached", compiler.compile_or_get_cached.__wrapped__)
        return serialize_executable.deserialize_and_load(*serialized(mesh, x))


@by_mpi
@needs_four
def test_a_program_of_a_clique_that_was_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs when another program has named the clique."""
    mesh = mesh_of(SIZE, order=[3, 2, 0, 1])
    x = values((SIZE, SIZE, 3))
    program = not_learned(monkeypatch, mesh, x)
    with pytest.raises(RUNTIME_ERRORS, match=r"expected a program that jax\.jit has compiled in this process"):
        jax.block_until_ready(program(put(x, mesh, "i")))
    meet()
    check(sum_over(mesh_of(2, 2, order=[3, 2, 0, 1]))(put(x, mesh, "i")), x.sum(axis=0, keepdims=True), rtol=1e-5)
    check(program(put(x, mesh, "i")), x.sum(axis=0, keepdims=True), rtol=1e-5, atol=1e-6)
    # XLA has kept what it was told of the communicator when that program was refused.
    exchange = lambda x: lax.all_to_all(x, "i", split_axis=1, concat_axis=0)
    exchanged = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    got = exchanged(put(x, mesh, "i"))
    check(got, x.swapaxes(0, 1).reshape(got.shape))


@by_mpi
@needs_four
def test_a_part_of_the_processes_that_was_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA was told that it has as many members as there are processes, so nobody may use it any more."""
    ranks = [1, 3, 0]
    mesh = mesh_of(3, order=ranks)
    x = values((3, 3))
    if RANK in ranks:
        program = not_learned(monkeypatch, mesh, x)
        with pytest.raises(RUNTIME_ERRORS, match=r"expected a program that jax\.jit has compiled in this process"):
            jax.block_until_ready(program(put(x, mesh, "i")))
        with pytest.raises(RUNTIME_ERRORS, match="got one that another program has used before"):
            jax.block_until_ready(sum_over(mesh)(put(x, mesh, "i")))
    meet()


def test_names_that_look_like_groups() -> None:
    mesh = mesh_of(SIZE)
    x = values((SIZE, 3))
    with jax.named_scope('replica_groups={} custom_call_target="pycollective_'):
        y = jax.jit(lambda x: jnp.sin(x).sum(axis=0))(put(x, mesh, "i"))
    check(y, np.sin(x).sum(axis=0), rtol=1e-5, atol=1e-6)


@pytest.fixture
def nothing_learned(monkeypatch: pytest.MonkeyPatch, world: pc.Communicator) -> None:
    """As in a process that knows no clique yet."""
    monkeypatch.setattr(compiler, "compile_or_get_cached", compiler.compile_or_get_cached.__wrapped__)
    part = world.split(0)
    assert part is not None
    learn_from_each_compilation(Cliques(part))


@contextlib.contextmanager
def for_all_threads(name: str, value: Any) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    yield
    jax.config.update(name, before)


CONTEXTS: dict[str, Callable[[Mesh], AbstractContextManager[Any]]] = {
    "set_mesh": jax.set_mesh,
    "set_mesh, explicit": jax.set_mesh,
    "disable_jit": lambda _: jax.disable_jit(),
    "enable_x64": lambda _: jax.enable_x64(True),
    "default_device": lambda _: jax.default_device(jax.local_devices()[0]),
    "transfer_guard": lambda _: jax.transfer_guard("disallow"),
    "debug_nans": lambda _: jax.debug_nans(True),
    "disable_jit for all threads": lambda _: for_all_threads("jax_disable_jit", True),
    "transfer_guard for all threads": lambda _: for_all_threads("jax_transfer_guard", "disallow"),
}


@by_mpi
@pytest.mark.usefixtures("nothing_learned")
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_first_use_under_a_context(name: str) -> None:
    """A clique is learned while the user's program is compiled, wherever that is."""
    kind = jax.sharding.AxisType.Explicit if "explicit" in name else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((SIZE,), ("i",), axis_types=(kind,))
    xs = values((SIZE, 3))
    x = put(xs, mesh, "i")
    with CONTEXTS[name](mesh):
        y = jax.jit(lambda x: x.sum(axis=0))(x)
    check(y, xs.sum(axis=0), rtol=1e-5, atol=1e-6)


@by_mpi
@pytest.mark.usefixtures("nothing_learned")
def test_a_first_use_inside_a_trace() -> None:
    xs = values((SIZE, 3))
    x = put(xs, mesh_of(SIZE), "i")

    @jax.jit
    def program(z: Array) -> Array:
        with jax.ensure_compile_time_eval():
            first = float(x.sum())
        return z * first

    assert program(2.0) == pytest.approx(2 * xs.sum(), rel=1e-4, abs=1e-5)
