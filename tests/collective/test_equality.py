"""``assert_equal_across``: arrays that are equal on all ranks pass; else all ranks get the same message."""

from __future__ import annotations

import collections
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import pycollective as pc
from pycollective.collectives import equality
from pycollective.errors import name_ranks
from pycollective.ranks.out_of_band import OutOfBand
from tests.cases import values
from tests.collective.test_forward import DTYPES

needs_two = pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="LOUD: needs two ranks (run under mpirun -n 2)")


def told(tree: Any, comm: pc.Communicator) -> list[str]:
    """What the message says of each leaf; all ranks must get the same one."""
    with pytest.raises(AssertionError) as caught:
        pc.assert_equal_across(tree, comm)
    texts = comm.mpi.allgather(str(caught.value))
    assert len(set(texts)) == 1, texts
    form = (
        r"pycollective\.assert_equal_across: expected (.*), got differences:\n  (.*)\. Look for a seed, .* rank 0 has\."
    )
    found = re.fullmatch(form, texts[0], re.DOTALL)
    assert found is not None, texts[0]
    assert found[1] == (f"the same bits in every leaf on all {comm.size} ranks" if comm.size > 1 else "equal copies")
    return found[2].split(";\n  ")


def told_of_last(comm: pc.Communicator, tree: Any, on_last: Any) -> list[str]:
    """The same, where the last rank has another tree. On a communicator of one rank nothing can differ."""
    if comm.size == 1:
        pc.assert_equal_across(on_last, comm)
        return []
    return told(on_last if comm.rank == comm.size - 1 else tree, comm)


def check_last(comm: pc.Communicator, tree: Any, on_last: Any, *expected: str) -> None:
    """Checks what the message says; LAST stands for the number of the last rank."""
    want = [line.replace("LAST", str(comm.size - 1)) for line in expected]
    assert told_of_last(comm, tree, on_last) == (want if comm.size > 1 else [])


def bits(pattern: int, dtype: Any = np.float32) -> Any:
    return np.array([pattern], np.uint32).view(dtype)[0]


# Values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, "float64", "int64", "complex128"])
def test_one_bit(dtype: str, comm: pc.Communicator) -> None:
    tree = {"a": [values((3, 5), dtype), jnp.ones(2)], "b": 3}
    pc.assert_equal_across(tree, comm)
    other = tree["a"][0].copy()
    other.view(np.uint8)[2, -1] ^= 1
    (line,) = told_of_last(comm, tree, tree | {"a": [other, jnp.ones(2)]}) or ["['a'][0]: "]
    assert line.startswith("['a'][0]: ")
    assert comm.size == 1 or " 1 of 15 elements" in line


def test_the_largest_difference(comm: pc.Communicator) -> None:
    x = jnp.arange(6.0).reshape(2, 3)
    y = x.at[0, 1].add(0.25).at[1, 2].add(-0.5)
    shown = "5.0 on rank 0, 4.5 on rank LAST"
    want = f"['w']: rank LAST differs from rank 0 in 2 of 6 elements, by at most 0.5, at [1, 2]: {shown}"
    check_last(comm, {"w": x, "n": 1}, {"w": y, "n": 1}, want)


def test_each_rank_its_own_number(comm: pc.Communicator) -> None:
    if comm.size > 1:
        n = comm.size - 1
        ranks = {1: "rank 1 differs", 2: "ranks 1, 2 differ"}.get(n, f"ranks 1-{n} differ")
        line = f"the tree: {ranks} from rank 0 in 1 of 1 element, by at most {n}: 0 on rank 0, {n} on rank {n}"
        assert told(comm.rank, comm) == [line]


def test_numbers_of_elements_that_differ_by_rank(world: pc.Communicator) -> None:
    if world.size > 2:
        x = np.arange(4) < world.rank
        (line,) = told(x, world)
        text = f" differ from rank 0 in up to {world.size - 1} of 4 elements, at [0]: False on rank 0, True on rank 1"
        assert line.endswith(text)


def test_the_rank_with_the_largest_difference(world: pc.Communicator) -> None:
    if world.size > 2:
        (line,) = told(np.float64({0: 0.0, 1: -7.0}.get(world.rank, 2.0)), world)
        assert line.endswith("by at most 7: 0.0 on rank 0, -7.0 on rank 1")


@pytest.mark.parametrize(
    ("first", "last", "text"),
    [
        (np.int64(-(2**63)), np.int64(2**63 - 1), f"by at most {2**64 - 1}: {-(2**63)} on rank 0, {2**63 - 1} on"),
        (np.uint64(2**64 - 1), np.uint64(1), f"by at most {2**64 - 2}: {2**64 - 1} on rank 0, 1 on"),
        (np.int8(-128), np.int8(127), "by at most 255: -128 on rank 0, 127 on"),
        (np.bool_(True), np.bool_(False), "in 1 of 1 element: True on rank 0, False on"),
        (
            np.float32(1),
            np.nextafter(np.float32(1), np.float32(2)),
            "by at most 1.19209e-07: 1.0 on rank 0, 1.0000001 on",
        ),
        (np.float64(1e308), np.float64(-1e308), "by at most inf: 1e+308 on rank 0, -1e+308 on"),
        (np.float32(np.inf), np.float32(-np.inf), "by at most inf: inf on rank 0, -inf on"),
        (np.float32(np.nan), np.float32(np.inf), "by a NaN: nan on rank 0, inf on"),
        (np.complex64(3), np.complex64(4j), "by at most 5: (3+0j) on rank 0, 4j on"),
        (1e-300, 2e-300, "by at most 1e-300: 1e-300 on rank 0, 2e-300 on"),
        (np.asarray(1.5, jnp.bfloat16), np.asarray(-1.5, jnp.bfloat16), "by at most 3: 1.5 on rank 0, -1.5 on"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_differences(first: Any, last: Any, text: str, comm: pc.Communicator) -> None:
    for line in told_of_last(comm, {"x": first}, {"x": last}):
        assert f"{text} rank {comm.size - 1}" in line
        assert line.startswith(f"['x']: rank {comm.size - 1} differs from rank 0 in 1 of 1 element")


@pytest.mark.parametrize("block", [4, 100])
def test_a_nan_is_told_before_numbers(block: int, comm: pc.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "_BLOCK_BYTES", block)
    x = np.zeros(4, np.float32)
    y = np.array([9, np.nan, np.inf, np.nan], np.float32)
    want = (
        "the tree: rank LAST differs from rank 0 in 4 of 4 elements, by a NaN, at [1]: 0.0 on rank 0, nan on rank LAST"
    )
    check_last(comm, x, y, want)


# Bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "last", "reason", "shown"),
    [
        (0.0, -0.0, "the sign of zero", "0.0 (0x0000000000000000) on rank 0, -0.0 (0x8000000000000000) on"),
        (bits(0x7FC00000), bits(0x7FC00001), "the bits of a NaN", "nan (0x7fc00000) on rank 0, nan (0x7fc00001) on"),
        (
            np.complex64(complex(1, 0.0)),
            np.complex64(complex(1, -0.0)),
            "the sign of zero",
            "(1+0j) (0x000000003f800000) on rank 0, (1-0j) (0x800000003f800000) on",
        ),
        (
            np.asarray(0.0, jnp.bfloat16),
            np.asarray(-0.0, jnp.bfloat16),
            "the sign of zero",
            "0 (0x0000) on rank 0, -0 (0x8000) on",
        ),
        (
            np.array([1], np.uint8).view(bool),
            np.array([2], np.uint8).view(bool),
            "unused bits",
            "at [0]: True (0x01) on rank 0, True (0x02) on",
        ),
    ],
    ids=["zero", "nan", "complex", "bfloat16", "bool"],
)
def test_equal_values(first: Any, last: Any, reason: str, shown: str, comm: pc.Communicator) -> None:
    for line in told_of_last(comm, first, last):
        alone = f"in the bits alone of 1 of 1 element, whose values are equal ({reason})"
        assert line.startswith(f"the tree: rank {comm.size - 1} differs from rank 0 {alone}")
        assert line.endswith(f"{shown} rank {comm.size - 1}")


def test_values_and_bits(comm: pc.Communicator) -> None:
    x = np.array([0.0, 0.0, 1.0, np.nan], np.float32)
    y = np.array([-0.0, -0.0, 1.5, np.nan], np.float32)
    want = (
        "the tree: rank LAST differs from rank 0 in 1 of 4 elements, and in the bits alone of 2 of 4 elements, "
        "by at most 0.5, at [2]: 1.0 on rank 0, 1.5 on rank LAST"
    )
    check_last(comm, x, y, want)


@pytest.mark.parametrize("block", [1, 100])
def test_bools_of_which_one_differs_in_unused_bits(
    block: int, comm: pc.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equality, "_BLOCK_BYTES", block)
    x, y = (np.array(pattern, np.uint8).view(bool) for pattern in ([1, 0], [2, 1]))
    for line in told_of_last(comm, x, y):
        want = "in 1 of 2 elements, and in the bits alone of 1 of 2 elements, at [1]: False on rank 0, True on"
        assert want in line


def test_a_nan_in_one_part_of_a_complex_number(comm: pc.Communicator) -> None:
    x, y = np.array([complex(np.nan, 1)]), np.array([complex(np.nan, 3)])
    for line in told_of_last(comm, x, y):
        assert "in 1 of 1 element, by at most 2, at [0]: (nan+1j) on rank 0, (nan+3j) on rank" in line


def test_how_an_array_lies_in_memory_is_no_difference(comm: pc.Communicator) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    same = [x, np.asfortranarray(x), x.astype(">f4"), jnp.asarray(x), x[:, ::-1].copy()[:, ::-1]]
    pc.assert_equal_across(same[comm.rank % 5], comm)
    pc.assert_equal_across(same[(comm.rank + 2) % 5], comm)
    y = np.arange(4)
    pc.assert_equal_across([y.repeat(2)[::2], y[::-1].copy()[::-1], y][comm.rank % 3], comm)


# Keys -----------------------------------------------------------------------------------------------------


def test_keys(comm: pc.Communicator) -> None:
    keys = jax.random.split(jax.random.key(1), (2, 2))
    others = keys.at[1, 0].set(jax.random.key(7))
    pc.assert_equal_across([keys, jax.random.key(3), keys[:0]], comm)
    shown = f"{jax.random.key_data(keys)[1, 0]} on rank 0, [0 7] on rank LAST"
    want = f"[0]: rank LAST differs from rank 0 in 1 of 4 elements, at [1, 0]: {shown}"
    check_last(comm, [keys], [others], want)


def test_keys_of_another_implementation(comm: pc.Communicator) -> None:
    key, other = jax.random.key(1), jax.random.key(1, impl="rbg")
    check_last(comm, key, other, "the tree: key<fry>[] on rank 0, key<rbg>[] on rank LAST")
    raw = jax.random.key_data(key)
    check_last(comm, key, raw, "the tree: key<fry>[] on rank 0, uint32[2] on rank LAST")


# Shapes, dtypes, trees ------------------------------------------------------------------------------------


def test_shapes_and_dtypes(comm: pc.Communicator) -> None:
    first = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(2, jnp.int32), "c": jnp.zeros((0, 3)), "d": 1.0, "e": 1}
    last = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(2), "c": jnp.zeros((0, 4)), "d": np.float32(1), "e": 1}
    check_last(
        comm,
        first,
        last,
        "['a']: float32[2,3] on rank 0, float32[3,2] on rank LAST",
        "['b']: int32[2] on rank 0, float32[2] on rank LAST",
        "['c']: float32[0,3] on rank 0, float32[0,4] on rank LAST",
        "['d']: float64[] on rank 0, float32[] on rank LAST",
    )


def test_each_rank_its_own_shape(world: pc.Communicator) -> None:
    if world.size > 1:
        own = [f"float32[{rank + 1}] on rank {rank}" for rank in range(world.size)]
        want = [f"the tree: {own[0]}, {other}" for other in own[1:]]
        assert told(jnp.zeros(world.rank + 1), world) == want


def test_arrays_without_elements(comm: pc.Communicator) -> None:
    tree = [jnp.zeros((0, 3)), np.zeros(3, jax.dtypes.float0), jnp.zeros((2, 0, 1), jnp.bfloat16), (), None, {}]
    pc.assert_equal_across(tree, comm)
    pc.assert_equal_across([], comm)
    check_last(comm, tree, [*tree, 1], "[6]: on rank LAST, not on " + name_ranks(range(comm.size - 1)))


def test_trees(comm: pc.Communicator) -> None:
    check_last(
        comm,
        {"a": 1, "b": {"c": 2, "d": 3}},
        {"a": 1, "b": {"d": 4, "e": 5}},
        "['b']['e']: on rank LAST, not on " + name_ranks(range(comm.size - 1)),
        "['b']['c']: int64[] on rank 0, not on rank LAST",
        "['b']['d']: rank LAST differs from rank 0 in 1 of 1 element, by at most 1: 3 on rank 0, 4 on rank LAST",
    )


def test_a_leaf_that_one_rank_lacks_and_another_has_otherwise(world: pc.Communicator) -> None:
    if world.size > 2:
        tree = {0: {"a": 1}, 1: {}, 2: {"a": 3}}.get(world.rank, {"a": 1})
        assert told(tree, world) == [
            "['a']: int64[] on rank 0, not on rank 1",
            "['a']: rank 2 differs from rank 0 in 1 of 1 element, by at most 2: 1 on rank 0, 3 on rank 2",
        ]


def test_containers_do_not_count(comm: pc.Communicator) -> None:
    is_last = comm.rank == comm.size - 1
    pc.assert_equal_across({"a": (1, 2), "b": None} if is_last else {"a": [1, 2]}, comm)
    pairs = [("x", 1), ("y", 2)]
    pc.assert_equal_across(collections.OrderedDict(pairs[::-1] if is_last else pairs), comm)


class SameName:
    """A key of a tree whose name says nothing."""

    def __str__(self) -> str:
        return ".leaf"


@jax.tree_util.register_pytree_with_keys_class
class Pair:
    """A node whose children have the same path."""

    def __init__(self, a: Any, b: Any) -> None:
        self.both = a, b

    def tree_flatten_with_keys(self) -> Any:
        return [(SameName(), x) for x in self.both], None

    @classmethod
    def tree_unflatten(cls, _: None, both: Any) -> Pair:
        return cls(*both)


def test_two_leaves_of_one_path(comm: pc.Communicator) -> None:
    pc.assert_equal_across(Pair(1, 2), comm)
    for first, last, path in ((1, 3, ".leaf (leaf 2 of this path)"), (3, 2, ".leaf")):
        for line in told_of_last(comm, Pair(1, 2), Pair(first, last)):
            assert line.startswith(f"{path}: rank {comm.size - 1} differs")


# What travels ---------------------------------------------------------------------------------------------


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that this rank brings to each exchange; none where rank 0 tells the others something."""
    sizes: list[int] = []

    def counted(step: Any, *, tells: bool) -> Any:
        def counting(out: Any, own: Any, *rest: Any) -> Any:
            sizes.append(0 if tells and out._mpi.rank != 0 else len(pickle.dumps(own)))
            return step(out, own, *rest)

        return counting

    monkeypatch.setattr(OutOfBand, "reduce", counted(OutOfBand.reduce, tells=False))
    monkeypatch.setattr(OutOfBand, "tell", counted(OutOfBand.tell, tells=True))
    return sizes


def test_equal_leaves_do_not_travel(comm: pc.Communicator, exchanges: list[int]) -> None:
    pc.assert_equal_across({str(i): jnp.ones(10_000) for i in range(100)}, comm)
    assert len(exchanges) == 2
    assert max(exchanges) < 300


def test_of_many_leaves_the_first_travel(comm: pc.Communicator, exchanges: list[int]) -> None:
    lines = told_of_last(comm, list(range(20)), [i if i % 2 else -1 for i in range(20)])
    if comm.size > 1:
        assert [line.split(":")[0] for line in lines] == ["[0]", "[2]", "[4]", "[6]", "[8]", "and 5 more"]
        assert all("by at most" in line for line in lines[:5])
        assert len(exchanges) == 2 + 1 + 2 + 5 * 3  # digests, entries, reports; elements and differences of each leaf
        assert (exchanges[2] > 20 * 32) == (comm.rank == 0)  # the digests of all leaves


def test_blocks(comm: pc.Communicator, exchanges: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "_BLOCK_BYTES", 4096)
    x = np.zeros((101, 103), np.float32)
    y = x.copy()
    y[0, 0], y[50, 60], y[100, 102], y[77, 0] = 1.0, -3.0, 2.0, -0.0
    want = (
        "['x']: rank LAST differs from rank 0 in 3 of 10403 elements, and in the bits alone of 1 of 10403 elements, "
        "by at most 3, at [50, 60]: 0.0 on rank 0, -3.0 on rank LAST"
    )
    equal = np.zeros(10**6)
    check_last(comm, {"x": x, "y": equal}, {"x": y, "y": equal}, want)
    if comm.size > 1:
        assert len(exchanges) == 2 + 1 + 2 + -(-x.nbytes // 4096) + 2
        assert max(exchanges) < 4096 + 500
        assert (sum(exchanges) > x.nbytes) == (comm.rank == 0)


def test_blocks_of_keys(comm: pc.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "_BLOCK_BYTES", 20)
    keys = jax.random.split(jax.random.key(1), 7)
    for line in told_of_last(comm, keys, keys.at[6].set(jax.random.key(0)).at[5].set(jax.random.key(5))):
        assert "in 2 of 7 elements, at [5]: " in line
        assert line.endswith(f"[0 5] on rank {comm.size - 1}")


# Devices --------------------------------------------------------------------------------------------------


def mesh_of(*shape: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices("cpu")[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, ("a", "b")[: len(shape)])


def from_copies(copies: list[Any], mesh: jax.sharding.Mesh, spec: Any, shape: tuple[int, ...]) -> jax.Array:
    parts = [jax.device_put(copy, device) for copy, device in zip(copies, mesh.devices.flat, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), parts)


def test_places_do_not_count(comm: pc.Communicator) -> None:
    x = jnp.arange(24.0).reshape(4, 6)
    specs = [(mesh_of(4), P("a")), (mesh_of(2, 2), P("b", "a")), (mesh_of(2, 2), P(None, "b")), (mesh_of(2, 2), P())]
    placed = [jax.device_put(x, NamedSharding(*spec)) for spec in specs]
    keys = jax.random.split(jax.random.key(0), 4)
    placed_keys = [jax.device_put(keys, NamedSharding(mesh, P(*spec[:1]))) for mesh, spec in specs]
    for shift in range(4):
        mine = (comm.rank + shift) % 4
        pc.assert_equal_across([placed[mine], x, placed_keys[mine]], comm)
        pc.assert_equal_across([np.asarray(x), placed[mine], keys], comm)


def test_an_array_that_is_cut_up(comm: pc.Communicator) -> None:
    x = jnp.arange(24.0).reshape(4, 6)
    first, last = (jax.device_put(y, NamedSharding(mesh_of(2, 2), P("b", "a"))) for y in (x, x.at[3, 1].set(-1)))
    shown = "19.0 on rank 0, -1.0 on rank LAST"
    want = f"the tree: rank LAST differs from rank 0 in 1 of 24 elements, by at most 20, at [3, 1]: {shown}"
    check_last(comm, first, last, want)


def test_copies_that_differ(comm: pc.Communicator) -> None:
    mesh, x = mesh_of(3), np.arange(5)
    first = from_copies([x, x, x], mesh, P(), (5,))
    last = from_copies([x, x, -x], mesh, P(), (5,))
    is_last = comm.rank == comm.size - 1
    pc.assert_equal_across(first, comm)
    line = f"['w']: on rank {comm.size - 1} the copies on {mesh.devices[2]} differ from that on its first device"
    assert told({"w": last if is_last else first}, comm) == [line]


def test_copies_of_a_part_that_differ(comm: pc.Communicator) -> None:
    mesh, x = mesh_of(2, 2), np.arange(4)
    parts = [x[:2], x[:2], x[2:], -x[2:]]
    (*lines,) = told(from_copies(parts, mesh, P("a"), (4,)), comm)
    assert lines[0] == f"the tree: on rank 0 the copies on {mesh.devices[1, 1]} differ from that on its first device"
    assert len(lines) == min(comm.size, 6)


def test_the_host_keeps_no_copy(comm: pc.Communicator) -> None:
    x = jnp.arange(8).astype(jnp.int4)  # JAX makes a copy, since integers of 4 bits are packed on the device
    cut = jax.device_put(x, NamedSharding(mesh_of(4), P("a")))
    pc.assert_equal_across([x, cut], comm)
    assert [y._npy_value for y in (x, cut, *(shard.data for shard in cut.addressable_shards))] == [None] * 6


# Programs and threads -------------------------------------------------------------------------------------


def test_the_result_of_a_program_that_still_runs(comm: pc.Communicator) -> None:
    @pc.jit
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        m = jax.lax.fori_loop(0, 40, lambda _, m: jnp.tanh(m @ m), jnp.ones((400, 400)))
        y = pc.psum(x + 0 * m[0, 0], comm)
        return y, y + jnp.float32(pc.axis_index(comm))

    jax.block_until_ready(f(jnp.float32(1)))
    total, own = f(jnp.float32(1))
    pc.assert_equal_across(np.zeros(2), comm)
    assert total.is_ready()  # the programs before have run
    total, own = f(jnp.float32(1))
    pc.assert_equal_across(total, comm)
    if comm.size > 1:
        (line,) = told({"own": own}, comm)
        n = comm.size
        assert line.endswith(f"by at most {n - 1}: {n}.0 on rank 0, {2 * n - 1}.0 on rank {n - 1}")


def test_another_thread(world: pc.Communicator) -> None:
    pc.barrier(world)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            pc.assert_equal_across(1, world)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="second")
    thread.start()
    thread.join()
    assert "expected programs with collectives from one Python thread, 'MainThread'" in str(errors[0])


# Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [jax.jit, pc.jit, jax.vmap, jax.grad, jax.make_jaxpr])
def test_not_in_a_transform(transform: Callable[..., Any], world: pc.Communicator) -> None:
    def f(x: jax.Array) -> jax.Array:
        pc.assert_equal_across({"x": 1})  # it depends on no tracer
        return x.sum()

    if world.rank == 0:  # a rank may trace alone
        text = (
            r"pycollective\.assert_equal_across: expected a call at top level, where arrays have values, "
            r"got one inside jax\.jit or another transform\. Return the arrays from the function, "
            r"and compare them there\."
        )
        with pytest.raises(RuntimeError, match=text):
            transform(f)(jnp.ones(3))


class Opaque:
    """No array."""


@pytest.mark.parametrize(
    ("leaf", "name"),
    [
        ("text", "str of dtype <U4"),
        (Opaque(), "Opaque of dtype object"),
        (2**100, "int of dtype object"),
        (np.zeros(2, np.longdouble), "ndarray of dtype float128"),
        (np.zeros(2, "M8[s]"), r"ndarray of dtype datetime64\[s\]"),
        (np.zeros(2, "i4,f4"), r"ndarray of dtype \[.*\]"),
    ],
    ids=["str", "object", "large int", "longdouble", "datetime", "fields"],
)
def test_not_an_array(leaf: Any, name: str, comm: pc.Communicator) -> None:
    rank, n = comm.rank, comm.size
    mine = (
        r"pycollective\.assert_equal_across: expected arrays of numbers, bools or keys that this rank has as a whole, "
        rf"got {name} at \['x'\] \(rank {n - 1} of {n}\)\. Convert it, or leave it out\."
    )
    tree = {"x": leaf if rank == n - 1 else 1.0, "y": 1}
    if rank == n - 1:
        with pytest.raises(TypeError, match=f"^{mine}"):
            pc.assert_equal_across(tree, comm)
    else:
        text = (
            r"^pycollective\.assert_equal_across: expected leaves that every rank can read, got an error on rank "
            rf"{n - 1}: TypeError: {mine}.* \(rank {rank} of {n}\)\. Look at the error of that rank\."
        )
        with pytest.raises(RuntimeError, match=text):
            pc.assert_equal_across(tree, comm)
    pc.assert_equal_across(1, comm)  # the ranks go on together


def test_a_deleted_array(comm: pc.Communicator) -> None:
    x = jnp.ones(3)
    if comm.rank == 0:
        x.delete()
    text = "deleted" if comm.rank == 0 else "got an error on rank 0: RuntimeError: .*deleted"
    with pytest.raises(RuntimeError, match=text):
        pc.assert_equal_across(x, comm)


@pytest.mark.parametrize("given", ["ranks", MPI.COMM_WORLD])
def test_not_a_communicator(given: Any) -> None:
    with pytest.raises(TypeError, match=r"assert_equal_across: expected a Communicator, got .*Pass pycollective.world"):
        pc.assert_equal_across(1, given)


def test_a_freed_communicator(world: pc.Communicator) -> None:
    part = world.split(color=0)
    assert part is not None
    pc.assert_equal_across(1, part)
    part.free()
    with pytest.raises(ValueError, match="assert_equal_across: expected a live communicator"):
        pc.assert_equal_across(1, part)


@needs_two
def test_others_make_another_first_call(world: pc.Communicator) -> None:
    f = pc.jit(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    if world.rank == 0:
        text = (
            r"expected the other ranks to call assert_equal_across too, got the first call of a function on rank 1 "
            r"\(rank 0 of \d\)\. All ranks must make the same calls in the same order\."
        )
        with pytest.raises(RuntimeError, match=text):
            pc.assert_equal_across(1)
    else:
        with pytest.raises(RuntimeError, match="got a call of assert_equal_across on rank 0"):
            f(jnp.ones(2))
    pc.assert_equal_across(1)
