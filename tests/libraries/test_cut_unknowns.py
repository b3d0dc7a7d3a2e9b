"""Solvers of other libraries whose unknowns are cut over all devices: they take norms and linear solvers from us.

docs/linalg.md has the same recipes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import optimistix
import pytest
from jax import lax

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # jaxopt is not maintained any more
    from jaxopt import implicit_diff

import pycollective as pc
from pycollective.linalg import bicgstab, gmres
from tests.libraries.programs import SOME, Program, Way, compare, name_of
from tests.libraries.test_solvers import with_gradient

Array = Any


class CutSolver(lineax.AbstractLinearSolver):
    """A solver of lineax by ``solve(A, b)``, which returns what :func:`pycollective.linalg.cg` does."""

    solve: Callable[..., Any] = eqx.field(static=True)

    def init(self, operator: Any, options: Any) -> Any:  # noqa: ARG002 (lineax gives it)
        return operator

    def compute(self, state: Any, vector: Any, options: Any) -> Any:  # noqa: ARG002 (lineax gives it)
        x, info = self.solve(state.mv, vector)
        result = lineax.RESULTS.where(info.converged, lineax.RESULTS.successful, lineax.RESULTS.max_steps_reached)
        return x, result, {"num_steps": info.iterations}

    def transpose(self, state: Any, options: Any) -> Any:
        return state.transpose(), options

    def conj(self, state: Any, options: Any) -> Any:
        return lineax.conj(state), options

    def assume_full_rank(self) -> bool:
        return True


def linear(m: Array, axis: Any) -> Callable[[Array], Array]:
    """Returns the operator ``(4 + diag(m^2)) x + m sum_r n_r . x_r``, where ``n = m``, moved by one entry."""
    return lambda x: (4 + m * m) * x + m * pc.psum(jnp.vdot(jnp.roll(m, 1), x), axis) / 20


def dense_linear(m: Array, axis: Any) -> tuple[Array, Array, Callable[[Array], Array]]:
    """Returns the matrix of the whole, all ``m``, and a function from the whole to this device's part."""
    every = lax.all_gather(m, axis)
    rolled = jnp.roll(every, 1, 1).ravel()
    flat = every.ravel()
    return (
        jnp.diag(4 + flat**2) + jnp.outer(flat, rolled) / 20,
        flat,
        lambda x: lax.dynamic_index_in_dim(x.reshape(every.shape), lax.axis_index(axis), keepdims=False),
    )


def by_lineax(m: Array, axis: Any) -> Array:
    solver = CutSolver(partial(bicgstab, axis_name=axis, tol=1e-6))
    operator = lineax.FunctionLinearOperator(linear(m, axis), jax.eval_shape(lambda: m))
    return lineax.linear_solve(operator, jnp.cos(m), solver).value


def dense(m: Array, axis: Any) -> Array:
    matrix, every, own = dense_linear(m, axis)
    return own(jnp.linalg.solve(matrix, jnp.cos(every)))


def residual(y: Array, m: Array, axis: Any) -> Array:
    return linear(m, axis)(y) + jnp.tanh(y) - jnp.cos(m)


def by_optimistix(m: Array, axis: Any) -> Array:
    solver = CutSolver(partial(gmres, axis_name=axis, tol=1e-6))
    newton = optimistix.Newton(1e-6, 1e-6, norm=partial(pc.linalg.norm, axis_name=axis), linear_solver=solver)
    adjoint = optimistix.ImplicitAdjoint(linear_solver=solver)
    return optimistix.root_find(partial(residual, axis=axis), newton, jnp.zeros(3), m, adjoint=adjoint).value


def by_jaxopt(m: Array, axis: Any) -> Array:
    """Differentiates a loop of the user's own. The loops of jaxopt's solvers end by norms of one part."""

    def solve(A: Any, b: Array) -> Array:
        return gmres(A, b, axis_name=axis, tol=1e-6)[0]

    @implicit_diff.custom_root(partial(residual, axis=axis), solve=solve)
    def newton(start: Array, m: Array) -> Array:
        def step(_: int, y: Array) -> Array:
            value, slope = jax.linearize(lambda y: residual(y, m, axis), y)
            return y - solve(slope, value)

        return lax.fori_loop(0, 5, step, start)

    return newton(jnp.zeros(3), m)


def dense_root(m: Array, axis: Any) -> Array:
    """The same root by Newton's method for the whole."""
    matrix, every, own = dense_linear(m, axis)

    def step(_: int, y: Array) -> Array:
        slope = matrix + jnp.diag(1 - jnp.tanh(y) ** 2)
        return y - jnp.linalg.solve(slope, matrix @ y + jnp.tanh(y) - jnp.cos(every))

    return own(lax.fori_loop(0, 5, step, jnp.zeros_like(every)))


@pytest.mark.parametrize(
    ("program", "reference", "way"),
    [(by_lineax, dense, SOME[0]), (by_optimistix, dense_root, SOME[1]), (by_jaxopt, dense_root, SOME[0])],
    ids=name_of,
)
def test_unknowns_that_are_cut(program: Program, reference: Program, way: Way, world: pc.Communicator) -> None:
    compare(world, way, with_gradient(program), tolerance=1e-3, reference=with_gradient(reference))
