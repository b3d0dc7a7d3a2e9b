"""Random shapes, dtypes, options and programs. All ranks draw the same ones, from one seed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from mpi4py import MPI

import pycollective as pc
from tests.cases import values

# With a database or a deadline one rank could draw other examples than another, or stop earlier.
agreed = settings(
    max_examples=8 if MPI.COMM_WORLD.size <= 2 else 4,  # each compiles; more ranks than cores are slow
    deadline=None,
    database=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
SEED = seed(20_241_122)

dtypes = st.sampled_from(
    ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64", "float8_e5m2"]
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def tobytes(x: Any) -> bytes:
    return np.ascontiguousarray(x).tobytes()


@SEED
@agreed
@given(data=st.data(), shape=shapes, dtype=dtypes)
def test_all_gather(data: st.DataObject, shape: tuple[int, ...], dtype: str, world: pc.Communicator) -> None:
    xs = values((world.size, *shape), dtype)
    axis = data.draw(st.integers(-len(shape) - 1, len(shape)))
    got = pc.all_gather(jnp.asarray(xs[world.rank]), world, axis=axis)
    assert tobytes(got) == tobytes(np.stack(list(xs), axis=axis))
    if shape:
        axis = data.draw(st.integers(-len(shape), len(shape) - 1))
        got = pc.all_gather(jnp.asarray(xs[world.rank]), world, axis=axis, tiled=True)
        assert tobytes(got) == tobytes(np.concatenate(list(xs), axis=axis))


@SEED
@agreed
@given(data=st.data(), shape=shapes.filter(len), dtype=dtypes)
def test_all_to_all(data: st.DataObject, shape: tuple[int, ...], dtype: str, world: pc.Communicator) -> None:
    split = data.draw(st.integers(0, len(shape) - 1))
    concat = data.draw(st.integers(0, len(shape) - 1))
    longer = (*shape[:split], shape[split] * world.size, *shape[split + 1 :])
    xs = values((world.size, *longer), dtype)
    got = pc.all_to_all(jnp.asarray(xs[world.rank]), world, split, concat, tiled=True)
    blocks = [np.split(x, world.size, axis=split)[world.rank] for x in xs]
    assert tobytes(got) == tobytes(np.concatenate(blocks, axis=concat))


@SEED
@agreed
@given(data=st.data(), shape=shapes, dtype=st.sampled_from(["int32", "float32", "bfloat16", "uint8", "complex64"]))
def test_psum_and_psum_scatter(data: st.DataObject, shape: tuple[int, ...], dtype: str, world: pc.Communicator) -> None:
    xs = values((world.size, *shape), dtype)
    wide = np.complex128 if dtype == "complex64" else np.float64 if "float" in dtype else np.int64
    total = xs.astype(wide).sum(axis=0)
    rtol = {"bfloat16": 2**-8, "float32": 1e-5, "complex64": 1e-5}.get(dtype, 0)
    got = np.asarray(pc.psum(jnp.asarray(xs[world.rank]), world))
    assert got.dtype == xs.dtype
    np.testing.assert_allclose(got.astype(wide), total.astype(xs.dtype).astype(wide), rtol=rtol, atol=rtol)
    if shape:
        axis = data.draw(st.integers(0, len(shape) - 1))
        longer = (*shape[:axis], shape[axis] * world.size, *shape[axis + 1 :])
        xs = values((world.size, *longer), dtype, seed=1)
        want = np.split(xs.astype(wide).sum(axis=0), world.size, axis=axis)[world.rank]
        got = np.asarray(pc.psum_scatter(jnp.asarray(xs[world.rank]), world, scatter_dimension=axis, tiled=True))
        np.testing.assert_allclose(got.astype(wide), want.astype(xs.dtype).astype(wide), rtol=rtol, atol=rtol)


@SEED
@agreed
@given(data=st.data(), shape=shapes, dtype=dtypes)
def test_permutations(data: st.DataObject, shape: tuple[int, ...], dtype: str, world: pc.Communicator) -> None:
    sources = data.draw(st.permutations(range(world.size)))
    count = data.draw(st.integers(0, world.size))
    perm = list(zip(sources[:count], data.draw(st.permutations(range(world.size)))[:count], strict=True))
    xs = values((world.size, *shape), dtype)
    got = pc.ppermute(jnp.asarray(xs[world.rank]), world, perm)
    source = {d: s for s, d in perm}.get(world.rank)
    assert tobytes(got) == tobytes(np.zeros_like(xs[0]) if source is None else xs[source])


STEPS = {
    "psum": (lambda x, comm: pc.psum(x, comm), lambda xs: jnp.broadcast_to(xs.sum(0), xs.shape)),
    "pmean": (lambda x, comm: pc.pmean(x, comm), lambda xs: jnp.broadcast_to(xs.mean(0), xs.shape)),
    "pmax": (lambda x, comm: pc.pmax(x, comm), lambda xs: jnp.broadcast_to(xs.max(0), xs.shape)),
    "broadcast": (lambda x, comm: pc.broadcast(x, comm), lambda xs: jnp.broadcast_to(xs[0], xs.shape)),
    "scan": (lambda x, comm: pc.scan(x, comm), lambda xs: jnp.cumsum(xs, axis=0)),
    "gather": (
        lambda x, comm: pc.all_gather(x, comm).mean(axis=0),
        lambda xs: jnp.broadcast_to(xs.mean(0), xs.shape),
    ),
    "shift": (
        lambda x, comm: pc.ppermute(x, comm, [(r, (r + 1) % comm.size) for r in range(comm.size)]),
        lambda xs: jnp.roll(xs, 1, axis=0),
    ),
    "sin": (lambda x, comm: jnp.sin(x), jnp.sin),
    "scale": (lambda x, comm: x / 2, lambda xs: xs / 2),
}


@SEED
@settings(agreed, max_examples=6 if MPI.COMM_WORLD.size <= 2 else 4)
@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6),
    shape=st.lists(st.integers(1, 4), max_size=2).map(tuple),
    loop=st.booleans(),
    remat=st.booleans(),
)
def test_random_programs(
    steps: list[str], shape: tuple[int, ...], loop: bool, remat: bool, world: pc.Communicator
) -> None:
    """Chains of operations, in a scan and under checkpoint or not, with their gradients."""

    def chain(index: int, x: Any, *args: Any) -> Any:
        for step in steps:
            x = STEPS[step][index](x, *args)
        return x

    def program(index: int, *args: Any) -> Any:
        def body(x: Any) -> Any:
            return chain(index, jnp.tanh(x), *args)

        once = jax.checkpoint(body) if remat else body
        return lambda x: jax.lax.scan(lambda c, _: (once(c), None), x, None, length=2)[0] if loop else once(x)

    xs, ws = values((world.size, *shape)), values((world.size, *shape), seed=1)
    r = world.rank
    want = jax.jit(jax.value_and_grad(lambda xs: jnp.vdot(ws, program(1)(xs))))(xs)
    value, grad = pc.jit(jax.value_and_grad(lambda x: jnp.vdot(ws[r], program(0, world)(x))))(xs[r])
    np.testing.assert_allclose(pc.psum(value, world), want[0], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(grad, want[1][r], rtol=1e-3, atol=1e-3)
