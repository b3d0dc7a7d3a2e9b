"""What the module in mpi4jax's place has beyond mpi4jax: derivatives, batching, dtypes, errors on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import pycollective as pc
import pycollective.compat.mpi4jax as compat

Array = Any
COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
ROOT = SIZE - 1
NEXT, LAST = (RANK + 1) % SIZE, (RANK - 1) % SIZE

LINEAR: dict[str, Callable[[Array], Array]] = {
    "reduce": lambda x: compat.reduce(x, MPI.SUM, ROOT),
    "scan": lambda x: compat.scan(x, MPI.SUM),
    "bcast": lambda x: compat.bcast(x, ROOT),
    "gather": lambda x: compat.gather(x, ROOT),
    "scatter": lambda x: compat.scatter(x if RANK == ROOT else x[0], ROOT),
    "allgather": lambda x: compat.allgather(x),
    "alltoall": lambda x: compat.alltoall(x),
    "sendrecv": lambda x: compat.sendrecv(x, x, LAST, NEXT, sendtag=4),
}
"""Functions of an array with a row for each rank."""


def rows(seed: int) -> Array:
    return jnp.asarray(np.random.default_rng([seed, RANK]).normal(size=(SIZE, 3)), jnp.float32)


@pytest.mark.parametrize("name", LINEAR)
def test_derivatives_over_all_ranks(name: str) -> None:
    # <w, J t> = <J^T w, t>, where both products go over all ranks.
    f, x, t = LINEAR[name], rows(0), rows(1)
    y, forward = pc.jit(lambda x, t: jax.jvp(f, (x,), (t,)))(x, t)
    np.testing.assert_allclose(forward, pc.jit(f)(t), rtol=1e-6)
    w = jnp.asarray(np.random.default_rng([2, RANK]).normal(size=y.shape), jnp.float32)
    for how in (pc.jit, jax.jit, lambda f: f):
        back = how(lambda x, w: jax.vjp(f, x)[1](w)[0])(x, w)
        assert back.shape == x.shape
        products = [COMM.allreduce(float((a * b).sum())) for a, b in ((w, forward), (back, t))]
        np.testing.assert_allclose(*products, rtol=1e-4)


@pytest.mark.parametrize("name", ["gather", "reduce", "scatter"])
def test_a_loss_of_the_root_alone(name: str) -> None:
    # The other ranks get their own x, which does not depend on the call; but they must take part in its transpose.
    loss = lambda x: jnp.sum(LINEAR[name](x) ** 2) * (RANK == ROOT)
    np.testing.assert_array_equal(jax.grad(loss)(rows(3)).shape, (SIZE, 3))


NO_OPERATION: dict[str, Callable[[Array], Array]] = {
    "allreduce": lambda x: compat.allreduce(x, MPI.SUM),
    "max": lambda x: compat.allreduce(x, MPI.MAX),
    "prod": lambda x: compat.allreduce(x, MPI.PROD),
    "lor": lambda x: compat.allreduce(x, MPI.LOR),
    "barrier": lambda x: (compat.barrier(), x)[1],
    "messages": lambda x: _messages(x),
}


def _messages(x: Array) -> Array:
    if RANK == 0 and SIZE > 1:
        compat.send(x, 1, tag=3)
    return compat.recv(x, 0, tag=3) if RANK == 1 else x


@pytest.mark.parametrize("name", [*LINEAR, *NO_OPERATION])
@pytest.mark.parametrize("axis", [0, 2])
def test_batches(name: str, axis: int) -> None:
    f = {**LINEAR, **NO_OPERATION}[name]
    batch = [rows(seed) for seed in range(4)]
    got = pc.jit(jax.vmap(f, in_axes=axis))(jnp.stack(batch, axis=axis))
    np.testing.assert_allclose(got, jnp.stack([f(x) for x in batch]), rtol=1e-6)


def test_batches_of_derivatives() -> None:
    # jax.linear_transpose and jax.grad under vmap, and vmap under them: the functions have a transpose of their own.
    x = rows(0)
    sums = lambda x: compat.allreduce(x, MPI.SUM)
    per_row = jax.vmap(jax.grad(lambda row: jnp.sum(sums(row) ** 2)))
    want = 2 * np.sum(COMM.allgather(np.asarray(x)), axis=0)
    np.testing.assert_allclose(pc.jit(per_row)(x), want, rtol=1e-5)
    np.testing.assert_allclose(pc.jit(jax.grad(lambda x: jnp.sum(jax.vmap(sums)(x) ** 2)))(x), want, rtol=1e-5)


def test_forward_mode_of_an_exchange() -> None:
    f = lambda x: jnp.sin(compat.sendrecv(x, x, LAST, NEXT))
    got = pc.jit(jax.jacfwd(f))(jnp.float32(RANK))
    # The tangent of the neighbour is 1 as well.
    np.testing.assert_allclose(got, np.cos(LAST), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_other_dtypes(dtype: Any) -> None:
    x = jnp.ones(3, dtype)
    for y in (compat.allreduce(x, MPI.SUM), compat.scan(x, MPI.SUM) - RANK + SIZE - 1, SIZE * compat.bcast(x, 0)):
        assert y.dtype == dtype
        np.testing.assert_array_equal(y.astype(jnp.float32), SIZE)


class Wrapper:
    """As mpi4jax wraps objects of MPI to make them hashable."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped


def test_communicators_and_wrappers() -> None:
    for comm in (None, COMM, Wrapper(COMM), pc.world()):
        assert compat.allreduce(1, Wrapper(MPI.SUM), comm=comm) == SIZE


def test_a_program_is_compiled_once() -> None:
    traces = []

    @jax.jit
    def f(x: Array) -> Array:
        traces.append(x.shape)
        return compat.allreduce(x, MPI.SUM)

    for _ in range(3):
        f(jnp.ones(3))
    assert len(traces) == 1


@pytest.mark.parametrize("donated", [False, True])
def test_a_sum_is_in_place_where_that_needs_no_copy(donated: bool) -> None:
    f = pc.jit(lambda x: compat.allreduce(x, MPI.SUM), donate_argnums=(0,) if donated else ())
    assert ("output_tuple_indices" in f.lower(jnp.ones(3)).as_text()) == donated
    np.testing.assert_array_equal(f(jnp.ones(3)), SIZE)


def test_messages_of_errors() -> None:
    start = r"pycollective.compat.{}: expected .*{}.* \(rank {} of {}\)\. "
    own = MPI.Op.Create(lambda a, b, kind: None)
    for function, got, kind, call in (
        ("allreduce", "another operation", NotImplementedError, lambda: compat.allreduce(1.0, own)),
        ("reduce", "another operation", NotImplementedError, lambda: compat.reduce(1.0, MPI.MAXLOC, 0)),
        ("sendrecv", "any source", NotImplementedError, lambda: compat.sendrecv(1.0, 1.0, MPI.ANY_SOURCE, 0)),
        ("bcast", "True", TypeError, lambda: compat.bcast(1.0, True)),
        ("alltoall", "rows", ValueError, lambda: compat.alltoall(1.0)),
        ("allgather", "dict", TypeError, lambda: compat.allgather({"a": 1.0})),
    ):
        with pytest.raises(kind, match=start.format(function, got, RANK, SIZE)):
            call()
    own.Free()
    with pytest.raises(ValueError, match="expected root from 0 to"):
        compat.bcast(1.0, SIZE)


def test_a_token_beside_the_result() -> None:
    """Before mpi4jax 0.8 functions returned a token as well. An array of two rows would be taken apart in silence."""
    x = jnp.ones((2, 3))
    refused = (
        r"pycollective\.compat\.{}: expected one name for the result, an array, got two names for its two rows "
        rf"\(rank {RANK} of {SIZE}\)\. Write y = \.\.\. without a token, .*; and then a, b = y for the two rows\."
    )
    with pytest.raises(TypeError, match=refused.format("allreduce")):
        _, _ = compat.allreduce(x, op=MPI.SUM)
    with pytest.raises(TypeError, match=refused.format("bcast")):
        _, _ = compat.bcast(x, 0, comm=COMM)

    @jax.jit
    def traced(x: Array) -> Array:
        y, _ = compat.scan(*(x, MPI.SUM))
        return y

    with pytest.raises(TypeError, match=refused.format("scan")):
        traced(x)
    with pytest.raises(ValueError, match="too many values to unpack"):  # Python says it where the length does
        _, _ = compat.allreduce(jnp.ones(3), op=MPI.SUM)


def test_results_are_arrays() -> None:
    x = jnp.arange(2.0)
    y = compat.allreduce(x, op=MPI.SUM)
    a, b = y
    assert (a, b, *compat.allreduce(x, op=MPI.SUM)) == (0, SIZE, 0, SIZE)
    assert compat.allreduce(x, op=MPI.SUM)[1] == SIZE
    _, (c, d) = 0, compat.allreduce(x, op=MPI.SUM) + 0
    assert (c, d) == (0, SIZE)
