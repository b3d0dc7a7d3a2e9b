"""Generalized minimal residuals with two sums over all parts for each step.

A step makes a new vector orthogonal to those of the cycle, twice by classical Gram-Schmidt: each time one sum has the
inner products with all of them. The second sum also has the squared norm before it, from which that after it follows,
since what the second pass subtracts is small.

The norm of the residual in each step is the result of rotations that each rank computes. Ranks with other processors
may round it differently, so the loop takes that of the first rank, which the next step's sum carries: a cycle makes one
step more than it needs.

Sources: Saad, Schultz, "GMRES", SIAM J. Sci. Stat. Comput. 7 (1986), with the preconditioner on the right, so the
residual is that of the system itself; Giraud, Langou, Rozloznik, van den Eshof, "Rounding error analysis of the
classical Gram-Schmidt orthogonalization process", Numer. Math. 101 (2005): twice is enough.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pycollective.collectives.jax_collectives import axis_index
from pycollective.errors import integer, message
from pycollective.linalg.implicit import Info, Limits, Operator, size_of, solve
from pycollective.linalg.vectors import Array, Axis, Tree, add, real_dot, scalar_dtype, total, typed_like, zeros_like


def gmres(
    A: Operator,
    b: Tree,
    x0: Tree | None = None,
    *,
    axis_name: Axis = None,
    tol: Any = 1e-5,
    atol: Any = 0.0,
    restart: int = 20,
    maxiter: Any = None,
    M: Operator | None = None,
) -> tuple[Tree, Info]:
    """Solves ``A x = b`` with generalized minimal residuals, for vectors that are cut over ranks or devices.

    Args:
        A: as for :func:`cg`; the operator of all ranks together is invertible.
        b: as for :func:`cg`.
        x0: as for :func:`cg`. Default: zeros.
        axis_name: as for :func:`cg`. Default: the world.
        tol: as for :func:`cg`. Default 1e-5.
        atol: as for :func:`cg`. Default 0.
        restart: the number of steps in a cycle, from 1. A cycle keeps one vector more than its steps. Default 20.
        maxiter: the largest number of cycles. Default: 10 times the number of elements of all ranks.
        M: the preconditioner, as for :func:`cg`. A derivative in reverse mode takes its transpose. Default: none.

    Returns:
        This rank's part of the solution, like ``b``, and an :class:`Info`.

    Raises:
        TypeError, NameError: as for :func:`cg`.
        ValueError: ``restart`` is below 1.

    Differentiation:
        As for :func:`cg`.

    Order:
        Program order: the collectives of ``A`` and ``M``, and two sums of about ``restart`` numbers, in each step;
        those of ``A`` and ``M`` and one sum of one number after each cycle; one sum of 3 numbers before the first.

    Source:
        :func:`jax.scipy.sparse.linalg.gmres`, whose inner products are those of one part, and whose preconditioner
        stands on the left.

    Example:
        Each rank turns two numbers by a right angle and adds them to themselves:

        >>> import jax.numpy as jnp, pycollective as pc
        >>> x, info = pc.linalg.gmres(lambda x: x + jnp.stack([-x[1], x[0]]), jnp.array([0.0, 2.0]))
        >>> x.round(4), bool(info.converged)
        (Array([1., 1.], dtype=float32), True)
    """
    limits = Limits(tol, atol, maxiter)
    steps = integer("linalg.gmres", None, "restart", restart)
    if steps < 1:
        raise ValueError(message("linalg.gmres", "restart to be at least 1", restart, "Choose a positive number."))
    loop = partial(_iterate, axis_name, limits, steps)
    return solve("gmres", loop, A, b, x0, axis_name, M, positive=False)


def _iterate(
    axis_name: Axis, limits: Limits, steps: int, A: Operator, M: Operator, b: Tree, x0: Tree | None
) -> tuple[Tree, Info]:
    def goes_on(state: tuple[Any, ...]) -> Array:
        _, _, squares, cycles, _ = state
        return (squares > limit) & (cycles < maxiter)

    def iterate(state: tuple[Any, ...]) -> tuple[Any, ...]:
        x, r, squares, cycles, k = state
        correction, made = _cycle(axis_name, steps, limit, lambda v: A(M(v)), r, squares)
        x = add(x, 1, M(correction))
        r = add(b, -1, A(x))
        return x, r, total(axis_name, [real_dot(r, r)])[0], cycles + 1, k + made

    r = b if x0 is None else add(b, -1, A(x0))
    size = jnp.asarray(size_of(b), real_dot(b, b).dtype)
    squares, of_b, size = total(axis_name, [real_dot(r, r), real_dot(b, b), size])
    limit, maxiter = limits.square(of_b), limits.iterations(size)
    zero = typed_like(jnp.int32(0), squares)
    start = (zeros_like(b) if x0 is None else x0, r, squares, zero, zero)
    x, _, squares, _, k = lax.while_loop(goes_on, iterate, start)
    return x, Info(squares <= limit, k, jnp.sqrt(squares))


def _cycle(axis_name: Axis, steps: int, limit: Array, A: Operator, r: Tree, squares: Array) -> tuple[Tree, Array]:
    """Returns the vector of a Krylov space whose image is nearest to ``r``, and the number of steps that it took.

    With the basis V and the Hessenberg matrix H, ``A V[:j] = V[:j + 1] H``. The unitary ``rotations`` make H
    triangular, ``rotations H = R``. Their first column is the right side, and has the norm of the residual at its end.
    """
    dtype = scalar_dtype(r)
    norm = jnp.sqrt(squares).astype(dtype)
    first = axis_index(axis_name) == 0

    def along(basis: Tree, w: Tree) -> Array:
        """Returns this part's terms of the inner products with all vectors of the basis."""
        terms = jax.tree.map(lambda V, x: V.reshape(len(V), -1).conj() @ x.reshape(-1), basis, w)
        return sum(jax.tree.leaves(terms), jnp.zeros(steps + 1, dtype))

    def combined(basis: Tree, factors: Array) -> Tree:
        return jax.tree.map(lambda V: jnp.tensordot(factors, V, 1), basis)

    def goes_on(state: tuple[Any, ...]) -> Array:
        *_, of_first, j = state
        return (j < steps) & (of_first > limit)

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        basis, R, rotations, residual, _, j = state
        w = A(jax.tree.map(lambda V, x: V[j].astype(x.dtype), basis, r))
        w = jax.tree.map(lambda x: x.astype(dtype), w)
        once = total(axis_name, [along(basis, w)])
        w = add(w, -1, combined(basis, once))
        sums = total(axis_name, [along(basis, w), real_dot(w, w), jnp.where(first, residual, 0)])
        twice, before, of_first = sums[:-2], sums[-2].real, sums[-1].real
        w = add(w, -1, combined(basis, twice))
        # If the second pass subtracts most of it, the rest is rounding errors: the space is invariant.
        after = before - jnp.sum(jnp.abs(twice) ** 2)
        length = jnp.sqrt(jnp.where(after > 0.5 * before, after, 0)).astype(dtype)
        basis = jax.tree.map(lambda V, x: V.at[j + 1].set(jnp.where(length == 0, 0, x / length)), basis, w)
        column = rotations @ (once + twice)
        diagonal = jnp.sqrt(jnp.abs(column[j]) ** 2 + jnp.abs(length) ** 2).astype(dtype)
        c, s = jnp.where(diagonal == 0, jnp.array([1, 0], dtype), jnp.stack([column[j], length]) / diagonal)
        rotation = jnp.stack([jnp.stack([c.conj(), s]), jnp.stack([-s, c])])
        rotations = lax.dynamic_update_slice_in_dim(
            rotations, rotation @ lax.dynamic_slice_in_dim(rotations, j, 2), j, 0
        )
        # An infinite number on the diagonal gives the factor zero to a vector that is of no use.
        R = R.at[:, j].set(column[:-1].at[j].set(jnp.where(diagonal == 0, jnp.inf, diagonal)))
        return basis, R, rotations, jnp.abs(norm * rotations[j + 1, 0]) ** 2, of_first, j + 1

    def only(x: Array) -> Array:
        return typed_like(jnp.zeros((steps + 1, *x.shape), dtype), x).at[0].set(x.astype(dtype) / norm)

    basis = jax.tree.map(only, r)
    R, rotations = (typed_like(jnp.eye(n, dtype=dtype), squares) for n in (steps, steps + 1))
    j = typed_like(jnp.int32(0), squares)
    basis, R, rotations, _, _, j = lax.while_loop(goes_on, step, (basis, R, rotations, squares, squares, j))
    right = jnp.where(jnp.arange(steps, dtype=jnp.int32) < j, norm * rotations[:-1, 0], 0)
    R = jnp.where((jnp.arange(steps, dtype=jnp.int32) < j)[None], R, jnp.eye(steps, dtype=dtype))
    factors = jax.scipy.linalg.solve_triangular(R, right)
    return jax.tree.map(lambda V, x: jnp.tensordot(factors, V[:-1], 1).astype(x.dtype), basis, r), j
