"""The cases of mpi4jax's own tests: mpi4jax itself and the module in its place must pass the same tests."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.sparse.linalg import cg
from mpi4py import MPI

import pycollective as pc
import pycollective.compat.mpi4jax as compat
from tests.mpi4jax.shallow_water import Channel

Array = Any
COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
OTHER = 1 - RANK
HOW: dict[str, Any] = {"eager": lambda f: f, "jit": jax.jit, "pc.jit": pc.jit}


@pytest.fixture(params=HOW)
def how(request: pytest.FixtureRequest) -> Any:
    """The ways to run a function."""
    return HOW[request.param]


pairs_only = pytest.mark.skipif(SIZE == 1, reason="LOUD: needs two ranks")


def check(got: Any, want: Any) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-6)


# Values ----------------------------------------------------------------------------------------------------------

INPUTS: dict[str, Callable[[int], Any]] = {
    "array": lambda rank: np.full((3, 2), rank + 1, np.float32) * np.arange(1, 3, dtype=np.float32),
    "number": lambda rank: rank + 1,
    "integers": lambda rank: np.arange(5, dtype=np.int32) - rank,
    "complex": lambda rank: np.array([rank + 1j, 2.0], np.complex64),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_collectives(mpi: Any, how: Any, kind: str) -> None:
    xs = [np.asarray(INPUTS[kind](rank)) for rank in range(SIZE)]
    x, root, total = INPUTS[kind](RANK), SIZE - 1, sum(xs)
    before = np.array(x)

    def program(x: Array) -> list[Array]:
        return [
            mpi.allreduce(x, op=MPI.SUM),
            mpi.allreduce(x, MPI.SUM, comm=COMM),
            mpi.reduce(x, MPI.SUM, root),
            mpi.scan(x, op=MPI.SUM),
            mpi.bcast(x, root),
            mpi.gather(x, root=root),
            mpi.allgather(x),
            mpi.alltoall(jnp.stack([x] * SIZE)),
            mpi.scatter(jnp.stack([x] * SIZE) if root == RANK else x, root),
            *(mpi.barrier() or ()),
        ]

    at_root = root == RANK
    want = [total, total, total if at_root else x, sum(xs[: RANK + 1]), xs[root], np.stack(xs) if at_root else x]
    want += [np.stack(xs), np.stack(xs), xs[root]]
    for y, expected in zip(how(program)(x), want, strict=True):
        check(y, expected)
        assert jnp.asarray(y).dtype == jnp.asarray(x).dtype
    check(x, before)


OPS = {
    "float32": "SUM PROD MIN MAX",
    "int32": "SUM PROD MIN MAX LAND LOR LXOR BAND BOR BXOR",
    "uint8": "MAX LAND BOR BXOR",
}


@pytest.mark.parametrize("dtype", OPS)
def test_operations(mpi: Any, dtype: str) -> None:
    xs = [np.array([0, 1, 6, 5, rank]).astype(dtype) if rank % 2 else np.array([0, 2, 0, 3, 1]).astype(dtype)
          for rank in range(SIZE)]  # fmt: skip
    names = OPS[dtype].split()

    def program(x: Array) -> list[Any]:
        ops = [getattr(MPI, name) for name in names]
        return [(mpi.allreduce(x, op), mpi.reduce(x, op, 0), mpi.scan(x, op)) for op in ops]

    functions = {
        "SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum, "LAND": np.logical_and,
        "LOR": np.logical_or, "LXOR": np.logical_xor, "BAND": np.bitwise_and, "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }  # fmt: skip
    for name, (all_, root, prefix) in zip(names, jax.jit(program)(xs[RANK]), strict=True):
        fold = lambda xs, name=name: functools.reduce(functions[name], xs).astype(dtype)
        check(all_, fold(xs))
        check(root, fold(xs) if RANK == 0 else xs[RANK])
        check(prefix, fold(xs[: RANK + 1]) if RANK else xs[0])


def test_parts_of_the_ranks(mpi: Any, how: Any) -> None:
    alone = COMM.Split(RANK)
    turned = COMM.Split(0, -RANK)
    check(how(lambda x: mpi.allreduce(x, MPI.SUM, comm=alone))(3.0), 3.0)
    check(how(lambda x: mpi.allgather(x, comm=turned))(RANK), np.arange(SIZE)[::-1])
    check(how(lambda x: mpi.bcast(x, 0, comm=turned))(RANK), SIZE - 1)


def test_an_exchange_of_a_transposed_array(mpi: Any) -> None:
    # XLA may turn the axes by another layout of the same buffer, which MPI would not see.
    side = 8 * SIZE

    def transposed(rows: Array) -> Array:
        blocks = rows.reshape(side // SIZE, SIZE, side // SIZE).transpose(1, 0, 2)
        return mpi.alltoall(blocks, comm=COMM).reshape(side, side // SIZE).T

    whole = np.arange(side * side, dtype=np.float32).reshape(side, side)
    own = slice(RANK * side // SIZE, (RANK + 1) * side // SIZE)
    for f in (transposed, jax.jit(transposed)):
        check(f(whole[own]), whole.T[own])


def test_a_barrier(mpi: Any) -> None:
    mpi.barrier(comm=COMM)
    jax.effects_barrier()
    began = time.monotonic()
    if RANK == SIZE - 1:
        time.sleep(0.5)
    mpi.barrier(comm=COMM)
    jax.effects_barrier()
    assert time.monotonic() - began > 0.3


# Messages --------------------------------------------------------------------------------------------------------


@pairs_only
@pytest.mark.parametrize("kind", INPUTS)
def test_messages(mpi: Any, how: Any, kind: str) -> None:
    x = INPUTS[kind](RANK)
    like = np.zeros_like(x)

    def from_one(x: Array) -> Array:
        if RANK == 0:
            return jnp.stack([mpi.recv(like, source=rank, tag=rank) for rank in range(1, SIZE)])
        mpi.send(x, 0, tag=RANK)
        return x

    check(how(from_one)(x), np.stack([INPUTS[kind](rank) for rank in range(1, SIZE)]) if RANK == 0 else x)
    if RANK < 2:
        other = INPUTS[kind](OTHER)
        check(how(lambda x: mpi.sendrecv(x, like, OTHER, OTHER))(x), other)
        tags = {"sendtag": 10 + RANK, "recvtag": 10 + OTHER}
        check(how(lambda x: mpi.sendrecv(x, like, source=OTHER, dest=OTHER, comm=COMM, **tags))(x), other)

        def in_turn(x: Array) -> Array:  # another order of the two calls would hang
            if RANK == 0:
                mpi.send(jnp.tile(x, 1000), 1)
            y = mpi.recv(jnp.tile(like, 1000), OTHER)
            if RANK == 1:
                mpi.send(jnp.tile(x, 1000), 0)
            return y

        check(how(in_turn)(x), np.tile(other, 1000))


@pairs_only
def test_any_source_and_any_tag(mpi: Any, how: Any) -> None:
    if RANK == 0:
        got = [how(lambda x: mpi.recv(x))(np.float32(0)) for _ in range(1, SIZE)]
        check(sorted(got), np.arange(1, SIZE))
    else:
        how(lambda x: (mpi.send(x, 0, tag=5 * RANK), x))(np.float32(RANK))
    COMM.Barrier()


@pairs_only
def test_status(mpi: Any, how: Any) -> None:
    if RANK == 0:
        for rank in range(1, SIZE):
            status = MPI.Status()
            check(how(lambda x: mpi.recv(x, source=rank, tag=MPI.ANY_TAG, status=status))(np.zeros(3)), [rank] * 3)
            assert (status.Get_source(), status.Get_tag(), status.Get_count(MPI.FLOAT)) == (rank, 10 * rank, 3)
    else:
        how(lambda x: (mpi.send(x, 0, tag=10 * RANK), x))(np.full(3, RANK, np.float32))
    if RANK < 2:
        status = MPI.Status()
        f = how(lambda x: mpi.sendrecv(x, x, OTHER, OTHER, sendtag=7, status=status))
        for _ in range(2):
            check(f(np.float32(RANK)), OTHER)
            assert (status.Get_source(), status.Get_tag()) == (OTHER, 7)
            status.Set_source(-5)


@pairs_only
def test_nobody_receives(mpi: Any) -> None:
    jax.jit(lambda x: (mpi.send(x, MPI.PROC_NULL), x))(1.0)
    if RANK < 2:  # rank 0 sends to rank 1, which sends to nobody
        source, dest = (MPI.PROC_NULL, 1) if RANK == 0 else (0, MPI.PROC_NULL)
        got = jax.jit(lambda x: mpi.sendrecv(x, x, source, dest))(np.float32(RANK + 3))
        if RANK == 1:
            check(got, 3.0)


# Derivatives and batching ----------------------------------------------------------------------------------------


def total(mpi: Any) -> Callable[[Array], Array]:
    return lambda x: mpi.allreduce(x, op=MPI.SUM, comm=COMM)


def transpose(f: Callable[[Array], Array], x: Array) -> Callable[[Array], Array]:
    return lambda y: jax.linear_transpose(f, x)(y)[0]


def test_the_transpose_of_a_sum_is_the_identity(mpi: Any, how: Any) -> None:
    x = jnp.arange(6.0).reshape(3, 2)
    f = total(mpi)
    once = transpose(f, x)
    check(how(once)(x), x)
    check(how(transpose(once, x))(x), SIZE * x)
    check(how(transpose(transpose(once, x), x))(x), x)


def test_derivatives_of_a_sum(mpi: Any, how: Any) -> None:
    x, f = jnp.arange(1.0, 4.0), total(mpi)
    value, grad = how(jax.value_and_grad(lambda x: f(x).sum()))(x)
    check(value, 6.0 * SIZE)
    check(grad, np.ones(3))
    check(how(jax.grad(lambda x: (f(x) + 2 * f(x) + 0 * x).sum()))(x), 3 * np.ones(3))
    y, tangent = how(lambda x, t: jax.jvp(f, (x,), (t,)))(x, 2 * x)
    check(y, SIZE * x)
    check(tangent, 2 * SIZE * x)
    check(how(lambda x, ct: jax.vjp(f, x)[1](ct)[0])(x, 5 * x), 5 * x)
    # The cotangent of the inner sum is this rank's own, 2 y; its derivative goes forward through the sum.
    check(how(jax.hessian(lambda x: (f(x) ** 2).sum()))(x), 2 * SIZE * np.eye(3))


def test_batches_of_sums(mpi: Any, how: Any) -> None:
    x = jnp.arange(6.0).reshape(3, 2)
    check(how(jax.vmap(total(mpi)))(x), SIZE * x)
    check(how(jax.vmap(total(mpi), in_axes=1, out_axes=1))(x), SIZE * x)


def test_a_matrix_whose_columns_the_ranks_share(mpi: Any, how: Any) -> None:
    rng = np.random.default_rng(3)
    a, x, w = rng.normal(size=(5, 4 * SIZE)), rng.normal(size=4 * SIZE), rng.normal(size=5)
    a, x, w = (jnp.asarray(m, jnp.float32) for m in (a, x, w))
    own = slice(4 * RANK, 4 * RANK + 4)
    times = lambda x: total(mpi)(a[:, own] @ x)
    transposed_times = lambda w: a[:, own].T @ transpose(total(mpi), w)(w)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    there, back = how(times), how(transposed_times)
    close(there(x[own]), a @ x)
    close(back(w), (a.T @ w)[own])
    once = transpose(times, x[own])
    close(how(once)(w), (a.T @ w)[own])
    close(how(transpose(once, w))(x[own]), a @ x)
    close(how(transpose(transposed_times, w))(x[own]), a @ x)
    for f, at, want in ((times, x[own], a @ x), (transposed_times, w, (a.T @ w)[own])):
        y, tangent = how(lambda x, v, f=f: jax.jvp(f, (x,), (v,)))(at, 2 * at)
        close(y, want)
        close(tangent, 2 * want)
    close(how(lambda x, ct: jax.vjp(times, x)[1](ct)[0])(x[own], w), (a.T @ w)[own])
    close(how(lambda w, ct: jax.vjp(transposed_times, w)[1](ct)[0])(w, x[own]), a @ x)


def test_a_linear_solver(mpi: Any, how: Any) -> None:
    b = jnp.asarray(np.random.default_rng(0).normal(size=24), jnp.float32)
    x, _ = how(lambda b: cg(total(mpi), b))(b)
    np.testing.assert_allclose(SIZE * x, b, rtol=1e-5)


def test_an_expectation(mpi: Any, how: Any) -> None:
    """The gradient of a mean over samples of all ranks, by a rule that differentiates another mean, as in NetKet."""
    mean = lambda x: mpi.allreduce(x.mean(axis=0), op=MPI.SUM) / SIZE
    log_density = lambda w, x: x @ w
    local = lambda w, x: jnp.exp(x @ w) - 2

    @jax.custom_vjp
    def expectation(w: Array, x: Array) -> Array:
        return mean(local(w, x))

    def forward(w: Array, x: Array) -> Any:
        centre = mean(local(w, x))
        return centre, (w, x, local(w, x) - centre)

    def backward(saved: Any, ct: Array) -> Any:
        w, x, weights = saved
        f = lambda w, x: mean(jax.vmap(jnp.multiply)(weights, log_density(w, x)) + local(w, x)).sum()
        return jax.vjp(f, w, x)[1](ct)

    expectation.defvjp(forward, backward)
    rng = np.random.default_rng(1)
    w, xs = rng.normal(size=4) / 4, rng.normal(size=(SIZE, 16, 4))
    w, xs = jnp.asarray(w, jnp.float32), jnp.asarray(xs, jnp.float32)
    value, grad = how(jax.value_and_grad(expectation))(w, xs[RANK])
    values = jnp.exp(xs @ w) - 2
    np.testing.assert_allclose(value, values.mean(), rtol=1e-5)
    own = ((values[RANK] - values.mean()) + values[RANK] + 2)[:, None] * xs[RANK]  # mpi4jax's rule: this rank's samples
    np.testing.assert_allclose(grad, own.sum(axis=0) / 16 / SIZE, rtol=1e-4, atol=1e-6)


@pairs_only
def test_derivatives_of_an_exchange(mpi: Any) -> None:
    if RANK > 1:
        return
    swap = lambda x: mpi.sendrecv(x, x, source=OTHER, dest=OTHER)
    once = lambda x: (swap(x) * (RANK + 1)).sum()
    x = jnp.full((3, 2), RANK + 1.0)
    for how in (lambda f: f, jax.jit, pc.jit):
        check(how(jax.grad(once))(x), np.full((3, 2), OTHER + 1.0))
        check(how(jax.grad(lambda x: (swap(swap(x) * (RANK + 1) * 5) * (RANK + 1) ** 2).sum()))(x),
              np.full((3, 2), 5.0 * (OTHER + 1) * (RANK + 1) ** 2))  # fmt: skip
        check(how(jax.jacrev(once))(x), np.full((3, 2), OTHER + 1.0))
        check(how(jax.vmap(lambda x, y: mpi.sendrecv(x, y, OTHER, OTHER)))(x, x), np.full((3, 2), OTHER + 1.0))
    ring = lambda x: mpi.sendrecv(x, x, OTHER, OTHER, sendtag=3, recvtag=3)
    check(jax.grad(lambda x: (ring(x) * (RANK + 1)).sum())(x), np.full((3, 2), OTHER + 1.0))


# What is refused -------------------------------------------------------------------------------------------------


def test_wrong_arguments(mpi: Any) -> None:
    with pytest.raises(ValueError, match=r"Alltoall input must have shape \(nproc, \.\.\.\)"):
        mpi.alltoall(jnp.ones(SIZE + 1))
    if RANK == 0:
        with pytest.raises(ValueError, match=r"Scatter input must have shape \(nproc, \.\.\.\)"):
            mpi.scatter(jnp.ones(SIZE + 1), root=0)
    x = jnp.ones(3)
    for call in (
        lambda: mpi.allreduce(x, "sum"),
        lambda: mpi.allreduce(x, MPI.SUM, comm="world"),
        lambda: mpi.bcast(x, 0.5),
        lambda: mpi.bcast(x, True),
        lambda: mpi.send(x, "one"),
        lambda: mpi.recv(x, 0, tag=1.5),
        lambda: mpi.sendrecv(x, x, None, 0),
        lambda: mpi.recv(x, 0, status="there"),
        lambda: mpi.allreduce({"a": x}, MPI.SUM),
        lambda: jax.jit(lambda x, root: mpi.bcast(x, root))(x, 0),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(RuntimeError, match="[tT]oken"):
        mpi.allreduce(x, MPI.SUM, token=jnp.zeros(0))


def test_support(mpi: Any) -> None:
    assert isinstance(mpi.has_cuda_support(), bool)
    assert isinstance(mpi.has_sycl_support(), bool)


# A model ---------------------------------------------------------------------------------------------------------


@functools.cache
def flow(module: str, *, alone: bool = False) -> Any:
    """The state of the model after 40 steps."""
    channel = Channel(importlib.import_module(module), (24, 48), MPI.COMM_SELF if alone else COMM)
    return channel.run(40)


def test_shallow_water(mpi: Any) -> None:
    state, ours = flow(mpi.__name__), flow(compat.__name__)
    alone = flow(compat.__name__, alone=True)
    channel = Channel(mpi, (24, 48))
    sizes = zip(channel.shape, channel.place, strict=True)
    own = tuple(slice((n - 2) * at + 1, (n - 2) * (at + 1) + 1) for n, at in sizes)
    for name, field in state._asdict().items():
        np.testing.assert_array_equal(field, getattr(ours, name))
        # The blocks of the ranks make up what one rank computes.
        np.testing.assert_allclose(field[1:-1, 1:-1], getattr(alone, name)[own], rtol=1e-4, atol=1e-4)
    assert 1e-3 < float(jnp.abs(alone.v).max()) < 10
