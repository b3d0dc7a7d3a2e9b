"""Conjugate gradients with one sum over all parts for each iteration.

The two inner products of an iteration, ``r . M r`` and ``p . A p``, do not wait for each other in the form of
Chronopoulos and Gear: ``A p`` follows by a recurrence from ``A M r``, and ``p . A p`` from ``r . M r`` and
``M r . A M r``. This costs one more vector and one more application of ``A`` and of ``M``, at the end.

Sources: Chronopoulos, Gear, "s-step iterative methods for symmetric linear systems", J. Comput. Appl. Math. 25 (1989),
section 3.1. Its rounding errors are compared with those of the classical form, and of pipelined forms that are less
stable, in Carson, Rozloznik, Strakos, Tichy, Tuma, "The numerical stability analysis of pipelined conjugate gradient
methods", SIAM J. Sci. Comput. 40 (2018).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from pycollective.linalg.implicit import Info, Limits, Operator, size_of, solve
from pycollective.linalg.vectors import Array, Axis, Tree, add, real_dot, total, typed_like, zeros_like


def cg(
    A: Operator,
    b: Tree,
    x0: Tree | None = None,
    *,
    axis_name: Axis = None,
    tol: Any = 1e-5,
    atol: Any = 0.0,
    maxiter: Any = None,
    M: Operator | None = None,
) -> tuple[Tree, Info]:
    """Solves ``A x = b`` with conjugate gradients, for vectors that are cut over ranks or devices.

    Args:
        A: the operator, a function of this rank's part of a vector to this rank's part of the result, of the same
            structure, shapes and dtypes. It may call collectives, such as a halo exchange. The operator of all ranks
            together is Hermitian and positive definite.
        b: this rank's part of the right side: an array or a pytree of arrays, of floats or complex numbers. Ranks may
            have parts of other shapes, also without elements, if ``A`` can handle them.
        x0: this rank's part of the starting guess, like ``b``. Default: zeros.
        axis_name: the ranks or devices over which vectors are cut: a communicator, the world by default; or the name of
            an axis that a JAX transform binds, or a tuple of names.
        tol: the relative tolerance. Default 1e-5.
        atol: the absolute tolerance. Default 0. The iteration ends when the norm of the residual, over all ranks, is at
            most ``max(tol * norm(b), atol)``.
        maxiter: the largest number of iterations. Default: 10 times the number of elements of all ranks. ``tol``,
            ``atol`` and ``maxiter`` are the same on all ranks.
        M: the preconditioner, an approximation of the inverse of ``A``, a linear function as ``A``. Default: none.

    Returns:
        This rank's part of the solution, like ``b``, and an :class:`Info`.

    Raises:
        TypeError: ``A`` is no function, ``b`` has a dtype without fractions, or a result of ``A`` is not like ``b``.
        NameError: the axis is not bound.

    Differentiation:
        Both modes, by the solution of another system (:func:`jax.lax.custom_linear_solve`), with respect to ``b`` and
        to what ``A`` closes over. ``x0``, ``M`` and the info have no derivative.

    Order:
        Program order: the collectives of ``A`` and ``M``, and one sum of 3 numbers, in each iteration and before the
        first, where it is one of 5 numbers.

    Source:
        :func:`jax.scipy.sparse.linalg.cg`, whose inner products are those of one part.

    Example:
        Each rank has four entries of the diagonal of a matrix:

        >>> import jax.numpy as jnp, pycollective as pc
        >>> diagonal = jnp.arange(1.0, 5.0) + 4 * pc.world().rank
        >>> x, info = pc.linalg.cg(lambda x: diagonal * x, diagonal, M=lambda x: x / diagonal)
        >>> x, bool(info.converged), int(info.iterations)
        (Array([1., 1., 1., 1.], dtype=float32), True, 1)
    """
    limits = Limits(tol, atol, maxiter)
    loop = partial(_iterate, axis_name, limits)
    return solve("cg", loop, A, b, x0, axis_name, M, positive=True)


def _iterate(axis_name: Axis, limits: Limits, A: Operator, M: Operator, b: Tree, x0: Tree | None) -> tuple[Tree, Info]:
    """Iterates. In each iteration ``u = M r``, ``w = A u``, ``s = A p``, and the scalars are those of the next one."""

    def dots(r: Tree, u: Tree, w: Tree, *more: Array) -> Array:
        return total(axis_name, [real_dot(r, u), real_dot(w, u), real_dot(r, r), *more])

    def goes_on(state: tuple[Any, ...]) -> Array:
        *_, squares, k = state
        return (squares > limit) & (k < maxiter)

    def iterate(state: tuple[Any, ...]) -> tuple[Any, ...]:
        x, r, u, w, p, s, gamma, alpha, beta, _, k = state
        p, s = add(u, beta, p), add(w, beta, s)
        x, r = add(x, alpha, p), add(r, -alpha, s)
        u = M(r)
        w = A(u)
        new_gamma, delta, squares = dots(r, u, w)
        beta = new_gamma / gamma
        alpha = new_gamma / (delta - beta * new_gamma / alpha)
        return x, r, u, w, p, s, new_gamma, alpha, beta, squares, k + 1

    zeros = zeros_like(b)
    r = b if x0 is None else add(b, -1, A(x0))
    u = M(r)
    w = A(u)
    size = jnp.asarray(size_of(b), real_dot(b, b).dtype)
    gamma, delta, squares, of_b, size = dots(r, u, w, real_dot(b, b), size)
    limit, maxiter = limits.square(of_b), limits.iterations(size)
    x, k = zeros if x0 is None else x0, typed_like(jnp.int32(0), squares)
    start = (x, r, u, w, zeros, zeros, gamma, gamma / delta, 0 * gamma, squares, k)
    x, *_, squares, k = lax.while_loop(goes_on, iterate, start)
    return x, Info(squares <= limit, k, jnp.sqrt(squares))
