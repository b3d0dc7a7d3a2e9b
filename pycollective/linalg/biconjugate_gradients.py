"""The stabilized biconjugate gradients with two sums over all parts for each iteration.

All inner products that the next direction needs wait for one vector, ``t = A M s``, if the next ``rhat . r`` in its
factor is ``rhat . s - omega rhat . t``: they are one sum. The squared norm of the residual is part of the sum of
``rhat . q`` after it. It is not computed from the other inner products: the difference of such numbers may be far below
their rounding errors, and would end the loop too early.

Source: van der Vorst, "Bi-CGSTAB", SIAM J. Sci. Stat. Comput. 13 (1992); the preconditioner stands on the right, so the
residual is that of the system itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from pycollective.linalg.implicit import Info, Limits, Operator, size_of, solve
from pycollective.linalg.vectors import Array, Axis, Tree, add, dot, scalar_dtype, total, typed_like, zeros_like


def bicgstab(
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
    """Solves ``A x = b`` with stabilized biconjugate gradients, for vectors that are cut over ranks or devices.

    Args:
        A: as for :func:`cg`; the operator of all ranks together is invertible.
        b: as for :func:`cg`.
        x0: as for :func:`cg`. Default: zeros.
        axis_name: as for :func:`cg`. Default: the world.
        tol: as for :func:`cg`. Default 1e-5.
        atol: as for :func:`cg`. Default 0.
        maxiter: as for :func:`cg`. Default: 10 times the number of elements of all ranks.
        M: the preconditioner, as for :func:`cg`. A derivative in reverse mode takes its transpose. Default: none.

    Returns:
        This rank's part of the solution, like ``b``, and an :class:`Info`. The method may break down, by an inner
        product that is zero; then the last iterate is returned, as one that has not converged.

    Raises:
        TypeError, NameError: as for :func:`cg`.

    Differentiation:
        As for :func:`cg`.

    Order:
        Program order: the collectives of two applications of ``A`` and of ``M``, and two sums of 5 and 3 numbers, in
        each iteration; before the first, one application of each and one sum of 4 numbers.

    Source:
        :func:`jax.scipy.sparse.linalg.bicgstab`, whose inner products are those of one part.

    Example:
        Each rank turns two numbers by a right angle and adds them to themselves:

        >>> import jax.numpy as jnp, pycollective as pc
        >>> x, info = pc.linalg.bicgstab(lambda x: x + jnp.stack([-x[1], x[0]]), jnp.array([0.0, 2.0]))
        >>> x.round(4), bool(info.converged)
        (Array([1., 1.], dtype=float32), True)
    """
    limits = Limits(tol, atol, maxiter)
    loop = partial(_iterate, axis_name, limits)
    return solve("bicgstab", loop, A, b, x0, axis_name, M, positive=False)


def _iterate(axis_name: Axis, limits: Limits, A: Operator, M: Operator, b: Tree, x0: Tree | None) -> tuple[Tree, Info]:
    """Iterates. At the start of an iteration ``u = M p``, ``q = A u``, ``rho = rhat . r`` and ``sigma = rhat . q``."""

    def direction(p: Tree) -> tuple[Tree, Tree]:
        u = M(p)
        return u, A(u)

    def goes_on(state: tuple[Any, ...]) -> Array:
        *_, rho, sigma, omega, squares, k = state
        breaks_down = (rho == 0) | (sigma == 0) | (omega == 0)
        return (squares > limit) & (k < maxiter) & ~breaks_down

    def iterate(state: tuple[Any, ...]) -> tuple[Any, ...]:
        x, r, p, u, q, rho, sigma, _, _, k = state
        alpha = rho / sigma
        s = add(r, -alpha, q)
        v, t = direction(s)
        of_s, ts, tt, rs, rt = total(axis_name, [dot(s, s), dot(t, s), dot(t, t), dot(rhat, s), dot(rhat, t)])
        half = of_s.real <= limit  # x + alpha u solves the system: t may be zero
        omega = jnp.where(half | (tt == 0), 0, ts / tt)
        x, r = add(add(x, alpha, u), omega, v), add(s, -omega, t)
        beta = (rs - omega * rt) / rho * (alpha / omega)
        p = add(r, beta, add(p, -omega, q))
        u, q = direction(p)
        sigma, rho, squares = total(axis_name, [dot(rhat, q), dot(rhat, r), dot(r, r)])
        return x, r, p, u, q, rho, sigma, omega, jnp.where(half, of_s, squares).real, k + 1

    r = rhat = b if x0 is None else add(b, -1, A(x0))
    u, q = direction(r)
    size = jnp.asarray(size_of(b), scalar_dtype(b))
    sigma, rho, of_b, size = total(axis_name, [dot(rhat, q), dot(r, r), dot(b, b), size])
    limit, maxiter = limits.square(of_b.real), limits.iterations(size.real)
    x = zeros_like(b) if x0 is None else x0
    start = (x, r, r, u, q, rho, sigma, typed_like(jnp.ones_like(rho), rho), rho.real, typed_like(jnp.int32(0), rho))
    x, *_, squares, k = lax.while_loop(goes_on, iterate, start)
    return x, Info(squares <= limit, k, jnp.sqrt(squares))
