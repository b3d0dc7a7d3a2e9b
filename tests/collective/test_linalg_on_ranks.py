"""Solvers over communicators, with parts of different lengths, against dense solutions of the whole in one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pycollective as pc
from pycollective.linalg import cg, gmres, lobpcg, norm, tsqr, vdot
from tests.cases import values
from tests.cut_systems import SOLVERS, dense, every, operator, part, terms, tolerance

Array = Any
Tree = Any


def lengths_of(size: int) -> list[int]:
    """Parts of different lengths; one has no entries."""
    return [5, 0, 4, 3][:size] if size > 1 else [6]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("cg", np.float64), ("bicgstab", np.complex128), ("gmres", np.float32)],
)
def test_solutions_and_derivatives(name: str, dtype: Any, world: pc.Communicator) -> None:
    with jax.enable_x64(jnp.finfo(dtype).bits == 64):
        lengths = lengths_of(world.size)
        whole = terms(name, sum(lengths), dtype), values((sum(lengths),), dtype, 6), values((sum(lengths),), dtype, 7)
        mine, b, weights = part(whole, lengths, world.rank)

        def solve(terms: Any, b: Array) -> Array:
            apply, limit = operator(name, world, world.size, terms), tolerance(dtype) / 10
            return SOLVERS[name](apply, b, axis_name=world, tol=limit, M=lambda x: x / terms.d)[0]

        got = pc.jit(lambda terms, b: every(solve, weights, terms, b))(mine, b)

        def oracle(terms: Any, b: Array) -> Array:
            return jnp.linalg.solve(dense(name, lengths, terms), b)

        want = jax.jit(lambda terms, b: every(oracle, whole[2], terms, b))(*whole[:2])
        want = part(want, lengths, world.rank)
        compare(got, want, tolerance(dtype))


def compare(got: Tree, want: Tree, tolerance: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_allclose(x, y, tolerance, tolerance, err_msg=jax.tree_util.keystr(path))


def calls(run: Callable[[], Tree]) -> tuple[Tree, list[int]]:
    """Returns a result, and how many numbers each collective call has sent for it."""
    jax.block_until_ready(run())  # the first call of a program compares more
    before = pc.recorder.dump()["entries"][-1]["record_id"]
    result = jax.block_until_ready(run())
    entries = [entry for entry in pc.recorder.dump()["entries"] if entry["record_id"] > before]
    assert {entry["profiling_name"] for entry in entries} <= {"pycollective:allreduce", "pycollective:allgather"}
    return result, [int(np.prod(entry["input_sizes"][0])) for entry in entries]


def diagonal(world: pc.Communicator) -> Array:
    return 1 + jnp.arange(3.0) + 3 * world.rank


@pytest.mark.parametrize(
    ("name", "first", "each", "last"),
    [("cg", [5], [3], []), ("bicgstab", [4], [5, 3], []), ("gmres", [3], [21, 23], [1])],
)
def test_sums_of_each_iteration(
    name: str, first: list[int], each: list[int], last: list[int], world: pc.Communicator
) -> None:
    """The operator has no collectives. A cycle of gmres has 20 steps."""
    d = diagonal(world)
    solve = pc.jit(lambda b: SOLVERS[name](lambda x: d * x, b, tol=1e-4))
    (_, info), sizes = calls(lambda: solve(jnp.ones(3)))
    assert info.converged
    assert 2 <= info.iterations <= 3 * world.size + 1
    assert sizes == first + each * int(info.iterations) + last


def test_collectives_of_matrices(world: pc.Communicator) -> None:
    """With k = 2 vectors, the sums of LOBPCG; with n = 2 columns, the gather of QR."""
    d = diagonal(world)[:, None]
    solve = pc.jit(lambda X: lobpcg(lambda x: d * x, X, tol=1e-2))
    (*_, info), sizes = calls(lambda: solve(jnp.eye(3, 2)))
    assert sizes == [10, 7, 74] + [15, 74] * int(info.iterations)
    _, sizes = calls(lambda: jax.jit(tsqr)(jnp.eye(3, 2)))
    assert sizes == [6]


def test_a_batch_makes_the_iterations_of_its_slowest_system(world: pc.Communicator) -> None:
    d = diagonal(world)
    easy = jnp.where(jnp.arange(3) == 0, float(world.rank == 0), 0)
    batch = jnp.stack([0 * easy, easy, jnp.ones(3)])

    def solve(b: Array) -> Any:
        return cg(lambda x: d * x, b, tol=1e-4)

    program = pc.jit(jax.vmap(solve))
    (x, info), sizes = calls(lambda: program(batch))
    alone = [pc.jit(solve)(b) for b in batch]
    assert info.iterations.tolist() == [int(one.iterations) for _, one in alone]
    assert info.iterations[:2].tolist() == [0, 1]
    assert sizes == [15] + [9] * int(info.iterations[2])
    np.testing.assert_allclose(x, jnp.stack([one for one, _ in alone]), 1e-6, 1e-6)
    np.testing.assert_array_equal(x[0], 0)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("place", ["right side", "operator"])
def test_a_nan_of_one_rank_ends_the_loop_on_all(name: str, place: str, world: pc.Communicator) -> None:
    d, b = diagonal(world), jnp.ones(3)
    if world.rank == world.size - 1:
        d, b = (d, b.at[1].set(jnp.nan)) if place == "right side" else (d.at[1].set(jnp.nan), b)
    _, info = pc.jit(lambda b: SOLVERS[name](lambda x: d * x, b, tol=1e-4))(b)
    ended = pc.all_gather(jnp.stack([info.converged.astype(jnp.int32), info.iterations]))
    assert ended[:, 0].tolist() == [0] * world.size
    assert len(set(ended[:, 1].tolist())) == 1
    steps = 2 if name == "gmres" else 1  # gmres takes one step more than it needs
    assert ended[0, 1] == (0 if place == "right side" else steps)
    assert bool(jnp.isnan(info.residual_norm))


def test_trees(world: pc.Communicator) -> None:
    """The lengths of leaves, and the number of leaves, differ between ranks."""
    b: Tree = {"scalar": jnp.float32(2), "matrix": jnp.ones((2, world.rank + 1))}
    if world.rank == 0:
        b["more"] = jnp.arange(1.0, 4.0)

    def apply(x: Tree) -> Tree:
        mean = pc.psum(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(x))) / 20
        return jax.tree.map(lambda leaf: 2 * leaf + mean, x)

    x, info = pc.jit(lambda b: cg(apply, b, jax.tree.map(jnp.ones_like, b), tol=1e-6))(b)
    assert jax.tree.structure(x) == jax.tree.structure(b)
    count = 6 + sum(2 * (r + 1) + 1 for r in range(world.size)) - 3
    total = 6 + sum(2 + 2 * (r + 1) for r in range(world.size))
    mean = total / (2 + count / 20) / 20
    compare(x, jax.tree.map(lambda leaf: (leaf - mean) / 2, b), 1e-5)
    assert info.iterations <= 4


@pytest.mark.parametrize(("dtype", "largest"), [(np.float32, True), (np.complex128, False)])
def test_eigenpairs(dtype: Any, largest: bool, world: pc.Communicator) -> None:
    with jax.enable_x64(jnp.finfo(dtype).bits == 64):
        lengths = [10 * n for n in lengths_of(world.size)]
        d = np.linspace(1, 9, sum(lengths)).astype(dtype) ** 2
        whole = terms("cg", sum(lengths), dtype)._replace(d=d)
        mine, X = part((whole, values((sum(lengths), 3), dtype, 8)), lengths, world.rank)
        apply = jax.vmap(operator("cg", world, world.size, mine), 1, 1)

        def preconditioner(x: Array) -> Array:
            return x / mine.d[:, None]

        theta, u, info = pc.jit(lambda X: lobpcg(apply, X, largest=largest, M=None if largest else preconditioner))(X)
        assert info.converged
        assert 3 < info.iterations < 60
        matrix = dense("cg", lengths, whole)
        want = jnp.linalg.eigvalsh(matrix)
        want = want[::-1][:3] if largest else want[:3]
        limit = tolerance(dtype)
        np.testing.assert_allclose(theta, want, limit)
        np.testing.assert_allclose(apply(u), u * theta.astype(dtype)[None], limit, 20 * limit)
        np.testing.assert_allclose(pc.psum(u.conj().T @ u), jnp.eye(3), limit, limit)
        assert all(bits == theta.tobytes() for bits in world.mpi.allgather(theta.tobytes()))


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_qr_of_rows_that_are_cut(dtype: Any, world: pc.Communicator) -> None:
    """A rank has no rows, or fewer than columns, or rows of which one is zero."""
    with jax.enable_x64(jnp.finfo(dtype).bits == 64):
        lengths = lengths_of(world.size)
        whole = values((sum(lengths), 4), dtype, 9)
        whole[-1] = 0
        weights = values((sum(lengths), 4), dtype, 10), values((4, 4), dtype, 11)
        a, of_q = part((whole, weights[0]), lengths, world.rank)

        def weighed(of_q: Array, q: Array, r: Array) -> Array:
            return jnp.sum((of_q.conj() * q).real) + jnp.sum((weights[1].conj() * r).real)

        def oracle(a: Array) -> Any:
            q, r = jnp.linalg.qr(a)
            sign = jnp.sign(jnp.diagonal(r))
            return q * sign[None], r * sign.conj()[:, None]

        tangent = jnp.sin(whole)

        def every(qr: Any, weigh: Any, a: Array, da: Array) -> Any:
            return {"qr": qr(a), "jvp": jax.jvp(qr, (a,), (da,))[1], "grad": jax.grad(lambda a: weigh(*qr(a)))(a)}

        # r counts on all ranks, as the result of a sum does.
        share = jax.jit(lambda a, da: every(tsqr, lambda q, r: weighed(of_q, q, r / world.size), a, da))
        got = share(a, part(tangent, lengths, world.rank))
        want = jax.jit(lambda a, da: every(oracle, lambda q, r: weighed(weights[0], q, r), a, da))(whole, tangent)
        own = {
            key: (part(pair[0], lengths, world.rank), pair[1]) if key != "grad" else part(pair, lengths, world.rank)
            for key, pair in want.items()
        }
        compare(got, own, tolerance(dtype))
        bits = np.asarray(got["qr"][1]).tobytes()
        assert all(other == bits for other in world.mpi.allgather(bits))
        diagonal = jnp.diagonal(got["qr"][1])
        assert bool(jnp.all((diagonal.real >= 0) & (diagonal.imag == 0)))


def test_qr_of_too_few_rows_is_nan(world: pc.Communicator) -> None:
    for rows, nan in ((1, False), (0, world.size > 1)):
        a = jnp.arange(1.0, world.size + 1)[None] ** world.rank
        a = a if world.rank == 0 else a[:rows]
        q, r = tsqr(a)
        assert bool(jnp.isnan(r).all()) == nan
        assert bool(jnp.isnan(q).all()) == (nan or not q.size)


def test_norm_and_inner_product(world: pc.Communicator) -> None:
    part = {"a": jnp.arange(3) + world.rank, "b": jnp.ones((world.rank, 2), jnp.bfloat16)}
    whole = np.concatenate([np.append(np.arange(3) + r, np.ones(2 * r)) for r in range(world.size)])
    assert float(norm(part)) == pytest.approx(np.linalg.norm(whole))
    x, y = (values((3,), np.complex64, seed + world.rank) for seed in (0, 10))
    every = [np.concatenate(world.mpi.allgather(v)) for v in (x, y)]
    np.testing.assert_allclose(vdot(x, y), np.vdot(*every), 1e-5)
    assert float(jax.grad(lambda x: norm(x))(jnp.zeros(2))[0]) == 0


def refused(kind: type[Exception], name: str, words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(f"pycollective.linalg.{name}: expected {words}")):
        call()


def test_messages() -> None:
    b, half = jnp.ones(3), jnp.ones((3, 1), jnp.float16)
    like = "the result of A to be like b, float32[3], got float32[1]. The operator"
    refused(TypeError, "cg", like, lambda: cg(lambda x: x[:1], b))
    refused(TypeError, "cg", "x0 to be like b, float32[3], got float32[]", lambda: cg(lambda x: x, b, 0.0))
    floats = "b: arrays of floats or complex numbers, got"
    refused(TypeError, "cg", f"{floats} int32", lambda: cg(lambda x: x, jnp.arange(3)))
    refused(TypeError, "cg", f"{floats} no array", lambda: cg(lambda x: x, {}))
    refused(TypeError, "cg", "A: a function, got ArrayImpl", lambda: cg(jnp.eye(3), b))
    mixed = "b: all real or all complex, got both"
    refused(TypeError, "gmres", mixed, lambda: gmres(lambda x: x, (b, b.astype(complex))))
    refused(ValueError, "gmres", "restart to be at least 1, got 0.", lambda: gmres(lambda x: x, b, restart=0))
    refused(ValueError, "tsqr", "a matrix, got shape (3,)", lambda: tsqr(b))
    refused(TypeError, "tsqr", "floats or complex numbers of at least 32 bits, got float16", lambda: tsqr(half))
    refused(ValueError, "lobpcg", "X: a matrix, got shape (3,)", lambda: lobpcg(lambda x: x, b))
    refused(TypeError, "lobpcg", "X in at least 32 bits, got float16", lambda: lobpcg(lambda x: x, half))
    gradient = jax.grad(lambda d: lobpcg(lambda x: d * x, jnp.ones((3, 1)))[0].sum())
    words = "no derivative of eigenpairs, got one. Put jax.lax.stop_gradient around"
    refused(NotImplementedError, "lobpcg", words, lambda: jax.eval_shape(gradient, 2.0))
    refused(NameError, "cg", "an axis name that a transform around", lambda: cg(lambda x: x, b, axis_name="i"))
    refused(NameError, "tsqr", "an axis name that a transform around", lambda: tsqr(b[None], "i"))
