"""Bad input gives one clear error, at trace time where possible."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import pycollective as pc
from pycollective.config import config
from pycollective.jax_support.jax_dispatch import runtime_tokens
from pycollective.ordering import dispatch
from pycollective.ordering.effect import effect
from pycollective.primitives import lowering
from pycollective.ranks import accelerators
from tests.collective.programs import RUNTIME_ERRORS

needs_two_devices = pytest.mark.skipif(jax.local_device_count() < 2, reason="LOUD: needs two local devices")
needs_two = pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="LOUD: needs two ranks (run under mpirun -n 2)")

X = jnp.ones((5, 7))
COLLECTIVES = [pc.psum, pc.pmean, pc.pmax, pc.pmin, pc.all_gather, pc.psum_scatter, pc.all_to_all, pc.pswapaxes]


def ragged_exchange(x: Any, comm: Any) -> Any:
    return pc.ragged_exchange(x, jnp.zeros(pc.axis_size(), int), comm, capacity=3)


def ragged_all_gather(x: Any, comm: Any) -> Any:
    return pc.ragged_all_gather(x, 1, comm)


def ragged_gather(x: Any, comm: Any, root: Any = 0) -> Any:
    return pc.ragged_gather(x, 1, comm, root=root)


def ragged_scatter(x: Any, comm: Any) -> Any:
    return pc.ragged_scatter(x, jnp.zeros(pc.axis_size(), int), comm, capacity=3)


RAGGED = [ragged_exchange, ragged_all_gather, ragged_gather, ragged_scatter]
TO_ALL = [pc.allreduce, pc.maxloc, pc.minloc]
MPI_ONLY = [pc.broadcast, pc.reduce, pc.gather, pc.scatter, pc.scan, pc.exscan, *TO_ALL, *RAGGED]
BY_ROOT = [pc.broadcast, pc.reduce, pc.gather, ragged_gather]


def each(functions: list[Callable[..., Any]]) -> Any:
    return pytest.mark.parametrize("function", functions, ids=lambda function: function.__name__)


@each([*COLLECTIVES, *MPI_ONLY, pc.pbroadcast, pc.axis_index, pc.axis_size])
@pytest.mark.parametrize("comm", [MPI.COMM_WORLD, 3, True], ids=["mpi4py", "int", "bool"])
def test_not_a_communicator(function: Callable[..., Any], comm: Any) -> None:
    args = (comm,) if function in (pc.axis_index, pc.axis_size) else (X, comm)
    with pytest.raises(
        TypeError, match=r"pycollective\.\w+: expected a Communicator, got .*\. Pass pycollective\.world"
    ):
        function(*args)


@each([*COLLECTIVES, pc.pbroadcast, pc.axis_index, pc.axis_size])
def test_unbound_name(function: Callable[..., Any]) -> None:
    args = ("batch",) if function in (pc.axis_index, pc.axis_size) else (X, "batch")
    extra = (0,) if function is pc.pbroadcast else ()
    with pytest.raises(
        NameError,
        match=r"pycollective\.\w+: expected an axis name that a transform around this call binds \(none here\), or a "
        r"Communicator, got 'batch'\. Bind it with pycollective\.jit\(axis_name='batch'\)",
    ):
        function(*args, *extra)


def test_unbound_name_among_others() -> None:
    def f(x: Any) -> Any:
        return jax.vmap(lambda x: pc.psum(x, ("ranks", "bach")), axis_name="rows")(x)

    with pytest.raises(NameError, match=r"binds \('ranks', 'rows'\), or a Communicator, got 'bach'\. Bind"):
        pc.jit(f, axis_name="ranks")(X)


def test_a_name_that_jax_does_not_know() -> None:
    f = pc.jit(lambda x: jax.lax.psum(x, "bach"), axis_name="batch")
    with pytest.raises(NameError, match="unbound axis name: bach") as caught:
        jax.vmap(f, axis_name="rows")(X)
    (note,) = [note for note in caught.value.__notes__ if "pycollective" in note]
    assert note == (
        "pycollective: the axis names bound around this call: 'batch', 'rows'. pycollective.jit(axis_name=...), "
        "pmap and shard_map bind one."
    )


@each(MPI_ONLY)
def test_name_where_there_is_none(function: Callable[..., Any]) -> None:
    with pytest.raises(
        TypeError, match="expected a Communicator, got 'batch'. This operation has no form over axis names"
    ):
        function(X, "batch")


@each([*COLLECTIVES, *MPI_ONLY])
def test_not_an_array(function: Callable[..., Any], world: pc.Communicator) -> None:
    with pytest.raises(TypeError, match=r"expected arrays, or pytrees of them, got str .*rank \d of \d\)\. Convert"):
        function("text", world)


@each(BY_ROOT)
@pytest.mark.parametrize("root", [-1, 99])
def test_root_out_of_range(function: Callable[..., Any], root: int, world: pc.Communicator) -> None:
    with pytest.raises(
        ValueError, match=rf"expected root from 0 to {world.size - 1}, got {root} \(rank {world.rank} of"
    ):
        jax.jit(lambda x: function(x, world, root=root))(X)


def test_traced_root(world: pc.Communicator) -> None:
    with pytest.raises(
        TypeError, match=r"broadcast: expected root to be an integer, got .*fixed when the program is traced"
    ):
        jax.jit(lambda x, root: pc.broadcast(x, world, root=root))(X, 0)


@pytest.mark.parametrize(
    ("perm", "kind", "text"),
    [
        ([(0, 99)], ValueError, "expected a destination from 0 to"),
        ([(-1, 0)], ValueError, "expected a source from 0 to"),
        ([(0, 0), (0, 0)], ValueError, r"expected each rank once as source, got \[0\] more than once"),
        ([0], TypeError, r"expected \(source, destination\) pairs in perm, got 0"),
        (None, TypeError, "expected perm"),
    ],
)
def test_perm(perm: Any, kind: type[Exception], text: str, world: pc.Communicator) -> None:
    with pytest.raises(kind, match=f"pycollective.ppermute: {text}"):
        jax.jit(lambda x: pc.ppermute(x, world, perm))(X)


def test_pshuffle_perm(world: pc.Communicator) -> None:
    with pytest.raises(ValueError, match=r"pshuffle: expected a permutation of 0 to \d, got \[0, 0, 0, 0, 0\]"):
        pc.pshuffle(X, world, [0] * 5)


@pytest.mark.parametrize("function", [pc.ppermute, pc.pshuffle])
def test_perm_has_no_default(function: Any, world: pc.Communicator) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'perm'"):
        function(X, world)


@needs_two
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x, comm: pc.psum_scatter(x, comm), r"psum_scatter: expected scatter_dimension 0 of length \d"),
        (
            lambda x, comm: pc.psum_scatter(x, comm, tiled=True),
            r"psum_scatter: expected the length of axis 0 to be a multiple of the \d ranks",
        ),
        (lambda x, comm: pc.all_to_all(x, comm, 1, 0), r"all_to_all: expected split_axis 1 of length \d"),
        (lambda x, comm: pc.all_to_all(x, comm, 1, 0, tiled=True), "all_to_all: expected the length of axis 1 to be a"),
        (lambda x, comm: pc.scatter(x, comm), r"scatter: expected axis 0 of length \d"),
    ],
)
def test_shape_does_not_divide(call: Any, text: str, world: pc.Communicator) -> None:
    x = jnp.ones((11, 11))  # 11 is no multiple of 2, 3 or 4
    with pytest.raises(ValueError, match=rf"{text}.*got shape \(11, 11\) \(rank \d of \d\)\."):
        jax.jit(lambda x: call(x, world))(x)


def test_scatter_of_a_scalar(world: pc.Communicator) -> None:
    with pytest.raises(ValueError, match="scatter: expected a leading axis of length"):
        pc.scatter(1.0, world)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, comm: pc.all_gather(x, comm, axis=4), "axis"),
        (lambda x, comm: pc.all_gather(x, comm, axis=2, tiled=True), "axis"),
        (lambda x, comm: pc.psum_scatter(x, comm, scatter_dimension=-3), "scatter_dimension"),
        (lambda x, comm: pc.all_to_all(x, comm, 2, 0), "split_axis"),
        (lambda x, comm: pc.all_to_all(x, comm, 0, 2), "concat_axis"),
    ],
)
def test_axis_out_of_range(call: Any, name: str, world: pc.Communicator) -> None:
    with pytest.raises(ValueError, match=rf"expected {name} from -\d to \d, got"):
        call(X, world)


@pytest.mark.parametrize(
    ("groups", "text"),
    [([[0]] * 2, "each rank from 0 to"), ([[99]], "each rank from 0 to"), ([], "each rank from 0 to")],
)
def test_groups_that_do_not_partition(groups: Any, text: str, world: pc.Communicator) -> None:
    with pytest.raises(ValueError, match=f"expected axis_index_groups with {text}"):
        pc.psum(X, world, axis_index_groups=groups)


@pytest.mark.skipif(MPI.COMM_WORLD.size < 3, reason="LOUD: unequal groups need three ranks")
def test_unequal_groups_of_blocks(world: pc.Communicator) -> None:
    with pytest.raises(ValueError, match="expected axis_index_groups of equal sizes"):
        pc.all_gather(X, world, axis_index_groups=[[0], list(range(1, world.size))])


def test_no_such_reduction(world: pc.Communicator) -> None:
    for function in (pc.reduce, pc.scan, pc.exscan, pc.allreduce):
        with pytest.raises(ValueError, match=r"expected op to be one of \['sum', .*'xor'\], got 'mean'"):
            function(X, world, op="mean")


@each([pc.pmax, pc.pmin])
def test_complex_numbers_have_no_order(function: Callable[..., Any], world: pc.Communicator) -> None:
    with pytest.raises(TypeError, match="expected a dtype that (max|min) is defined for, got complex64"):
        function(jnp.ones(3, jnp.complex64), world)


def test_keys_have_no_sum(world: pc.Communicator) -> None:
    with pytest.raises(TypeError, match="psum: expected a dtype that sum is defined for, got key<fry>"):
        pc.psum(jax.random.key(0), world)


def test_freed_communicator(world: pc.Communicator) -> None:
    part = world.split(color=0)
    assert part is not None
    compiled = pc.jit(lambda x: pc.psum(x, part))
    assert compiled(jnp.ones(2)).tolist() == [world.size] * 2
    part.free()
    part.free()  # a second call does nothing
    assert "freed" in repr(part)
    with pytest.raises(ValueError, match=r"psum: expected a live communicator, got world/0, which was freed \(rank"):
        pc.psum(X, part)
    with pytest.raises(ValueError, match=r"split: expected a live communicator"):
        part.split(0)
    with pytest.raises(
        RUNTIME_ERRORS, match=r"allreduce: expected a live communicator, got a freed one.*communicator world/0"
    ):
        compiled(jnp.ones(2)).block_until_ready()


def test_different_trees(world: pc.Communicator) -> None:
    with pytest.raises(ValueError, match="sendrecv: expected like of the structure of x"):
        pc.sendrecv({"a": X}, world, source=0, dest=0, like={"b": X})


def test_tags(world: pc.Communicator) -> None:
    with pytest.raises(ValueError, match="send: expected tag from 0 to"):
        pc.send(X, world, dest=0, tag=-5)
    with pytest.raises(TypeError, match="recv: expected tag to be an integer"):
        pc.recv(X, world, source=0, tag="a")  # type: ignore[arg-type]


def on_this_rank(world: pc.Communicator, odd: Any, others: Any) -> Any:
    """``odd`` on the last rank, ``others`` on the other ranks."""
    return odd if world.rank == world.size - 1 else others


@needs_two
@pytest.mark.parametrize(
    ("odd", "others"),
    [
        (lambda c: pc.psum(jnp.ones(3), c), lambda c: pc.psum(jnp.ones(4), c)),
        (lambda c: pc.psum(jnp.ones(5), c), lambda c: pc.psum(jnp.ones(5, jnp.int32), c)),
        (lambda c: pc.psum(jnp.ones(6), c), lambda c: pc.pmax(jnp.ones(6), c)),
        (lambda c: pc.broadcast(jnp.ones(2), c, root=0), lambda c: pc.broadcast(jnp.ones(2), c, root=1)),
        (lambda c: pc.all_gather(jnp.ones(2), c), lambda c: pc.scan(jnp.ones(2), c)),
        (lambda c: pc.psum({"a": jnp.ones(1), "b": jnp.ones(2)}, c), lambda c: pc.psum({"a": jnp.ones(1)}, c)),
    ],
    ids=["shape", "dtype", "op", "root", "operation", "pytree"],
)
def test_ranks_that_disagree(odd: Any, others: Any, world: pc.Communicator, request: pytest.FixtureRequest) -> None:
    # The test has a communicator of its own, so that pending messages do not reach other tests.
    comm = world.split(color=0)
    assert comm is not None
    call = on_this_rank(world, odd, others)
    with pytest.raises(RUNTIME_ERRORS, match=r"expected the same call on every rank, got .* here and .* on rank \d"):
        jax.block_until_ready(call(comm))
        jax.block_until_ready(pc.all_gather(jnp.ones(9), comm))  # where only the trees differ, the next call shows it


def test_frozen(world: pc.Communicator) -> None:
    with pytest.raises(AttributeError, match="Communicators are frozen"):
        world.rank = 3
    with pytest.raises(TypeError, match="Make one on each rank"):
        import pickle

        pickle.dumps(world)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (
            {"transport": "pigeon"},
            ValueError,
            r"init: expected transport to be one of \['native', 'mpi4jax'\], got 'pigeon'",
        ),
        ({"timeout": 0}, ValueError, "init: expected timeout to be a positive number of seconds, got 0"),
        ({"devices": 99}, ValueError, r"init: expected devices from 1 to \d+, got 99"),
        ({"devices": "cpu"}, TypeError, "init: expected devices: a number or a sequence of jax.Device, got 'cpu'"),
        pytest.param(
            {"devices": 2}, ValueError, "init: expected the devices of the first call", marks=needs_two_devices
        ),
        ({"timeout": 2}, ValueError, "init: expected the timeout of the first call, None, got 2"),
        ({"comm": MPI.COMM_SELF}, ValueError, "init: expected the world of the first call"),
    ],
)
def test_init(options: dict[str, Any], kind: type[Exception], text: str, world: pc.Communicator) -> None:
    with pytest.raises(kind, match=text):
        pc.init(**options)


def test_only_intracommunicators(world: pc.Communicator) -> None:
    for wrong in (3, MPI.COMM_NULL, "world"):
        with pytest.raises(TypeError, match="Communicator: expected an mpi4py intracommunicator"):
            pc.Communicator(wrong)  # type: ignore[arg-type]


@needs_two_devices
@pytest.mark.native
def test_programs_elsewhere_than_on_the_devices_of_init(world: pc.Communicator) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "i")
    spec = jax.sharding.PartitionSpec("i")
    each = pc.jit(jax.shard_map(lambda x: pc.psum(x, world), mesh=mesh, in_specs=spec, out_specs=spec))
    device = "accelerator" if accelerators.kind_of(jax.devices()[0]) in lowering.ACCELERATORS else "CPU device"
    with pytest.raises(
        RUNTIME_ERRORS, match=rf"allreduce: expected a device of pycollective.init\(devices=...\), got {device} 1"
    ):
        each(jnp.ones(2)).block_until_ready()


@needs_two_devices
def test_one_device_may_be_any(world: pc.Communicator) -> None:
    mine = jax.devices()[world.rank % 2]
    got = pc.psum(jax.device_put(jnp.ones(3), mine), world)
    assert got.tolist() == [world.size] * 3
    assert got.devices() == {mine}


def test_numpy_is_enough(world: pc.Communicator) -> None:
    np.testing.assert_array_equal(pc.psum(np.arange(3), world), world.size * np.arange(3))


@pytest.mark.parametrize("later", ["a program", "a wait for all"])
def test_the_error_of_an_earlier_program_is_raised_once(later: str, world: pc.Communicator) -> None:
    """An accelerator tells the failure of a program after its dispatch, by the token that the program returns."""

    class Failed:
        def devices(self) -> set[jax.Device]:
            return set(jax.local_devices()[:1])

        def is_ready(self) -> bool:
            return True

        def block_until_ready(self) -> None:
            raise jax.errors.JaxRuntimeError("the earlier program failed")

    total = jax.jit(lambda x: pc.psum(x, world))
    total(1.0).block_until_ready()
    runtime_tokens.current_tokens[effect] = type(runtime_tokens.current_tokens[effect])(Failed())
    with pytest.raises(jax.errors.JaxRuntimeError, match="the earlier program failed"):
        total(1.0) if later == "a program" else dispatch.flush()
    assert total(1.0) == world.size
    dispatch.flush()


@needs_two
@pytest.mark.native
@pytest.mark.skipif(config.check.when < 2, reason="LOUD: PYCOLLECTIVE_CHECK leaves calls out")
@pytest.mark.parametrize("later", ["a program", "a wait for all"])
def test_the_error_of_a_program_without_results_is_raised_once(later: str, world: pc.Communicator) -> None:
    """XLA runs such a program after its dispatch, since it computes long."""

    def program(x: jax.Array) -> None:
        for _ in range(3):
            x = x @ x / len(x)
        pc.pmax(x, world)  # XLA leaves out a product that nothing uses
        if world.rank == 0:
            pc.barrier(world)
        else:
            pc.psum(x, world)

    with pytest.raises(RUNTIME_ERRORS, match="expected the same call on every rank"):
        pc.jit(program, axis_name=())(jnp.ones((600, 600)))
        if later == "a wait for all":
            dispatch.flush()
        for _ in range(300 if later == "a program" else 0):  # until the program has ended
            time.sleep(0.1)
            dispatch.wait_for_earlier_programs(dispatch.default_devices())
    dispatch.flush()
    assert pc.psum(1, world) == world.size
