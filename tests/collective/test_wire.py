"""Sums that go between ranks as bfloat16: the bits, the derivative, trees, error feedback, bad input."""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pycollective as pc

pytestmark = pytest.mark.native


def rounded(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(jnp.bfloat16).astype(np.float32)


def expected(xs: np.ndarray) -> np.ndarray:
    """The sum: inputs are rounded, added in float32 in the order of the ranks, and the sum is rounded."""
    return xs[0] if len(xs) == 1 else rounded(reduce(np.add, map(rounded, xs)))


def operands(comm: pc.Communicator, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(comm.size, *shape)).astype(np.float32)


def wire_sum(comm: pc.Communicator) -> Any:
    return lambda x: pc.psum(x, comm, wire_dtype=jnp.bfloat16)


SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (0, 3), (5, 11), (1 << 20,), ((1 << 20) + 3,))


def check_bits(comm: pc.Communicator, compiler: Any) -> None:
    xs = [operands(comm, shape) for shape in SHAPES]
    got = compiler(lambda own: [wire_sum(comm)(x) for x in own])([jnp.asarray(x[comm.rank]) for x in xs])
    for y, x in zip(got, xs, strict=True):
        assert y.dtype == np.float32
        assert np.asarray(y).tobytes() == expected(x).tobytes(), x.shape


def test_bits(comm: pc.Communicator) -> None:
    check_bits(comm, pc.jit)


@pytest.mark.parametrize("compiler", [lambda f: f, jax.jit], ids=["eager", "jax.jit"])
def test_bits_elsewhere(compiler: Any, world: pc.Communicator) -> None:
    check_bits(world, compiler)


def test_special_values(world: pc.Communicator) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 3.4e38, -0.0], np.float32)  # no denormals: XLA flushes them
    got = np.asarray(wire_sum(world)(jnp.asarray(x)))
    want = expected(np.stack([x] * world.size))
    np.testing.assert_array_equal(got, want)
    assert np.isnan(got[0])


def test_named_axis(world: pc.Communicator) -> None:
    xs = operands(world, (13,))
    f = pc.jit(
        lambda x: (pc.psum(x, "i", wire_dtype=jnp.bfloat16), pc.pmean(x, "i", wire_dtype=jnp.bfloat16)), axis_name="i"
    )
    total, mean = f(xs[world.rank])
    assert np.asarray(total).tobytes() == expected(xs).tobytes()
    np.testing.assert_allclose(mean, expected(xs) / world.size, rtol=1e-6)


@pytest.mark.parametrize("bind", ["communicator", "name"])
def test_tree(bind: str, world: pc.Communicator) -> None:
    # Integers and complex numbers keep all their bits; floats of 16 bits are rounded as those of 32.
    xs = operands(world, (9,))
    tree = {
        "float": xs[world.rank],
        "half": xs[world.rank].astype(jnp.bfloat16),
        "int": np.full(3, 1_000_001 + world.rank, np.int32),
        "complex": np.full(2, 1.0001 + 1j, np.complex64),
    }
    axis = world if bind == "communicator" else "i"
    program = pc.jit(
        lambda t: pc.psum(t, axis, wire_dtype=jnp.bfloat16), **({"axis_name": "i"} if bind == "name" else {})
    )
    got = program(tree)
    assert np.asarray(got["float"]).tobytes() == expected(xs).tobytes()
    assert got["half"].dtype == jnp.bfloat16
    assert np.asarray(got["half"], np.float32).tobytes() == rounded(expected(rounded(xs))).tobytes()
    np.testing.assert_array_equal(got["int"], sum(1_000_001 + rank for rank in range(world.size)))
    np.testing.assert_allclose(got["complex"], world.size * (1.0001 + 1j), rtol=1e-6)


@pytest.mark.parametrize("bind", ["communicator", "name"])
def test_derivatives_and_batches(bind: str, world: pc.Communicator) -> None:
    xs, ts = operands(world, (4, 3)), operands(world, (4, 3), seed=1)
    axis = world if bind == "communicator" else "i"
    options = {"axis_name": "i"} if bind == "name" else {}

    def f(x: jax.Array) -> jax.Array:
        return pc.psum(x, axis, wire_dtype=jnp.bfloat16)

    def both(x: jax.Array, t: jax.Array) -> Any:
        y, dy = jax.jvp(f, (x,), (t,))
        (back,) = jax.vjp(f, x)[1](t)
        return y, dy, back, jax.vmap(f)(x), jax.vmap(f, in_axes=1, out_axes=1)(x)

    y, dy, back, rows, columns = pc.jit(both, **options)(xs[world.rank], ts[world.rank])
    for got, want in ((y, xs), (dy, ts), (back, ts), (rows, xs), (columns, xs)):
        assert np.asarray(got).tobytes() == expected(want).tobytes()


def test_many_leaves_share_a_bucket(world: pc.Communicator) -> None:
    xs = [operands(world, (k + 1,), seed=k) for k in range(40)]
    own = [x[world.rank] for x in xs]
    for program, axis in ((pc.jit, world), (lambda f: pc.jit(f, axis_name="i"), "i")):
        got = program(lambda t, axis=axis: pc.psum(t, axis, wire_dtype=jnp.bfloat16))(own)
        for y, x in zip(got, xs, strict=True):
            assert np.asarray(y).tobytes() == expected(x).tobytes()


@pytest.mark.parametrize("axis", ["communicator", "name"])
def test_the_mean_with_error_feedback(axis: str, world: pc.Communicator) -> None:
    x, left = jnp.full(4, 1.003 * (1 + world.rank)), jnp.zeros(4)
    program = pc.jit if axis == "communicator" else lambda f: pc.jit(f, axis_name="i")
    where = world if axis == "communicator" else "i"
    total, after = program(lambda x, r: pc.psum(x, where, wire_dtype=jnp.bfloat16, residual=r))(x, left)
    mean, same = program(lambda x, r: pc.pmean(x, where, wire_dtype=jnp.bfloat16, residual=r))(x, left)
    np.testing.assert_allclose(mean, np.asarray(total) / world.size, rtol=1e-6)
    np.testing.assert_allclose(mean, 1.003 * (1 + world.size) / 2, rtol=1e-2)
    np.testing.assert_array_equal(same, after)


def test_error_feedback(world: pc.Communicator) -> None:
    # Each call adds what the last call rounded away: so the numbers that were sent add up to the exact sum.
    x = jnp.full(8, 1.003, jnp.float32) * (1 + world.rank)  # bfloat16 has 1.0 and 1.0078125, and nothing between
    alone = world.split(world.rank)

    @pc.jit
    def step(left: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        y, after = pc.psum(x, world, wire_dtype=jnp.bfloat16, residual=left)
        sent, same = pc.psum(x, alone, wire_dtype=jnp.bfloat16, residual=left)
        return y, sent, (after + same) / 2

    left, total = jnp.zeros_like(x), np.zeros(8)
    for _ in range(100):
        y, sent, left = step(left)
        every = np.stack(world.mpi.allgather(np.asarray(sent)))
        assert every.tobytes() == rounded(every).tobytes()
        assert np.asarray(y).tobytes() == expected(every).tobytes()
        total += np.asarray(sent, np.float64)
    exact = np.asarray(x, np.float64)
    assert np.abs(total / 100 - exact).max() < 1e-4 * (1 + world.rank)
    assert np.abs(rounded(np.asarray(x)) - exact).max() > 2e-3
    alone.free()
    # An overflow leaves no residual.
    _, after = pc.psum(
        jnp.array([3.4e38, jnp.inf, jnp.nan, 1.0]), world, wire_dtype=jnp.bfloat16, residual=jnp.zeros(4)
    )
    np.testing.assert_array_equal(after, np.zeros(4))


def test_bad_input(world: pc.Communicator) -> None:
    x = jnp.ones(3)
    for bad in (jnp.float32, jnp.float16, "bfloat17", 3):
        with pytest.raises(TypeError, match="wire_dtype=bfloat16"):
            pc.psum(x, world, wire_dtype=bad)
    with pytest.raises(TypeError, match="wire_dtype with residual"):
        pc.psum(x, world, residual=x)
    with pytest.raises(ValueError, match="structure"):
        pc.psum(x, world, wire_dtype=jnp.bfloat16, residual=[x])
    for wrong in (jnp.ones(4), jnp.ones(3, jnp.bfloat16)):
        with pytest.raises(ValueError, match="both float32"):
            pc.psum(x, world, wire_dtype=jnp.bfloat16, residual=wrong)
    with pytest.raises(NotImplementedError, match="axes that JAX bound"):
        jax.jit(jax.vmap(lambda x: pc.psum(x, "v", wire_dtype=jnp.bfloat16), axis_name="v"))(x)
    with pytest.raises(NameError, match="an axis name that a transform around this call binds"):
        pc.psum(x, "nowhere", wire_dtype=jnp.bfloat16)
