"""Collectives of rows, of which each rank may have another number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import pycollective as pc
from tests.cases import values
from tests.collective.programs import RUNTIME_ERRORS

Array = Any

ROWS, ROWS_THERE = 9, 24
"""The rows of each rank's operand and of its result."""


def slices_of_all(size: int, each: int, seed: int = 0) -> np.ndarray:
    """The slices of all ranks, of shape ``(size, 4, size * each)``; those of an operand overlap."""
    generator = np.random.default_rng(seed)
    sent = generator.integers(0, 3, (size, size, each))  # by sender, receiver, number
    sources = generator.integers(0, ROWS - 2, sent.shape)
    targets = np.zeros_like(sent)
    for receiver in range(size):  # in another order than that of the ranks, and with room between them
        order = generator.permutation(size * each)
        lengths = sent[:, receiver].reshape(-1)[order]
        free = ROWS_THERE - lengths.sum()
        gaps = np.sort(generator.integers(0, free + 1, size * each))
        starts = np.empty(size * each, int)
        starts[order] = np.cumsum(lengths) - lengths + gaps
        targets[:, receiver] = starts.reshape(size, each)
    received = np.moveaxis(sent, 1, 0)
    return np.stack([sources, sent, targets, received], axis=1).reshape(size, 4, size * each)


def expected(outputs: Array, operands: Array, slices: np.ndarray) -> Array:
    """The results of all ranks, by JAX's definition."""
    size = len(operands)
    each = slices.shape[-1] // size
    results = list(outputs)
    for sender in range(size):
        for i, (source, sent, target, _) in enumerate(slices[sender].T):
            rows = operands[sender][source : source + sent]
            results[i // each] = results[i // each].at[target : target + sent].set(rows)
    return jnp.stack(results)


def exchange(comm: pc.Communicator, slices: np.ndarray) -> Callable[[Array, Array], Array]:
    return lambda output, x: pc.ragged_all_to_all(x, output, *slices[comm.rank], axis_name=comm)


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int16", "complex64", "float8_e5m2", "int4"])
def test_slices_go_where_the_sender_says(dtype: str, each: int, world: pc.Communicator) -> None:
    comm = world
    slices = slices_of_all(comm.size, each)
    xs = jnp.asarray(values((comm.size, ROWS, 2, 3), dtype))
    outputs = jnp.asarray(values((comm.size, ROWS_THERE, 2, 3), dtype, seed=1))
    want = expected(outputs, xs, slices)[comm.rank]
    own = outputs[comm.rank], xs[comm.rank]
    for call in (exchange(comm, slices), jax.jit(exchange(comm, slices))):
        got = call(*own)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    np.testing.assert_array_equal(np.asarray(own[0]), np.asarray(outputs[comm.rank]))  # it has not taken the buffer


def test_derivatives(comm: pc.Communicator) -> None:
    # Cotangents of a row that is in several slices are added; the rows of `output` that are replaced have none.
    slices = slices_of_all(comm.size, 2, seed=3)
    xs, ts = values((comm.size, ROWS, 2)), values((comm.size, ROWS, 2), seed=1)
    outputs, us = values((comm.size, ROWS_THERE, 2), seed=2), values((comm.size, ROWS_THERE, 2), seed=3)
    cts = values((comm.size, ROWS_THERE, 2), seed=4)
    r = comm.rank

    def of_all(outputs: Array, xs: Array) -> Array:
        return expected(outputs, xs, slices)

    want, tangent = jax.jvp(of_all, (jnp.asarray(outputs), jnp.asarray(xs)), (jnp.asarray(us), jnp.asarray(ts)))
    _, pull = jax.vjp(of_all, jnp.asarray(outputs), jnp.asarray(xs))
    call = exchange(comm, slices)
    got, own_tangent = jax.jvp(call, (outputs[r], xs[r]), (us[r], ts[r]))
    np.testing.assert_array_equal(got, want[r])
    np.testing.assert_array_equal(own_tangent, tangent[r])
    for own, of_rank in zip(jax.vjp(call, outputs[r], xs[r])[1](cts[r]), pull(jnp.asarray(cts)), strict=True):
        np.testing.assert_allclose(own, of_rank[r], rtol=1e-6)
    # The transpose of the transpose: a gradient of a gradient.
    twice = jax.jit(lambda x, ct: jax.vjp(lambda ct: jax.vjp(call, outputs[r], x)[1](ct)[1], ct)[1](x)[0])
    np.testing.assert_allclose(twice(xs[r], cts[r]), expected(jnp.zeros_like(outputs), xs, slices)[r], rtol=1e-6)


def test_sums_of_cotangents_are_rounded_once(world: pc.Communicator) -> None:
    comm = world
    x = jnp.ones((1, 1), jnp.bfloat16)
    ct = jnp.full((comm.size, 1), 1 + 2.0**-7, jnp.bfloat16)
    (got,) = jax.vjp(lambda x: pc.ragged_all_gather(x, 1, comm)[0], x)[1](ct)
    assert got.dtype == jnp.bfloat16
    assert got == jnp.bfloat16(comm.size * (1 + 2.0**-7))


@pytest.mark.parametrize("axes", [(0, 0, 0), (1, None, None), (None, 2, None), (1, 2, 2), (None, None, 0)])
def test_vmap(axes: tuple[int | None, ...], world: pc.Communicator) -> None:
    comm = world
    # Slices that differ in a batch are one exchange.
    batch, each = 3, 2
    slices = np.stack([slices_of_all(comm.size, each, seed) for seed in range(batch if axes[2] is not None else 1)])
    outputs = values((batch, comm.size, ROWS_THERE, 2))
    xs = values((batch, comm.size, ROWS, 2), seed=1)

    def at(array: np.ndarray, i: int, axis: int | None) -> Array:
        return jnp.asarray(array[0 if axis is None else i])

    want = [
        expected(at(outputs, i, axes[0]), at(xs, i, axes[1]), slices[0 if axes[2] is None else i]) for i in range(batch)
    ]
    own = [array[:, comm.rank] for array in (outputs, xs, slices)]
    given = [array[0] if axis is None else np.moveaxis(array, 0, axis) for array, axis in zip(own, axes, strict=True)]

    def call(output: Array, x: Array, slices: Array) -> Array:
        return pc.ragged_all_to_all(x, output, *slices, axis_name=comm)

    got = jax.jit(jax.vmap(call, axes))(*given)
    np.testing.assert_array_equal(got, jnp.stack(want)[:, comm.rank])


def test_trees_and_counts(world: pc.Communicator) -> None:
    comm = world
    """Particles go to their owners and come back, in one program for all counts."""
    rank, size = comm.rank, comm.size

    @jax.jit
    def there_and_back(particles: Any, counts: Array) -> Any:
        arrived, received = pc.ragged_exchange(particles, counts, comm, capacity=4 * size)
        return arrived, received, pc.ragged_exchange(arrived, received, comm, capacity=2 * size)

    for seed in range(3):
        counts = np.random.default_rng(seed).integers(0, 3, (size, size))
        number = counts[rank].sum()
        particles = {"x": values((2 * size, 3), seed=10 * seed + rank), "id": np.arange(2 * size) + 100 * rank}
        arrived, received, (back, sent) = there_and_back(particles, counts[rank])
        starts = counts.cumsum(axis=1) - counts
        want = [100 * s + starts[s, rank] + i for s in range(size) for i in range(counts[s, rank])]
        assert arrived["id"].tolist() == want + [0] * (4 * size - len(want))
        assert received.tolist() == counts[:, rank].tolist()
        assert sent.tolist() == counts[rank].tolist()
        for name, array in particles.items():
            np.testing.assert_array_equal(back[name][:number], array[:number])
            assert not np.any(back[name][number:])


def test_empty_arrays(world: pc.Communicator) -> None:
    comm = world
    rows, counts = pc.ragged_all_gather(jnp.zeros((0, 3)), 0, comm)
    assert rows.shape == (0, 3)
    assert counts.tolist() == [0] * comm.size
    rows, _ = pc.ragged_exchange(jnp.zeros((4, 0)), jnp.ones(comm.size, int), comm, capacity=comm.size)
    assert rows.shape == (comm.size, 0)
    batch = jax.vmap(lambda x, n: pc.ragged_all_gather(x, n, comm)[0])
    for shape in ((0, 4, 2), (3, 4, 0)):
        x, counts = jnp.zeros(shape), jnp.ones(shape[0], int)
        assert batch(x, counts).shape == (shape[0], 4 * comm.size, shape[2])
        assert jax.grad(lambda x, counts=counts: batch(x, counts).sum())(x).shape == shape
    assert pc.ragged_exchange((), jnp.ones(comm.size, int), comm, capacity=1)[0] == ()


FAULTS = {
    "expected slices of the 4 rows of the operand, got 5 rows from row 0 on for rank 0": {"send": 5},
    "expected slices of the 4 rows of the operand, got -1 rows from row 0 on for rank 0": {"send": -1},
    "expected slices of the 4 rows of the operand, got 2 rows from row -1 on for rank 0": {"input": -1},
}
"""What the last rank may do wrong when it sends to rank 0, by what it is told."""


@pytest.mark.native  # mpi4jax does not find it
@pytest.mark.parametrize("text", FAULTS)
def test_a_slice_that_is_not_in_the_operand(text: str, world: pc.Communicator) -> None:
    comm = world
    last = comm.size - 1
    fault = {"input": 0, "send": 2} | FAULTS[text]
    to_first, from_last = np.arange(comm.size) == 0, np.arange(comm.size) == last
    zeros = np.zeros(comm.size, int)
    parts = [
        np.where(to_first, fault["input"], 0),
        np.where(to_first, fault["send"], 0) if comm.rank == last else zeros,
        zeros,
        np.where(from_last, fault["send"], 0) if comm.rank == 0 else zeros,
    ]
    check_fault(comm, parts, {last: text})


@pytest.mark.native  # mpi4jax does not find it
def test_slices_that_do_not_fit_the_result(comm: pc.Communicator) -> None:
    zeros, ones = np.zeros(comm.size, int), np.ones(comm.size, int)
    ranks = np.arange(comm.size)
    last = comm.size - 1
    # Rank 0's result has room for the rows; those of the last rank begin behind its end.
    offsets = np.where((ranks == 0) & (comm.rank == last), 20, comm.rank)
    text = f"expected slices of the 20 rows of the result, got 1 row from row 20 on from rank {last}"
    check_fault(comm, [zeros, ones, offsets, ones], {0: text})
    if comm.size > 1:
        offsets = np.where(ranks == 0, 3, comm.rank)
        text = "got 1 row from row 3 on from rank 0 and 1 row from row 3 on from rank 1"
        check_fault(comm, [zeros, ones, offsets, ones], {0: text})
    wanted = np.where((ranks == last) & (comm.rank == 0), 2, 1)
    text = f"expected 2 rows from rank {last}, as recv_sizes says, got 1"
    check_fault(comm, [zeros, ones, np.full(comm.size, comm.rank), wanted], {0: text})


def check_fault(comm: pc.Communicator, parts: list[np.ndarray], texts: dict[int, str]) -> None:
    """All ranks get an error: the text of their own fault, or the rank that has one. Later calls are right.

    The rest of the program has another collective, which no rank may enter.
    """

    @jax.jit
    def call(x: Array, output: Array) -> Array:
        y = pc.ragged_all_to_all(x, output, *parts, axis_name=comm)
        return pc.psum(y, comm)

    text = texts.get(comm.rank, f"that fit the arrays of all ranks, got wrong ones on rank {min(texts)}")
    for _ in range(2):
        with pytest.raises(RUNTIME_ERRORS) as error:
            call(jnp.arange(4.0), jnp.zeros(20)).block_until_ready()
        assert text in str(error.value)
        assert f"rank {comm.rank} of {comm.size}" in str(error.value)
    assert pc.psum(1, comm) == comm.size
    assert pc.ragged_all_gather(jnp.ones(4), 1, comm)[1].tolist() == [1] * comm.size


@pytest.mark.native  # mpi4jax does not find it
def test_a_wrong_slice_of_a_batch_is_not_one_of_its_neighbour(world: pc.Communicator) -> None:
    comm = world
    counts = jnp.array([5, 1])  # of 4 rows
    with pytest.raises(RUNTIME_ERRORS, match="expected"):
        jax.vmap(lambda x, n: pc.ragged_all_gather(x, n, comm, capacity=40)[0])(
            jnp.ones((2, 4)), counts
        ).block_until_ready()
    with pytest.raises(RUNTIME_ERRORS, match="expected"):  # and not the result of its neighbour
        too_many = jnp.array([3, 0])
        jax.vmap(lambda x, n: pc.ragged_all_gather(x, n, comm, capacity=2)[0])(
            jnp.ones((2, 4)), too_many
        ).block_until_ready()
    MPI.COMM_WORLD.Barrier()


@pytest.mark.native  # mpi4jax does not find it
def test_numbers_beyond_int32_are_wrong(world: pc.Communicator) -> None:
    comm = world
    with jax.enable_x64(True), pytest.raises(RUNTIME_ERRORS, match="of the operand"):
        pc.ragged_all_gather(jnp.ones(4), jnp.asarray(2**32 + 1), comm)[0].block_until_ready()
    with pytest.raises(RUNTIME_ERRORS, match="of the operand"):
        pc.ragged_all_gather(jnp.ones(4), np.int64(2**32 + 1), comm)[0].block_until_ready()


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            lambda comm: pc.ragged_exchange(jnp.ones(3), jnp.ones(comm.size + 1, int), comm, capacity=3),
            ValueError,
            "an entry for each",
        ),
        (
            lambda comm: pc.ragged_exchange(jnp.ones(3), jnp.ones(comm.size), comm, capacity=3),
            TypeError,
            "counts to be integers",
        ),
        (
            lambda comm: pc.ragged_exchange(jnp.ones(()), jnp.ones(comm.size, int), comm, capacity=3),
            ValueError,
            "arrays of rows",
        ),
        (
            lambda comm: pc.ragged_exchange(jnp.ones(3), jnp.ones(comm.size, int), comm, capacity=-1),
            ValueError,
            "capacity from 0 on",
        ),
        (lambda comm: pc.ragged_all_gather(jnp.ones(3), 1.5, comm), TypeError, "count to be an integer"),
        (lambda comm: pc.ragged_gather(jnp.ones(3), 1, comm, root=9), ValueError, "root from 0"),
        (lambda comm: _all_to_all(comm, output=jnp.ones((3, 2))), ValueError, "rows of one shape and dtype"),
        (lambda comm: _all_to_all(comm, output=jnp.ones(3, int)), ValueError, "rows of one shape and dtype"),
        (
            lambda comm: _all_to_all(comm, sizes=jnp.ones(comm.size + 1, int)),
            ValueError,
            "offsets and sizes of one length",
        ),
    ],
)
def test_wrong_arguments(call: Callable[..., Any], kind: type[Exception], text: str, world: pc.Communicator) -> None:
    comm = world
    with pytest.raises(kind, match=text):
        call(comm)


def _all_to_all(comm: pc.Communicator, output: Array = None, sizes: Array = None) -> Array:
    zeros = jnp.zeros(comm.size, int)
    sizes = zeros if sizes is None else sizes
    output = jnp.ones(3) if output is None else output
    return pc.ragged_all_to_all(jnp.ones(3), output, zeros, sizes, zeros, zeros, axis_name=comm)


def test_groups(world: pc.Communicator) -> None:
    comm = world
    groups = [[rank] for rank in range(comm.size)]
    one = jnp.ones(1, int)
    got = pc.ragged_all_to_all(
        jnp.arange(3.0) + comm.rank, jnp.zeros(2), one, one, one, one, axis_name=comm, axis_index_groups=groups
    )
    assert got.tolist() == [0, comm.rank + 1]


def test_particles_go_to_their_owners(world: pc.Communicator) -> None:
    """The example of docs/semantics.md."""

    def move(particles: Any, owner: Array, comm: pc.Communicator) -> Any:
        order = jnp.argsort(owner)
        particles = jax.tree.map(lambda x: x[order], particles)
        counts = jnp.bincount(owner, length=comm.size)
        return pc.ragged_exchange(particles, counts, comm, capacity=len(owner))

    place, used = np.arange(8) % (world.size + 1), np.arange(8) % 2 == 0
    owner = np.where(used, place % world.size, world.size)
    rows, counts = jax.jit(lambda x, owner: move(x, owner, world))(100 * world.rank + np.arange(8), owner)
    want = [100 * rank + i for rank in range(world.size) for i in range(8) if owner[i] == world.rank]
    assert rows.tolist()[: len(want)] == want[:8]
    assert counts.tolist() == [np.sum(owner == world.rank)] * world.size


def test_types_of_a_mesh(world: pc.Communicator) -> None:
    """With JAX's types, where the array is the same on all devices and its count is not, or the other way round."""
    mesh = jax.make_mesh((1,), ("i",), devices=jax.local_devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    x, counts = jnp.arange(1.0, 4), jnp.array([2])

    def loss(x: Array, counts: Array) -> Array:
        rows, _ = pc.ragged_all_gather(x, counts[0], world)
        return jax.lax.psum((rows**2).sum(), "i")

    for specs in ((jax.P(), jax.P("i")), (jax.P("i"), jax.P())):
        gradient = jax.grad(jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=jax.P()))(x, counts)
        assert gradient.tolist() == [2.0 * world.size, 4.0 * world.size, 0]
