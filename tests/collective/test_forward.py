"""Every operation, eager and compiled, against its reference, in all dtypes."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import pycollective as pc
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import CASES, EACH_PRIMITIVE, by_id, check_extrema, operands, special_floats, supported, values
from tests.collective.programs import compare, run


def apply(f: Any, x: Any) -> Any:
    return f(x)


def identity(f: Any) -> Any:
    return f


def test_value(comm: pc.Communicator) -> None:
    compare(comm, CASES, lambda case: [operands(case, comm)], apply, apply)


@pytest.mark.parametrize("compiler", [identity, jax.jit], ids=["eager", "jax.jit"])
def test_value_elsewhere(compiler: Any, world: pc.Communicator) -> None:
    compare(world, CASES, lambda case: [operands(case, world)], apply, apply, compiler=compiler)


def called_twice(f: Any) -> Any:
    compiled = pc.jit(f)
    return lambda *args: [compiled(*args) for _ in range(2)][1]


def test_call(world: pc.Communicator) -> None:
    # The call goes through CompiledFunction.__call__, as a user's does; compare() compiles beforehand.
    compare(world, CASES, lambda case: [operands(case, world, seed=2)], apply, apply, compiler=called_twice)


def compiled_ahead(f: Any) -> Any:
    """The result of the second call: the first one of a program that was compiled ahead takes another path of JAX."""

    def call(*args: Any) -> Any:
        program = jax.jit(f).lower(*args).compile()
        return [program(*args) for _ in range(2)][1]

    return call


def test_value_of_a_program_compiled_ahead(world: pc.Communicator) -> None:
    compare(world, EACH_PRIMITIVE, lambda case: [operands(case, world, seed=5)], apply, apply, compiler=compiled_ahead)


def exported(f: Any) -> Any:
    """The program as another process would load it; its derivative comes with it."""

    def call(*args: Any) -> Any:
        written = jax.export.export(pc.jit(f), disabled_checks=pc.export_checks())(*args).serialize(vjp_order=1)
        return jax.export.deserialize(written).call(*args)

    return call


@pytest.mark.native  # mpi4jax's own calls are not among our checks
def test_value_of_an_exported_program(world: pc.Communicator) -> None:
    compare(world, CASES, lambda case: [operands(case, world, seed=3)], apply, apply, compiler=exported)


@pytest.mark.native
def test_an_exported_program_in_others(world: pc.Communicator) -> None:
    xs = operands(by_id["psum"], world, seed=4)
    x, total = jnp.asarray(xs[world.rank]), xs.sum(axis=0)
    mean = exported(lambda x: pc.pmean(x, world) + pc.pmax(x, world) - pc.pmax(x, world))

    @pc.jit
    def program(x: Any) -> Any:
        before = pc.psum(x, world)
        after, _ = lax.scan(lambda c, _: (mean(c) * 2, None), before, None, length=2)
        return before, lax.cond(jnp.all(after == after), mean, lambda x: x, after), pc.psum(x, world)

    for got, want in zip(program(x), [total, 4 * total, total], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    # The loss of each rank is the sum of mean * x, and each rank's x is part of all means.
    gradient = jax.grad(lambda x: jnp.sum(mean(x) * x))(x)
    np.testing.assert_allclose(gradient, 2 * total / world.size, rtol=1e-5)


def test_value_of_intermediate(comm: pc.Communicator) -> None:
    # An operand that is computed in the program may be overwritten in place; one that is read later must not be.
    def f(call: Any, x: Any) -> Any:
        z = jnp.sin(x)
        return call(z), call(z), z

    compare(comm, CASES, lambda case: [operands(case, comm, seed=1)], f, f, rtol=1e-5, atol=1e-6)


def test_donated(comm: pc.Communicator) -> None:
    xs = operands(by_id["psum"], comm, seed=3)
    x = jnp.asarray(xs[comm.rank])
    y = pc.jit(lambda x: pc.psum(x, comm), donate_argnums=0)(x)
    np.testing.assert_allclose(y, xs.sum(axis=0), rtol=1e-6)
    assert x.is_deleted()


def test_donated_and_read_again(comm: pc.Communicator) -> None:
    xs = operands(by_id["psum"], comm, seed=3)
    y, x_plus_1 = pc.jit(lambda x: (pc.psum(x, comm), x + 1), donate_argnums=0)(jnp.asarray(xs[comm.rank]))
    np.testing.assert_allclose(y, xs.sum(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(x_plus_1, xs[comm.rank] + 1)


DTYPES = (
    "bool",
    *("int4", "int8", "int16", "int32", "int64", "uint4", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e3m4"),
    "float8_e4m3",
)
WIDE = {"bool": "int32"}  # the dtype of its sums, as in jax.lax.psum


def expected_sum(xs: np.ndarray, dtype: str) -> np.ndarray:
    """The sum over ranks, computed in float64 (or int64, complex128) and rounded once."""
    if dtype in ("complex64", "complex128"):
        return xs.astype(np.complex128).sum(axis=0).astype(dtype)
    if dtype == "float64":
        return xs.sum(axis=0)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        return xs.astype(np.float64).sum(axis=0).astype(np.float32).astype(jnp.dtype(dtype))
    return xs.astype(np.int64).sum(axis=0).astype(jnp.dtype(WIDE.get(dtype, dtype)))


MOVES = (
    "all_gather",
    "all_to_all",
    "ppermute_partial",
    "broadcast",
    "gather",
    "scatter",
    "sendrecv",
    "isendrecv",
    "ragged_exchange",
)


def test_every_dtype_moves_unchanged(world: pc.Communicator) -> None:
    # A move does not depend on the dtype. The reference moves the places of numbers; place 0 has the zero that stands
    # where a rank receives nothing.
    sources = {}
    moved = [id_ for id_ in MOVES if supported(by_id[id_])]
    for id_ in moved:
        shape = operands(by_id[id_], world).shape
        places = jnp.arange(1, np.prod(shape) + 1).reshape(shape)
        sources[id_] = np.asarray(by_id[id_].reference(places))[world.rank]
    with jax.enable_x64(True):
        xs = {dtype: {id_: operands(by_id[id_], world, dtype) for id_ in moved} for dtype in DTYPES}

        def moves(own: dict[str, dict[str, jax.Array]]) -> dict[str, dict[str, jax.Array]]:
            return {dtype: {id_: by_id[id_].call(x, world) for id_, x in of.items()} for dtype, of in own.items()}

        got = run(pc.jit, moves, jax.tree.map(lambda x: jnp.asarray(x[world.rank]), xs))
        for dtype in DTYPES:
            for id_, x in xs[dtype].items():
                want = np.concatenate([np.zeros(1, x.dtype), x.ravel()])[sources[id_]]
                assert got[dtype][id_].dtype == jnp.dtype(dtype)
                assert np.asarray(got[dtype][id_]).tobytes() == want.tobytes(), (dtype, id_)


def test_every_dtype_sums(world: pc.Communicator) -> None:
    with jax.enable_x64(True):
        xs = {dtype: values((world.size, 5), dtype) for dtype in DTYPES}
        blocks = {dtype: values((world.size, world.size, 2), dtype, seed=1) for dtype in DTYPES}

        def sums(xs: dict[str, jax.Array], blocks: dict[str, jax.Array]) -> dict[str, list[jax.Array]]:
            return {
                dtype: [
                    pc.psum(x, world),
                    pc.reduce(x, world),
                    pc.psum_scatter(blocks[dtype], world),
                    pc.scan(x, world),
                ]
                for dtype, x in xs.items()
            }

        got = run(pc.jit, sums, *jax.tree.map(lambda x: jnp.asarray(x[world.rank]), (xs, blocks)))
        for dtype in DTYPES:
            total = expected_sum(xs[dtype], dtype)
            expected = [
                total,
                total if world.rank == 0 else np.zeros_like(total),
                expected_sum(blocks[dtype], dtype)[world.rank],
                expected_sum(xs[dtype][: world.rank + 1], dtype),
            ]
            tolerance = {"float32": 1e-6, "complex64": 1e-6, "float64": 1e-14, "complex128": 1e-14}.get(dtype, 0)
            for y, want in zip(got[dtype], expected, strict=True):
                assert y.dtype == jnp.dtype(WIDE.get(dtype, dtype))
                y, want = np.asarray(y).astype(np.complex128), want.astype(np.complex128)
                np.testing.assert_allclose(y, want, rtol=tolerance, atol=tolerance, err_msg=dtype)


def test_integer_sums_wrap(world: pc.Communicator) -> None:
    # The arrays are long enough for the vector instructions by which Open MPI saturates.
    xs = {}
    for dtype in (f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)):
        low, high, shape = np.iinfo(dtype).min, np.iinfo(dtype).max, (world.size, world.size, 40)
        xs[dtype] = np.random.default_rng(0).integers(low, high, shape, dtype, endpoint=True)
    with jax.enable_x64(True):

        def sums(xs: dict[str, jax.Array]) -> dict[str, list[jax.Array]]:
            return {dtype: [pc.psum(x, world), pc.psum_scatter(x, world), pc.scan(x, world)] for dtype, x in xs.items()}

        got = run(pc.jit, sums, {dtype: jnp.asarray(x[world.rank]) for dtype, x in xs.items()})
    for dtype, x in xs.items():
        total, begun = x.sum(axis=0, dtype=dtype), x[: world.rank + 1].sum(axis=0, dtype=dtype)
        for y, want in zip(got[dtype], [total, total[world.rank], begun], strict=True):
            np.testing.assert_array_equal(y, want, err_msg=dtype)


def test_every_ordered_dtype_has_extremes(world: pc.Communicator) -> None:
    with jax.enable_x64(True):
        xs = {dtype: values((world.size, 7), dtype, seed=2) for dtype in DTYPES if not dtype.startswith("complex")}

        def extremes(xs: dict[str, jax.Array]) -> dict[str, tuple[jax.Array, jax.Array]]:
            return {dtype: (pc.pmin(x, world), pc.pmax(x, world)) for dtype, x in xs.items()}

        got = run(pc.jit, extremes, {dtype: jnp.asarray(x[world.rank]) for dtype, x in xs.items()})
        for dtype, x in xs.items():
            wide = x.astype(np.float64)
            for y, want in zip(got[dtype], (wide.min(axis=0), wide.max(axis=0)), strict=True):
                assert y.dtype == x.dtype
                np.testing.assert_array_equal(np.asarray(y).astype(np.float64), want, err_msg=dtype)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float32", "bfloat16", "complex64", "bool"])
def test_products(dtype: str, world: pc.Communicator) -> None:
    xs = values((world.size, 4), dtype, seed=3)
    wide = xs.astype(np.complex128 if dtype == "complex64" else np.float64)
    got = pc.reduce(jnp.asarray(xs[world.rank]), world, op="prod")
    want = np.prod(wide, axis=0) if world.rank == 0 else np.zeros_like(wide[0])
    if dtype == "uint8":
        want %= 256
    tolerance = {"bfloat16": 1e-2, "float32": 1e-6, "complex64": 1e-5}.get(dtype, 0)
    np.testing.assert_allclose(np.asarray(got).astype(wide.dtype), want, rtol=tolerance, atol=tolerance)


def test_small_floats_are_rounded_once(world: pc.Communicator) -> None:
    # In bfloat16 (8 bits) 256 + 1 + 1 + ... stays 256 if each step is rounded.
    x = jnp.asarray(256.0 if world.rank == 0 else 1.0, jnp.bfloat16)
    want = np.float32(256 + world.size - 1).astype(jnp.bfloat16)
    assert pc.psum(x, world) == want
    assert pc.reduce(x, world, root=world.size - 1) == (want if world.rank == world.size - 1 else 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_nan_wins_as_in_jax(dtype: str, world: pc.Communicator) -> None:
    with jax.enable_x64(True):
        for holder in range(world.size):
            x = jnp.asarray([float("nan") if world.rank == holder else 1.0, float(world.rank)], dtype)
            for extreme in (pc.pmax, pc.pmin):
                y = extreme(x, world)
                assert jnp.isnan(y[0])
                assert not jnp.isnan(y[1])


@pytest.mark.parametrize("size", [1, 7, 70_000])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_extrema_have_the_same_bits_on_all_ranks(dtype: str, size: int, world: pc.Communicator) -> None:
    for number in range(len(special_floats(dtype))):
        with jax.enable_x64(True):
            x = np.resize(np.roll(special_floats(dtype), world.rank * (number + 1)), size)
            results = [np.asarray(extreme(x, world)) for extreme in (pc.pmax, pc.pmin)]
        blocks = MPI.COMM_WORLD.allgather(x.tobytes())
        check_extrema([np.frombuffer(block, x.dtype) for block in blocks], results)
        assert len(set(MPI.COMM_WORLD.allgather(tuple(y.tobytes() for y in results)))) == 1


def test_results_are_where_operands_are(world: pc.Communicator) -> None:
    x = jnp.ones(3)
    for call in (lambda x: pc.psum(x, world), pc.jit(lambda x: pc.all_gather(x, world))):
        assert call(x).devices() == x.devices() == {devices_of_this_rank()[0]}


def test_pytrees(world: pc.Communicator) -> None:
    tree = {"a": jnp.ones(3), "b": (jnp.arange(2), [jnp.asarray(True)]), "c": None}
    y = pc.psum(tree, world)
    assert jax.tree.structure(y) == jax.tree.structure(tree)
    np.testing.assert_array_equal(y["a"], np.full(3, world.size))
    np.testing.assert_array_equal(y["b"][0], world.size * np.arange(2))
    assert y["b"][1][0] == world.size


def test_python_numbers_are_the_ranks_own(world: pc.Communicator) -> None:
    assert pc.psum(world.rank, world) == sum(range(world.size))
    assert pc.pmean(float(world.rank), world) == np.mean(range(world.size))


def test_keys_of_jax_random(world: pc.Communicator) -> None:
    key = jax.random.key(world.rank + 7)
    shared = pc.broadcast(key, world)
    assert jax.dtypes.issubdtype(shared.dtype, jax.dtypes.prng_key)
    assert jnp.array_equal(jax.random.key_data(shared), jax.random.key_data(jax.random.key(7)))
    gathered = jax.random.key_data(pc.all_gather(key, world))
    assert jnp.array_equal(gathered[world.rank], jax.random.key_data(key))


LENGTHS = (0, 1, 7, 1009, 100_003)


def test_lengths(comm: pc.Communicator) -> None:
    xs = {str(length): values((comm.size, length)) for length in LENGTHS}

    def program(own: dict[str, jax.Array]) -> dict[str, Any]:
        last = comm.size - 1
        return {k: (pc.psum(x, comm), pc.all_gather(x, comm), pc.broadcast(x, comm, root=last)) for k, x in own.items()}

    got = pc.jit(program)({k: jnp.asarray(x[comm.rank]) for k, x in xs.items()})
    for k, x in xs.items():
        total, gathered, last = got[k]
        np.testing.assert_allclose(total, x.sum(axis=0), rtol=1e-5, atol=1e-5, err_msg=k)
        np.testing.assert_array_equal(gathered, x, err_msg=k)
        np.testing.assert_array_equal(last, x[-1], err_msg=k)


def test_index_and_size(comm: pc.Communicator) -> None:
    assert pc.axis_size(comm) == comm.size
    index = pc.axis_index(comm)
    assert index == comm.rank
    assert index.dtype == jnp.int32


def test_the_default_is_the_world(world: pc.Communicator) -> None:
    assert pc.psum(1) == world.size
    assert pc.axis_index() == world.rank
    assert jax.jit(lambda x: pc.all_gather(x))(world.rank).tolist() == list(range(world.size))


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_64_bits_where_jax_makes_no_such_arrays(wrapped: Any, world: pc.Communicator) -> None:
    with jax.enable_x64(True):
        x = jnp.asarray([2**40 + world.rank, 1])
    assert not jax.config.jax_enable_x64
    total = wrapped(lambda x: pc.psum(x, world))(x)
    gathered = wrapped(lambda x: pc.all_gather(x, world))(x)
    assert total.dtype == gathered.dtype == np.int64
    assert np.asarray(total).tolist() == [sum(2**40 + rank for rank in range(world.size)), world.size]
    assert np.asarray(gathered).tolist() == [[2**40 + rank, 1] for rank in range(world.size)]
