"""Solvers over the axis of jax.vmap, in the place of ranks: hard systems, starts, ends and accuracy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pycollective.linalg import bicgstab, cg, gmres, lobpcg, tsqr
from tests.cases import values
from tests.cut_systems import SOLVERS, dense, every, operator, part, terms

Array = Any
Tree = Any
PARTS = 4


def cut(x: Array) -> Array:
    return x.reshape(PARTS, -1, *x.shape[1:])


def whole(x: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])


def solved(solver: Callable[..., Any], matrix: Array, b: Array, *start: Array, **options: Any) -> tuple[Array, Any]:
    """Solves with a matrix whose rows are cut, and returns the whole solution, and the info of the first part."""

    def of_part(rows: Array, b: Array, *start: Array) -> Any:
        return solver(lambda x: rows @ lax.all_gather(x, "i", tiled=True), b, *start, axis_name="i", **options)

    x, info = jax.jit(jax.vmap(of_part, axis_name="i"))(cut(matrix), cut(b), *map(cut, start))
    return whole(x), jax.tree.map(lambda of_all: of_all[0], info)


def spread(count: int, condition: float) -> Array:
    """Returns a symmetric matrix of this condition number whose eigenvalues are spread evenly by their logarithms."""
    q, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((count, count)))
    return jnp.asarray(q * np.geomspace(1 / condition, 1, count)[None] @ q.T)


@pytest.mark.parametrize(("name", "dtype"), [("cg", np.complex64), ("bicgstab", np.float32), ("gmres", np.complex128)])
def test_derivatives_with_a_start(name: str, dtype: Any) -> None:
    """The start has no derivative; and derivatives that are far smaller than it are as accurate."""
    with jax.enable_x64(jnp.finfo(dtype).bits == 64):
        tolerance = 1e-8 if dtype == np.complex128 else 1e-4
        matrix, b = terms(name, 12, dtype), values((12,), dtype, 6)
        weights = (1e-6 * values((12,), dtype, 7)).astype(dtype)

        def solve(start: Array, t: Any, b: Array) -> Array:
            return SOLVERS[name](operator(name, "i", PARTS, t), b, start, axis_name="i", tol=tolerance / 100)[0]

        def program(weights: Array, start: Array, t: Any, b: Array) -> Any:
            results = every(lambda t, b: solve(start, t, b), weights, t, b)
            return results, jax.grad(lambda start: jnp.sum(jnp.abs(solve(start, t, b))))(start)

        got, of_start = jax.jit(jax.vmap(program, axis_name="i"))(
            *jax.tree.map(cut, (weights, jnp.cos(weights) * 3, matrix, b))
        )

        def oracle(t: Any, b: Array) -> Array:
            return jnp.linalg.solve(dense(name, [3] * PARTS, t), b)

        want = jax.jit(lambda t, b: every(oracle, weights, t, b))(matrix, b)
        for x, y in zip(jax.tree.leaves(jax.tree.map(whole, got)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, 10 * tolerance, 10 * tolerance * np.abs(y).max())
        np.testing.assert_array_equal(of_start, 0)


@pytest.mark.parametrize("condition", [1e2, 1e6])
def test_cg_beside_its_classical_form(condition: float) -> None:
    """The attainable accuracy, with no tolerance, and the number of iterations for one, beside those of JAX.

    The form with one sum loses digits where the condition is large: how many depends on how XLA rounds.
    """
    with jax.enable_x64(True):
        matrix, b = spread(64, condition), jnp.asarray(values((64,), np.float64))

        def jax_cg(tol: float, maxiter: int) -> Array:
            return jax.scipy.sparse.linalg.cg(lambda x: matrix @ x, b, tol=tol, maxiter=maxiter)[0]

        def residual(x: Array) -> float:
            return float(jnp.linalg.norm(b - matrix @ x))

        x, _ = solved(cg, matrix, b, tol=1e-30, maxiter=600)
        assert residual(x) < (5 if condition < 1e4 else 1e3) * residual(jax_cg(1e-30, 600))
        x, info = solved(cg, matrix, b, tol=1e-8)
        assert bool(info.converged)
        assert residual(x) < 1.01e-8 * float(jnp.linalg.norm(b))
        assert float(info.residual_norm) == pytest.approx(residual(x), rel=0.05)
        # It ends in the iteration in which JAX's form does, or one beside it for each twenty.
        k = int(info.iterations)
        assert residual(jax_cg(0, k - 1 - k // (20 if condition < 1e4 else 5))) > 1e-8 * float(jnp.linalg.norm(b))
        assert residual(jax_cg(0, k + 1 + k // 20)) < 1e-8 * float(jnp.linalg.norm(b))


@pytest.mark.parametrize("name", SOLVERS)
def test_ends(name: str) -> None:
    matrix, b = spread(8, 10.0).astype(jnp.float32), jnp.arange(1.0, 9.0)
    exact = jnp.linalg.solve(matrix, b)
    for start, right in (((), 0 * b), ((exact,), matrix @ exact)):
        x, info = solved(SOLVERS[name], matrix, right, *start, tol=1e-4)
        assert (bool(info.converged), int(info.iterations)) == (True, 0)
        np.testing.assert_array_equal(x, start[0] if start else 0)
    x, info = solved(SOLVERS[name], matrix, b, tol=0, atol=10.0)
    assert float(jnp.linalg.norm(b - matrix @ x)) < 10.01
    assert float(info.residual_norm) > 1e-3
    options = {"restart": 2} if name == "gmres" else {}
    x, info = solved(SOLVERS[name], matrix, b, tol=1e-6, maxiter=1, **options)
    assert not bool(info.converged)
    assert int(info.iterations) == (2 if options else 1)
    assert float(info.residual_norm) == pytest.approx(float(jnp.linalg.norm(b - matrix @ x)), rel=1e-3)


def test_bicgstab_that_breaks_down() -> None:
    """The first direction is turned by a right angle: its inner product with the shadow of the residual is zero."""
    turn = jnp.kron(jnp.eye(PARTS), jnp.array([[0.0, -1.0], [1.0, 0.0]]))
    x, info = solved(bicgstab, turn, jnp.ones(2 * PARTS))
    assert (bool(info.converged), int(info.iterations)) == (False, 0)
    np.testing.assert_array_equal(x, 0)
    x, info = solved(gmres, turn, jnp.ones(2 * PARTS))
    assert bool(info.converged)
    np.testing.assert_allclose(x, turn.T @ jnp.ones(2 * PARTS), atol=1e-6)


@pytest.mark.parametrize("restart", [3, 8, 30])
def test_gmres_restarts_and_stops_where_the_space_is_invariant(restart: int) -> None:
    """After 4 steps the space is invariant: the matrix has 4 eigenvalues."""
    with jax.enable_x64(True):
        matrix = jnp.diag(jnp.repeat(jnp.array([1.0, 2.0, -3.0, 5.0]), 3))
        b = jnp.asarray(values((12,), np.float64))
        x, info = solved(gmres, matrix, b, tol=1e-12, restart=restart)
        np.testing.assert_allclose(matrix @ x, b, 1e-9)
        assert bool(info.converged)
        assert int(info.iterations) == 5 if restart > 4 else int(info.iterations) > 5


def test_gmres_of_a_singular_matrix() -> None:
    """A right side in the range is solved. Another one is not, and the result is finite."""
    matrix = jnp.diag(jnp.array([1.0, 2.0, 3.0, 0.0]))
    x, info = solved(gmres, matrix, jnp.array([1.0, 1.0, 1.0, 0.0]))
    assert bool(info.converged)
    np.testing.assert_allclose(matrix @ x, jnp.array([1.0, 1.0, 1.0, 0.0]), atol=1e-5)
    nilpotent = jnp.eye(4, k=1)
    x, info = solved(gmres, nilpotent, jnp.array([0.0, 0.0, 0.0, 1.0]), maxiter=3)
    assert not bool(info.converged)
    assert bool(jnp.isfinite(x).all())
    assert float(info.residual_norm) == pytest.approx(1)


def test_gmres_is_as_orthogonal_as_it_needs_to_be() -> None:
    """One pass of classical Gram-Schmidt does not reach this."""
    with jax.enable_x64(True):
        matrix = spread(40, 1e8) + jnp.eye(40, k=1) * 1e-3
        b = jnp.asarray(values((40,), np.float64))
        x, info = solved(gmres, matrix, b, tol=1e-12, restart=60, maxiter=2)
        assert bool(info.converged)
        assert int(info.iterations) <= 42
        assert float(jnp.linalg.norm(b - matrix @ x)) < 2e-12 * float(jnp.linalg.norm(b))


def test_a_preconditioner_that_is_not_symmetric_is_transposed() -> None:
    """With the inverse itself a solution takes one iteration, and so does the system of its derivative."""
    matrix = 4 * jnp.eye(8) + values((8, 8)) / 4
    inverse, b = jnp.linalg.inv(matrix), jnp.asarray(values((8,), seed=1))

    def of_part(rows: Array, inverse: Array, b: Array) -> Array:
        def times(rows: Array) -> Callable[[Array], Array]:
            return lambda x: rows @ lax.all_gather(x, "i", tiled=True)

        return bicgstab(times(rows), b, axis_name="i", tol=1e-4, maxiter=1, M=times(inverse))[0]

    def loss(b: Array) -> Array:
        return jnp.sum(jax.vmap(of_part, axis_name="i")(cut(matrix), cut(inverse), cut(b)) ** 3)

    want = jax.grad(lambda b: jnp.sum(jnp.linalg.solve(matrix, b) ** 3))(b)
    np.testing.assert_allclose(jax.grad(loss)(b), want, 1e-3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_small_floats_are_added_in_float32(dtype: Any) -> None:
    """The squared norm is above the largest float16."""
    b = jnp.full(2048, 100, dtype)
    x, info = jax.jit(jax.vmap(lambda b: cg(lambda x: x + x, b, axis_name="i"), axis_name="i"))(cut(b))
    assert x.dtype == dtype
    assert info.residual_norm.dtype == jnp.float32
    np.testing.assert_array_equal(x, 50)
    assert bool(info.converged.all())


def test_eigenvectors_that_cannot_be_told_apart() -> None:
    """Of an eigenvalue of several vectors, any basis; first vectors that depend on each other have no result."""
    d = jnp.array([3.0, 3.0, 3.0, *[1.0] * 21])
    apply = jax.vmap(lambda d, X: lobpcg(lambda x: d[:, None] * x, X, axis_name="i"), axis_name="i")
    X = jnp.asarray(values((24, 2), seed=3))
    theta, u, info = apply(cut(d), cut(X))
    np.testing.assert_allclose(theta[0], 3, 1e-5)
    np.testing.assert_allclose(whole(u).T @ whole(u), jnp.eye(2), atol=1e-5)
    assert bool(info.converged[0])
    theta, _, info = apply(cut(d), cut(jnp.stack([X[:, 0], 2 * X[:, 0]], 1)))
    assert not bool(info.converged[0])
    assert bool(jnp.isnan(theta).any())


def test_qr_of_nearly_dependent_columns() -> None:
    """The product of the matrix with its transpose would lose all bits."""
    with jax.enable_x64(True):
        a = jnp.asarray(np.vander(np.linspace(0, 1, 40), 12))
        q, r = jax.vmap(lambda a: tsqr(a, "i"), axis_name="i")(cut(a))
        np.testing.assert_allclose(whole(q).T @ whole(q), jnp.eye(12), atol=1e-14)
        np.testing.assert_allclose(whole(q) @ r[0], a, atol=1e-14)
        assert float(jnp.linalg.cond(a)) > 1e8


def test_a_part_may_be_of_any_shape() -> None:
    tree = {"a": jnp.ones((PARTS, 2, 3)), "b": jnp.ones(PARTS)}
    x, _ = jax.vmap(lambda b: cg(lambda x: jax.tree.map(lambda y: 2 * y, x), b, axis_name="i"), axis_name="i")(tree)
    assert jax.tree.all(jax.tree.map(lambda y: bool((y == 0.5).all()), x))
    assert part(tree, [1, 3], 1)["b"].shape == (3,)
