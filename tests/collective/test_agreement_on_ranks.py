"""Calls that differ between ranks and that the ranks know already: an error on every rank, and the next call is right.

All ranks are on one host here, so each sees what all others call (native/shared_memory/board.h). With
``PYCOLLECTIVE_SHARED_MEMORY=off`` they gather their calls, as between hosts (native/calls/comparison.h).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import pycollective as pc
from pycollective.config import config
from tests.collective.programs import RUNTIME_ERRORS

alone = MPI.COMM_WORLD.size == 1
pytestmark = [
    pytest.mark.skipif(alone, reason="LOUD: one rank has nobody to differ from"),
    pytest.mark.skipif(config.check.when < 2, reason="LOUD: PYCOLLECTIVE_CHECK leaves calls out"),
]

X = np.arange(6, dtype=np.float32).reshape(2, 3)
Program = Callable[[jax.Array], jax.Array]


@pytest.fixture
def programs(world: pc.Communicator) -> dict[str, Program]:
    """Programs that every rank has run already, with each of the operands of the tests."""
    made = {
        "sum": jax.jit(lambda x: pc.psum(x, world)),
        "max": jax.jit(lambda x: pc.pmax(x, world)),
        "gather": jax.jit(lambda x: pc.all_gather(x, world)),
    }
    for program in made.values():
        for operand in OPERANDS.values():
            jax.block_until_ready(program(operand))
    return made


OPERANDS = {"x": X, "transposed": X.T, "longer": np.ones((4, 3), np.float32), "integers": X.astype(np.int32)}


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (("sum", "x"), ("max", "x")),
        (("sum", "x"), ("gather", "x")),
        (("sum", "x"), ("sum", "transposed")),
        (("sum", "x"), ("sum", "longer")),
        (("sum", "x"), ("sum", "integers")),
        (("gather", "x"), ("gather", "integers")),
        (("gather", "x"), ("gather", "transposed")),
    ],
    ids=str,
)
def test_known_calls_that_differ(
    first: tuple[str, str], others: tuple[str, str], programs: dict[str, Program], world: pc.Communicator
) -> None:
    program, operand = first if world.rank == 0 else others
    other = 1 if world.rank == 0 else 0
    with pytest.raises(RUNTIME_ERRORS, match=rf"expected the same call on every rank, got .* on rank {other} \(rank"):
        jax.block_until_ready(programs[program](OPERANDS[operand]))
    np.testing.assert_array_equal(programs["sum"](X), X * world.size)


@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["in jit", "outside jit"])
def test_equal_sums_in_another_order(jit: Callable[[Any], Any], world: pc.Communicator) -> None:
    @jit
    def swapped(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        if world.rank == 0:
            first = pc.psum(x, world)
            return first, pc.psum(y, world)
        second = pc.psum(y, world)
        return pc.psum(x, world), second

    line = r"test_agreement_on_ranks.py:\d+"
    message = rf"allreduce\(float32\[2,3\], op=sum\) at {line} .* here and .* at {line} "
    with pytest.raises(RUNTIME_ERRORS, match=message):
        jax.block_until_ready(swapped(X, 2 * X))
    np.testing.assert_array_equal(pc.psum(X, world), X * world.size)


@pytest.mark.parametrize("jit", [jax.jit, pc.jit, lambda function: function], ids=["jax.jit", "pc.jit", "outside jit"])
def test_the_lines_of_equal_calls(jit: Callable[[Any], Any], world: pc.Communicator) -> None:
    """All sums but the first differ by their lines alone, and each call has a line of its own."""

    @jit
    def swapped(x: jax.Array, y: jax.Array) -> jax.Array:
        first = pc.psum(x, world)

        def second() -> jax.Array:
            return pc.psum(first + x, world)

        def third() -> jax.Array:
            return pc.psum(first + y, world)

        return second() + third() if world.rank == 0 else third() + second()

    with pytest.raises(
        RUNTIME_ERRORS, match=r"test_agreement_on_ranks.py:\d+ .*(second|third)\) here and .*(second|third)\) on"
    ):
        jax.block_until_ready(swapped(X, 2 * X))
    np.testing.assert_array_equal(pc.psum(X, world), X * world.size)


@pytest.mark.parametrize("jit", [jax.jit, pc.jit])
@pytest.mark.parametrize("scattered", [False, True], ids=["psum", "psum_scatter"])
def test_a_loop_that_goes_another_way_on_each_rank(
    scattered: bool, jit: Callable[[Any], Any], world: pc.Communicator
) -> None:
    """As one over a set of strings does: the sums have the same line, and equal shapes."""

    def total(x: jax.Array) -> jax.Array:
        return pc.psum_scatter(x, world) if scattered else pc.psum(x, world)

    @jit
    def swapped(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
        names = ("a", "b", "c") if world.rank == 0 else ("a", "c", "b")
        return {name: total(jnp.sin(tree[name])) for name in names}

    x = np.ones((world.size, 2), np.float32)
    with pytest.raises(RUNTIME_ERRORS, match="Sum in the same order on all ranks"):
        jax.block_until_ready(swapped({"a": x, "b": 2 * x, "c": 3 * x}))
    np.testing.assert_array_equal(pc.psum(X, world), X * world.size)


@pytest.mark.parametrize("jit", [jax.jit, pc.jit])
def test_operands_of_two_lines_that_have_changed_places(jit: Callable[[Any], Any], world: pc.Communicator) -> None:
    @jit
    def sums(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        if world.rank == 1:
            x, y = y, x
        first = pc.psum(x, world)
        second = pc.psum(y, world)
        return first, second

    with pytest.raises(RUNTIME_ERRORS, match="Sum in the same order on all ranks"):
        jax.block_until_ready(sums(X, 2 * X))
    np.testing.assert_array_equal(pc.psum(X, world), X * world.size)


@pytest.mark.parametrize("jit", [jax.jit, pc.jit])
def test_each_rank_brings_its_array_to_a_sum_of_its_own_and_zeros_to_the_others(
    jit: Callable[[Any], Any], world: pc.Communicator
) -> None:
    """A gather made of sums. Zeros do not come from the arguments, so they have no place to change."""

    @jit
    def gathered(x: jax.Array) -> list[jax.Array]:
        return [pc.psum(x if rank == world.rank else jnp.zeros_like(x), world) for rank in range(world.size)]

    for rank, got in enumerate(gathered(X + world.rank)):
        np.testing.assert_array_equal(got, X + rank)


@pytest.mark.skipif(
    config.shared_memory == "off", reason="LOUD: without shared memory known broadcasts are not compared"
)
@pytest.mark.parametrize("count", [6, 300], ids=["beside the post", "through buffers"])
def test_other_roots_at_one_line_name_it_on_both_ranks(count: int, world: pc.Communicator) -> None:
    """Each rank is done with its first broadcast when another one may still compare: nobody tells it the line.

    The ranks that have refused a broadcast have made fewer calls than the others, so later data would be mixed.
    """
    comm = world.split(0)  # perhaps not a usable one in the end
    assert comm is not None
    x = np.full(count, 7, np.float32)
    programs = [jax.jit(lambda x, root=root: pc.broadcast(x, comm, root=root)) for root in range(comm.size)]
    total = jax.jit(lambda x: pc.psum(x, comm))

    def error_of(program: Program, x: np.ndarray, want: np.ndarray | None) -> str:
        try:
            got = jax.block_until_ready(program(x))
        except RUNTIME_ERRORS as error:
            return str(error)
        if want is not None:
            np.testing.assert_array_equal(got, want)
        return ""

    for program in programs:
        jax.block_until_ready(program(x))
    errors = MPI.COMM_WORLD.allgather(error_of(programs[comm.rank], x, None))
    assert any(errors)
    for line in filter(None, errors):
        assert re.search(
            r"test_agreement_on_ranks.py:\d+ .* here and .*root=\d\) at test_agreement_on_ranks.py:\d+ .* on rank", line
        ), line
    for trip in range(2):
        ones = np.full(3000, 1 + trip, np.float32)  # through the buffers in which the broadcast may lie
        later = MPI.COMM_WORLD.allgather(error_of(total, ones, ones * comm.size))
        if all(errors):
            assert not any(later)
        elif any(later) or count == 300:
            for error in later:
                assert re.search(r"CollectiveMismatch: .* after a call that differed on rank \d, and that", error)
    np.testing.assert_array_equal(pc.psum(X, world), X * world.size)


@pytest.mark.parametrize("jit", [jax.jit, pc.jit])
def test_ranks_may_sum_other_operands_at_one_line(jit: Callable[[Any], Any], world: pc.Communicator) -> None:
    """Each has its own: the first two of a rank are not those of another one in another order."""
    mine = 2 * world.rank

    @jit
    def sums(xs: list[jax.Array]) -> list[jax.Array]:
        return [pc.psum(x, world) for x in (xs[mine], xs[mine + 1])]

    xs = [np.full(3, i, np.float32) for i in range(2 * world.size)]
    for _ in range(2):
        first, second = sums(xs)
        np.testing.assert_array_equal(first, sum(xs[::2]))
        np.testing.assert_array_equal(second, sum(xs[1::2]))


@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["in jit", "outside jit"])
def test_a_sum_here_and_a_mean_there(jit: Callable[[Any], Any], world: pc.Communicator) -> None:
    @jit
    def reduced(x: jax.Array) -> jax.Array:
        return (pc.psum if world.rank == 0 else pc.pmean)(x, world)

    with pytest.raises(RUNTIME_ERRORS, match="expected the same call on every rank"):
        jax.block_until_ready(reduced(X))


# The dtypes of rank 0 and of the others, which travel alike, and the elements for each rank: on the board, in buffers.
TRAVEL_ALIKE = [
    ("float32", "bfloat16", 4),
    ("float32", "bfloat16", 3000),
    ("float16", "bfloat16", 4),
    ("float8_e4m3fn", "float32", 4),
    ("int32", "bool", 4),
    ("int8", "int4", 4),
]
BY_COMMUNICATOR: dict[str, Callable[[jax.Array, pc.Communicator], Any]] = {
    "psum": pc.psum,
    "pmean": pc.pmean,
    "psum of a tree": lambda x, comm: pc.psum((jnp.ones(3), x), comm),
    "psum on the wire": lambda x, comm: pc.psum(x, comm, wire_dtype=jnp.bfloat16),
    "psum_scatter": pc.psum_scatter,
    "reduce": lambda x, comm: pc.reduce(x, comm, root=0),
    "scan": pc.scan,
    "all_gather": pc.all_gather,
}


@pytest.mark.parametrize("jit", [pc.jit, lambda function: function], ids=["in jit", "outside jit"])
@pytest.mark.parametrize(("first", "other", "count"), TRAVEL_ALIKE)
def test_dtypes_that_travel_alike(
    first: str, other: str, count: int, jit: Callable[[Any], Any], world: pc.Communicator
) -> None:
    """Ranks compare what the user passed: a sum of 16 bits is one of float32, one of bools is one of int32."""
    dtype = first if world.rank == 0 else other
    x = jnp.ones((world.size, count), dtype)
    for reduce in BY_COMMUNICATOR.values() if jit is pc.jit and count == 4 else [pc.psum]:
        with pytest.raises(RUNTIME_ERRORS, match=rf"got \w+\(({dtype}\[|.*several arrays).* here and .* on rank"):
            jax.block_until_ready(jit(lambda x, reduce=reduce: reduce(x, world))(x))
    np.testing.assert_array_equal(pc.psum(X, world), X * world.size)


def test_dtypes_that_travel_alike_by_name(world: pc.Communicator) -> None:
    total = pc.jit(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    operands = [jnp.ones(4, dtype) for dtype in ("float32", "bfloat16")]
    for x in operands:
        jax.block_until_ready(total(x))  # all ranks know both programs
    with pytest.raises(RUNTIME_ERRORS, match=r"(float32|bfloat16)\[4\], .* here and allreduce\((float32|bfloat16)\["):
        jax.block_until_ready(total(operands[min(world.rank, 1)]))


def test_keys_and_their_data(world: pc.Communicator) -> None:
    key = jax.random.key(0)
    with pytest.raises(RUNTIME_ERRORS, match=r"(key|uint32)\[2\]\) at .* here and allgather\((key|uint32)\[2\]"):
        jax.block_until_ready(pc.all_gather(key if world.rank == 0 else jax.random.key_data(key), world))


OF_ROOT: dict[str, Callable[[Any, pc.Communicator], Any]] = {
    "broadcast": lambda x, comm: pc.broadcast(x, comm, root=0),
    "scatter": lambda x, comm: pc.scatter(x, comm, root=0),
    "gather": lambda x, comm: pc.gather(x, comm, root=0),
    "reduce": lambda x, comm: pc.reduce(x, comm, root=0),
    "pbroadcast": lambda x, comm: pc.pbroadcast(x, comm, 0),
}


@pytest.mark.parametrize("name", OF_ROOT)
def test_ranks_that_pass_nothing_to_a_root(name: str, world: pc.Communicator) -> None:
    """As mpi4py's idiom has it; such a rank would make no call at all."""
    for nothing in (None, {"x": None}):
        with pytest.raises(TypeError, match=rf"pycollective.{name}: expected arrays of .* zeros of .*comm.mpi.bcast"):
            OF_ROOT[name](nothing, world)


@pytest.mark.parametrize("name", OF_ROOT)
def test_trees_of_another_structure_at_a_root(name: str, world: pc.Communicator) -> None:
    """In one program: outside a program the root would go on to its next leaf before it reads the error."""
    x = jnp.ones((world.size, 2))
    of_root, other = {"a": x, "b": {"c": x}}, {"a": x, "b": {"c": None}}
    with pytest.raises(RUNTIME_ERRORS, match=r"leaf of tree #\d+\) at .* here and .*shapes, dtypes and pytrees"):
        jax.block_until_ready(pc.jit(lambda x: OF_ROOT[name](x, world))(of_root if world.rank == 0 else other))


EMPTY_OR_NOT: dict[str, Callable[[Any, pc.Communicator], Any]] = {
    "psum": pc.psum,
    "psum on the wire": lambda x, comm: pc.psum(x, comm, wire_dtype=jnp.bfloat16),
    "ppermute": lambda x, comm: pc.ppermute(x, comm, perm=[(0, 1), (1, 0)]),
    "reduce_from": pc.reduce_from,
    "broadcast": pc.broadcast,
}


@pytest.mark.parametrize("name", EMPTY_OR_NOT)
def test_trees_without_arrays(name: str, world: pc.Communicator) -> None:
    """On all ranks the result is the tree, as in JAX. On one rank it would make no call, and the others would wait."""
    call = EMPTY_OR_NOT[name]
    for run in (lambda function: function, pc.jit):
        assert run(lambda tree: call(tree, world))({"a": []}) == {"a": []}
    with pytest.raises(RUNTIME_ERRORS, match=r"barrier\(an empty tree\).* and \w+\(float32|\w+\(float32.*an empty"):
        jax.block_until_ready(call({} if world.rank == 0 else X, world))
    np.testing.assert_array_equal(pc.psum(X, world), X * world.size)


def test_weak_types_are_no_difference(world: pc.Communicator) -> None:
    total = pc.psum(1.0 if world.rank == 0 else jnp.float32(1), world)
    np.testing.assert_array_equal(total, world.size)


DERIVATIVES: dict[str, Callable[[Any], Callable[[jax.Array], Any]]] = {
    "grad": jax.grad,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
}


@pytest.mark.parametrize("jit", [jax.jit, pc.jit, lambda function: function], ids=["jax.jit", "pc.jit", "outside jit"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_function_here_and_its_derivative_there(
    derivative: str, jit: Callable[[Any], Any], world: pc.Communicator
) -> None:
    """The sum of the derivative has the line and the shape of the function's next sum."""

    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(pc.psum(x * x, world))

    function, other = jit(f), jit(DERIVATIVES[derivative](f))
    x = jnp.arange(2.0)
    for known in (function, other):
        jax.block_until_ready(known(x))
    if world.rank == 0:
        function(x)
    word = "transpose of tangent" if derivative == "grad" else "tangent"
    with pytest.raises(RUNTIME_ERRORS, match=rf"at test_agreement_on_ranks.py:\d+ \(\S+f, {word}\)"):
        jax.block_until_ready(function(x) if world.rank == 0 else other(x))
    np.testing.assert_array_equal(pc.psum(X, world), X * world.size)


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_function_by_name_here_and_its_derivative_there(derivative: str, world: pc.Communicator) -> None:
    """JAX's rule for the tangents of a gather makes a gather of the same shape at the same line."""

    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.all_gather(x * x, "i")) if derivative == "grad" else jax.lax.all_gather(x * x, "i")

    both = {"grad": jax.value_and_grad, "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))}[derivative]
    function, other = (pc.jit(g, axis_name="i") for g in (f, both(f)))
    x = jnp.arange(2.0)
    for known in (function, other):
        jax.block_until_ready(known(x))
    with pytest.raises(RUNTIME_ERRORS, match=r"over a named axis in programs with the same collectives"):
        jax.block_until_ready(function(x) if world.rank == 0 else other(x))
    np.testing.assert_array_equal(pc.psum(X, world), X * world.size)


@pytest.mark.parametrize("in_scan", [False, True])
def test_a_function_by_name_here_and_its_transpose_there(in_scan: bool, world: pc.Communicator) -> None:
    """In one program ranks take two branches: the transpose has the shape and the line of the other's next sum."""

    def f(x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(jax.lax.psum(carry * x, "i")), None

        return jax.lax.scan(step, x, None, length=1)[0] if in_scan else step(x, None)[0]

    def program(x: jax.Array, trips: jax.Array) -> jax.Array:
        def trip(_: int, x: jax.Array) -> jax.Array:
            return jax.lax.cond(trips > 1, f, jax.grad(lambda x: jnp.sum(f(x))), x)

        return jax.lax.fori_loop(0, trips, trip, x)

    with pytest.raises(RUNTIME_ERRORS, match=r"at test_agreement_on_ranks.py:\d+ \(\S+step, transpose\)"):
        jax.block_until_ready(pc.jit(program, axis_name="i")(jnp.arange(2.0), 2 if world.rank == 0 else 1))


def test_derivatives_of_functions_of_their_own(world: pc.Communicator) -> None:
    def first_stage(x: jax.Array) -> jax.Array:
        return jnp.sum(pc.psum(x * x, world) ** 2)

    def other_stage(x: jax.Array) -> jax.Array:
        return jnp.sum(pc.psum(x * x, world) ** 2)

    x = jnp.arange(2.0)
    for jit in (jax.jit, lambda function: function):
        gradient = jit(jax.grad(first_stage if world.rank == 0 else other_stage))(x)
        np.testing.assert_allclose(gradient, 4 * world.size**2 * x**3)


def test_ranks_run_functions_of_their_own(world: pc.Communicator) -> None:
    """They make equal calls at lines that the other ranks do not have, as the stages of a pipeline do."""

    def first_stage(x: jax.Array) -> jax.Array:
        return pc.psum(x, world)

    def other_stage(x: jax.Array) -> jax.Array:
        return pc.psum(x, world)

    stage = jax.jit(first_stage if world.rank == 0 else other_stage)
    np.testing.assert_array_equal(stage(X), X * world.size)


def test_ranks_come_to_a_barrier_and_to_a_root_from_lines_of_their_own(world: pc.Communicator) -> None:
    @jax.jit
    def of_root(x: jax.Array) -> jax.Array:
        if world.rank == 0:
            pc.barrier(world)
            return pc.broadcast(x, world, root=0)
        pc.barrier(world)
        return pc.broadcast(jnp.zeros_like(x), world, root=0)

    np.testing.assert_array_equal(of_root(X), X)


@pytest.mark.parametrize("sizes", [(30,), (31,), (7, 0, 23), (7, 24), (0,), (1,) * 30], ids=str)
@pytest.mark.parametrize("reduce", [pc.psum, pc.pmax, pc.pmin], ids=lambda function: function.__name__)
def test_reductions_about_as_large_as_travel_with_the_comparison(
    reduce: Callable[..., Any], sizes: tuple[int, ...], world: pc.Communicator
) -> None:
    """Thirty numbers of 4 B do, together or alone. The result lies in its operand's memory, where JAX lets it."""

    def of_rank(rank: int) -> list[np.ndarray]:
        return [np.random.default_rng([rank, i]).normal(size=size).astype(np.float32) for i, size in enumerate(sizes)]

    program = jax.jit(lambda xs: reduce(xs, world), donate_argnums=0)
    results = [program([jnp.asarray(x) for x in of_rank(world.rank)]) for _ in range(2)]
    combine = {"psum": np.sum, "pmax": np.max, "pmin": np.min}[reduce.__name__]
    for result in results:
        for i, got in enumerate(result):
            np.testing.assert_allclose(
                got, combine([of_rank(rank)[i] for rank in range(world.size)], axis=0), rtol=1e-6
            )
            for other in MPI.COMM_WORLD.allgather(np.asarray(got).tobytes()):
                assert other == np.asarray(got).tobytes()


def test_a_rank_may_be_ahead_in_calls_that_no_rank_must_meet(world: pc.Communicator) -> None:
    """Rank 0 makes all its broadcasts before it sends; the others make theirs when they have received."""
    total = pc.broadcast(jnp.zeros(()), world, root=0)  # between hosts all ranks meet in a call that is new
    if world.rank == 0:
        for number in range(5):
            total += pc.broadcast(jnp.float32(number), world, root=0)
        for other in range(1, world.size):
            pc.send(total, world, dest=other)
    else:
        received = pc.recv(total, world, source=0).block_until_ready()
        for _ in range(5):
            total += pc.broadcast(jnp.float32(0), world, root=0)
        np.testing.assert_array_equal(received, 10)
    np.testing.assert_array_equal(total, 10)


def test_many_communicators_take_and_leave_slots_of_the_board(world: pc.Communicator) -> None:
    """There are 256 slots; each of these communicators takes one and gives it back."""
    for cycle in range(300):
        part = world.split(0)
        assert part is not None
        if cycle % 30 == 0:
            np.testing.assert_array_equal(pc.psum(X, part), X * world.size)
        part.free()


def test_more_communicators_than_slots_and_than_buffers(world: pc.Communicator) -> None:
    """Not all have memory in which their ranks could exchange large arrays; MPI carries those of the others."""
    parts = [part for _ in range(300) if (part := world.split(0)) is not None]
    sums = jax.jit(lambda x: [pc.psum(x, part) for part in parts])  # a program for each would take a minute
    for operand in (np.arange(5000, dtype=np.float32), X):
        for total in sums(operand):
            np.testing.assert_array_equal(total, operand * world.size)
    for part in parts:
        part.free()
