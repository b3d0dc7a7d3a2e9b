"""Every operation, eager and compiled, against its reference; all dtypes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pycollective as pc
from tests.cases import CASES, by_id, operands, values
from tests.collective.programs import compare, run


def apply(f: Any, x: Any) -> Any:
    return f(x)


def identity(f: Any) -> Any:
    return f


@pytest.mark.parametrize("compiler", [identity, jax.jit, pc.jit], ids=["eager", "jax.jit", "pc.jit"])
def test_value(compiler: Any, comm: pc.Communicator) -> None:
    compare(comm, CASES, lambda case: [operands(case, comm)], apply, apply, compiler=compiler)


def test_call(comm: pc.Communicator) -> None:
    # Through Jitted.__call__, as users do; compare() compiles beforehand.
    xs = {case.id: operands(case, comm) for case in CASES}
    f = pc.jit(lambda own: {case.id: case.call(own[case.id], comm) for case in CASES})
    for _ in range(2):
        got = f({id_: x[comm.rank] for id_, x in xs.items()})
    for case in CASES:
        want = case.reference(xs[case.id])[comm.rank]
        np.testing.assert_allclose(got[case.id], want, rtol=1e-5, atol=1e-6, err_msg=case.id)


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
WIDE = {"bool": "int32"}  # what sums of it become, as in jax.lax.psum


def expected_sum(xs: np.ndarray, dtype: str) -> np.ndarray:
    """The sum over ranks, computed in float64 (or int64, complex128) and rounded once."""
    if dtype in ("complex64", "complex128"):
        return xs.astype(np.complex128).sum(axis=0).astype(dtype)
    if dtype == "float64":
        return xs.sum(axis=0)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        return xs.astype(np.float64).sum(axis=0).astype(np.float32).astype(jnp.dtype(dtype))
    return xs.astype(np.int64).sum(axis=0).astype(jnp.dtype(WIDE.get(dtype, dtype)))


MOVES = ("all_gather", "all_to_all", "ppermute_partial", "broadcast", "gather", "scatter", "sendrecv")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_moves_unchanged(dtype: str, world: pc.Communicator) -> None:
    with jax.enable_x64(True):
        xs = {id_: operands(by_id[id_], world, dtype) for id_ in MOVES}
        own = {id_: jnp.asarray(xs[id_][world.rank]) for id_ in MOVES}
        ys = run(pc.jit, lambda own: {id_: by_id[id_].call(own[id_], world) for id_ in MOVES}, own)
        for id_, y in ys.items():
            # What moves does not depend on the dtype: the reference moves the bits, compiled once for each item size.
            bits = xs[id_] if dtype == "complex128" else xs[id_].view(f"uint{8 * xs[id_].itemsize}")
            want = by_id[id_].reference(jnp.asarray(bits))[world.rank]
            assert y.dtype == jnp.dtype(dtype)
            assert np.asarray(y).tobytes() == np.asarray(want).tobytes(), id_


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_sums(dtype: str, world: pc.Communicator) -> None:
    with jax.enable_x64(True):
        xs = values((world.size, 5), dtype)
        blocks = values((world.size, world.size, 2), dtype, seed=1)

        def sums(x: jax.Array, block: jax.Array) -> list[jax.Array]:
            return [pc.psum(x, world), pc.reduce(x, world), pc.psum_scatter(block, world), pc.scan(x, world)]

        total = expected_sum(xs, dtype)
        expected = [
            total,
            total if world.rank == 0 else np.zeros_like(total),
            expected_sum(blocks, dtype)[world.rank],
            expected_sum(xs[: world.rank + 1], dtype),
        ]
        own = jnp.asarray(xs[world.rank]), jnp.asarray(blocks[world.rank])
        for got, want in zip(run(pc.jit, sums, *own), expected, strict=True):
            assert got.dtype == jnp.dtype(WIDE.get(dtype, dtype))
            tolerance = {"float32": 1e-6, "complex64": 1e-6, "float64": 1e-14, "complex128": 1e-14}.get(dtype, 0)
            wide = np.complex128
            np.testing.assert_allclose(np.asarray(got).astype(wide), want.astype(wide), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)])
def test_integer_sums_wrap(dtype: str, world: pc.Communicator) -> None:
    # Long enough for vector instructions, with which Open MPI saturates.
    limits = np.iinfo(dtype)
    xs = np.random.default_rng(0).integers(limits.min, limits.max, (world.size, world.size, 40), dtype, endpoint=True)
    with jax.enable_x64(True):

        def sums(x: jax.Array) -> list[jax.Array]:
            return [pc.psum(x, world), pc.psum_scatter(x, world), pc.scan(x, world)]

        got = run(pc.jit, sums, jnp.asarray(xs[world.rank]))
    total = xs.sum(axis=0, dtype=dtype)
    for y, want in zip(got, [total, total[world.rank], xs[: world.rank + 1].sum(axis=0, dtype=dtype)], strict=True):
        np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if not dtype.startswith("complex")])
def test_every_ordered_dtype_has_extremes(dtype: str, world: pc.Communicator) -> None:
    with jax.enable_x64(True):
        xs = values((world.size, 7), dtype, seed=2)
        wide = xs.astype(np.float64)
        low, high = run(pc.jit, lambda x: (pc.pmin(x, world), pc.pmax(x, world)), jnp.asarray(xs[world.rank]))
        for got, want in ((low, wide.min(axis=0)), (high, wide.max(axis=0))):
            assert got.dtype == xs.dtype
            np.testing.assert_array_equal(np.asarray(got).astype(np.float64), want)


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
    # 256 + 1 + 1 + ... in bfloat16 (8 bits) stays 256 if rounded at each step.
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


def test_results_are_where_operands_are(world: pc.Communicator) -> None:
    x = jnp.ones(3)
    for call in (lambda x: pc.psum(x, world), pc.jit(lambda x: pc.all_gather(x, world))):
        assert call(x).devices() == x.devices() == {pc.communicator.devices_of_this_rank()[0]}


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


@pytest.mark.parametrize("length", [0, 1, 7, 1009, 100_003])
def test_lengths(length: int, comm: pc.Communicator) -> None:
    xs = values((comm.size, length))
    x = jnp.asarray(xs[comm.rank])
    np.testing.assert_allclose(pc.psum(x, comm), xs.sum(axis=0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(pc.all_gather(x, comm), xs)
    np.testing.assert_array_equal(pc.broadcast(x, comm, root=comm.size - 1), xs[-1])


def test_index_and_size(comm: pc.Communicator) -> None:
    assert pc.axis_size(comm) == comm.size
    index = pc.axis_index(comm)
    assert index == comm.rank
    assert index.dtype == jnp.int32


def test_the_default_is_the_world(world: pc.Communicator) -> None:
    assert pc.psum(1) == world.size
    assert pc.axis_index() == world.rank
    assert jax.jit(lambda x: pc.all_gather(x))(world.rank).tolist() == list(range(world.size))
