"""Linear systems, roots, fixed points, minima and differential equations whose functions sum over all devices."""

from __future__ import annotations

import warnings
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import lineax
import optimistix
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # jaxopt is not maintained any more
    import jaxopt

import pycollective as pc
from tests.libraries.programs import SOME, Program, Way, compare, name_of

Array = Any


def matvec(m: Array, v: Array, axis: Any) -> Array:
    """Returns ``(1 + sum_k m_k m_k^T) v``: each device has one ``m_k``, and all devices have ``v``."""
    return v + pc.psum(m * jnp.vdot(m, shared(v, axis)), axis)


def shared(v: Array, axis: Any) -> Array:
    """Returns ``v``, which is the same on all devices, so that its cotangent is the mean of all devices' cotangents."""
    return pc.pmean(v, axis)


def conjugate_gradients(m: Array, axis: Any) -> Array:
    right = jnp.arange(1.0, 4.0)
    operator = lineax.FunctionLinearOperator(
        lambda v: matvec(m, v, axis), jax.eval_shape(lambda: right), lineax.positive_semidefinite_tag
    )
    return lineax.linear_solve(operator, right, lineax.CG(rtol=1e-6, atol=1e-6)).value


def newton(m: Array, axis: Any) -> Array:
    """Returns the root ``y`` of ``y + sum_k tanh(m_k^2 y / 2) = 1``."""

    def function(y: Array, m: Array) -> Array:
        return y + pc.psum(jnp.tanh(0.5 * m * m * shared(y, axis)), axis) - 1

    return optimistix.root_find(function, optimistix.Newton(rtol=1e-6, atol=1e-6), jnp.zeros(3), m).value


def fixed_point(m: Array, axis: Any) -> Array:
    def function(y: Array, m: Array) -> Array:
        return pc.pmean(jnp.cos(0.1 * m * shared(y, axis)), axis)

    return optimistix.fixed_point(function, optimistix.FixedPointIteration(1e-6, 1e-6), jnp.zeros(3), m).value


def jaxopt_fixed_point(m: Array, axis: Any) -> Array:
    def function(y: Array, m: Array) -> Array:
        return pc.pmean(jnp.cos(0.1 * m * shared(y, axis)), axis)

    return jaxopt.FixedPointIteration(function, maxiter=50, tol=1e-6).run(jnp.zeros(3), m).params


def jaxopt_lbfgs(m: Array, axis: Any) -> Array:
    def loss(y: Array, m: Array) -> Array:
        away = shared(y, axis) - m
        return pc.pmean(jnp.sum(away**2 + 0.1 * away**4), axis)

    return jaxopt.LBFGS(loss, maxiter=10, tol=1e-4).run(jnp.zeros(3), m).params


def least_squares(m: Array, axis: Any) -> Array:
    """Solves for a minimum of residuals that are summed over all devices."""

    def residuals(y: Array, m: Array) -> Array:
        return pc.psum(jnp.tanh(m + shared(y, axis)) * jnp.arange(1.0, 4.0), axis)

    return optimistix.least_squares(residuals, optimistix.LevenbergMarquardt(1e-6, 1e-6), jnp.zeros(3), m).value


def bfgs(m: Array, axis: Any) -> Array:
    def loss(y: Array, m: Array) -> Array:
        away = shared(y, axis) - m
        return pc.pmean(jnp.sum(away**2 + 0.1 * away**4), axis)

    return optimistix.minimise(loss, optimistix.BFGS(1e-5, 1e-5), jnp.zeros(3), m, max_steps=100).value


def decay(axis: Any) -> diffrax.ODETerm:
    return diffrax.ODETerm(lambda t, y, m: -0.1 * pc.psum(m * m * shared(y, axis), axis))


def ode(m: Array, axis: Any) -> Array:
    steps = diffrax.PIDController(rtol=1e-3, atol=1e-3)
    solution = diffrax.diffeqsolve(
        decay(axis), diffrax.Bosh3(), 0.0, 1.0, 0.1, jnp.ones(3), m, stepsize_controller=steps, max_steps=16
    )
    return solution.ys[-1]


def stiff_ode(m: Array, axis: Any) -> Array:
    implicit = diffrax.ImplicitEuler(root_finder=optimistix.Newton(1e-6, 1e-6))
    return diffrax.diffeqsolve(decay(axis), implicit, 0.0, 1.0, 0.25, jnp.ones(3), m, max_steps=4).ys[-1]


def with_gradient(program: Program) -> Program:
    """Makes a program that returns the solution, and the derivative of its square."""

    def both(m: Array, axis: Any) -> tuple[Array, Array]:
        solution, back = jax.vjp(lambda m: program(m, axis), m)
        return solution, back(2 * solution)[0]

    return both


NEWTON = with_gradient(newton)
SLOW = (fixed_point, conjugate_gradients, least_squares, bfgs, jaxopt_lbfgs, jaxopt_fixed_point, ode, stiff_ode)


def test_solution_and_gradient(way: Way, world: pc.Communicator) -> None:
    compare(world, way, NEWTON, tolerance=1e-3)


# The two ways take turns: neighbours in the list are of one library, or solve alike.
@pytest.mark.parametrize(("program", "way"), list(zip(SLOW, SOME * 4, strict=True)), ids=name_of)
def test_solver(program: Program, way: Way, world: pc.Communicator) -> None:
    compare(world, way, with_gradient(program), tolerance=1e-3)
