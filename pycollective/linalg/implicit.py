"""What the solvers of linear systems have in common: their arguments, when they end, and derivatives.

Invariants:

1. **All ranks make the same iterations.** A loop goes on by numbers that a sum over all parts has made, compared with
   limits that follow from such numbers by products alone. A sum has the same bits on all ranks, and a product is
   rounded in one way, so all ranks come to the same decision. A NaN or an Inf of one rank is in the sum of all: every
   comparison with a NaN is false, so the loop ends on all ranks, and :class:`Info` says that it has not converged.
2. **The transpose of the operator is that of the whole.** The operator maps the parts of all ranks to the parts of all
   ranks. JAX transposes each rank's function, and each collective in it to the collective that is its transpose over
   all ranks. So the transposed functions of all ranks together are the transposed operator.
3. **Derivatives solve systems of their own**, with a start of zeros and the same relative tolerance: the derivative of
   ``A x = b`` is ``A dx = db - dA x``. The starting guess of the system has no derivative, and is no start for others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pycollective import errors
from pycollective.jax_support import jax_internals
from pycollective.linalg import vectors
from pycollective.linalg.vectors import Array, Axis, Tree
from pycollective.named_axes.names import vary

Operator = Callable[[Tree], Tree]


class Info(NamedTuple):
    """How an iteration ended; the same on all ranks.

    Attributes:
        converged: whether the norm of the residual is at most its limit; a bool.
        iterations: the number of iterations; an int32. Of :func:`gmres` the number of steps, in all cycles together.
        residual_norm: the norm of the residual as the iteration computes it; NaN if a NaN has come up. Of
            :func:`lobpcg` the largest of all pairs.
    """

    converged: Array
    iterations: Array
    residual_norm: Array


class Limits(NamedTuple):
    """When an iteration ends, as the user gives it."""

    tol: Any
    atol: Any
    maxiter: Any

    def square(self, squared_norm: Array) -> Array:
        """Returns the limit of the residual's squared norm, for the squared norm of the right side."""
        dtype = squared_norm.dtype
        relative = jnp.square(jnp.asarray(self.tol, dtype)) * squared_norm
        return jnp.maximum(relative, jnp.square(jnp.asarray(self.atol, dtype)))

    def iterations(self, size: Array) -> Array:
        """Returns the largest number of iterations, for a vector of ``size`` elements on all ranks together."""
        if self.maxiter is not None:
            return jnp.asarray(self.maxiter, jnp.int32)
        return jnp.minimum(10 * size, 2.0**30).astype(jnp.int32)


class Loop(Protocol):
    """An iteration that solves ``A x = b``, from zeros if ``x0`` is None."""

    def __call__(self, A: Operator, M: Operator, b: Tree, x0: Tree | None) -> tuple[Tree, Info]:
        """Returns this rank's part of the solution, and how the iteration ended."""


def size_of(tree: Tree) -> int:
    """Returns the number of elements of this part."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def solve(
    name: str, loop: Loop, A: Operator, b: Tree, x0: Tree | None, axis_name: Axis, M: Operator | None, *, positive: bool
) -> tuple[Tree, Info]:
    """Solves a linear system by a loop, with implicit derivatives.

    Args:
        name: the public function, for messages.
        loop: the iteration.
        A: the operator, on this rank's part.
        b: this rank's part of the right side.
        x0: this rank's part of the starting guess, or None.
        axis_name: over which the vectors are cut.
        M: the preconditioner, or None.
        positive: whether the operator is Hermitian, so that its transpose is itself if it is real.
    """
    where = f"linalg.{name}"
    b = floats(where, "b", b)
    x0 = x0 if x0 is None else jax.tree.map(lambda x, like: x.astype(like.dtype), _like(where, "x0", x0, b), b)
    if not positive and len({jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(b)}) > 1:
        remedy = "Cast all to complex numbers."
        errors.fail(TypeError, where, None, "b: all real or all complex", "both", remedy)
    A, M, (b, x0) = typed(where, axis_name, A, M, b, x0)
    names = jax_internals.varying_axes(jax.tree.leaves(b)[0])

    def run(A: Operator, M: Operator, b: Tree, x0: Tree | None) -> tuple[Tree, Array]:
        """Returns the solution, and the info as floats of one type with it, which JAX asks for."""
        x, info = loop(A, M, b, x0)
        return x, vary(jnp.stack([number.astype(info.residual_norm.dtype) for number in info]), names)

    def direct(A: Operator, b: Tree) -> tuple[Tree, Array]:
        return run(A, M, b, None)

    def transposed(A: Operator, b: Tree) -> tuple[Tree, Array]:
        return run(A, lambda x: jax.linear_transpose(M, b)(x)[0], b, None)

    symmetric = positive and not any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(b))
    linear_solve = partial(
        lax.custom_linear_solve,
        solve=direct,
        transpose_solve=direct if symmetric else transposed,
        symmetric=symmetric,
        has_aux=True,
    )
    if x0 is None:
        x, info = linear_solve(A, b)
    else:
        x, info = lax.custom_root(
            lambda x: vectors.add(A(x), -1, b),
            x0,
            lambda _, x0: run(A, M, b, x0),
            lambda A, b: linear_solve(A, b)[0],
            has_aux=True,
        )
    converged, iterations, residual_norm = vectors.of_first(axis_name, [info]) if names else info
    return x, Info(converged == 1, iterations.astype(jnp.int32), residual_norm)


def floats(where: str, name: str, tree: Tree) -> Tree:
    """Returns a tree of arrays, which must be of floats or complex numbers."""
    tree = jax.tree.map(jnp.asarray, tree)
    dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(tree)})
    if not dtypes or not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(tree)):
        got = ", ".join(dtypes) or "no array"
        remedy = "Cast it to a dtype in which the solution can be written."
        errors.fail(TypeError, where, None, f"{name}: arrays of floats or complex numbers", got, remedy)
    return tree


def _like(where: str, name: str, tree: Tree, like: Tree) -> Tree:
    """Returns ``tree``, which must have the structure and the shapes of ``like``, and the dtypes of its leaves."""

    def described(tree: Tree) -> str:
        shapes = jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree)
        return str(shapes).replace("'", "")

    tree = jax.tree.map(jnp.asarray, tree)
    if jax.tree.map(jnp.shape, tree) != jax.tree.map(jnp.shape, like) or (
        name != "x0" and jax.tree.map(jnp.result_type, tree) != jax.tree.map(jnp.result_type, like)
    ):
        remedy = "The operator maps this rank's part of a vector to this rank's part of a vector."
        errors.fail(TypeError, where, None, f"{name} to be like b, {described(like)}", described(tree), remedy)
    return tree


def typed(
    where: str, axis_name: Axis, A: Any, M: Operator | None, b: Tree, x0: Tree | None = None
) -> tuple[Operator, Operator, tuple[Tree, Tree | None]]:
    """Returns operators that check their results, and the vectors.

    By JAX's types, all of them vary along the axis, and along all else that ``b``, ``x0`` or the result of ``A`` vary
    along, so that a loop can carry them.
    """
    if not callable(A):  # JAX takes a matrix as well
        remedy = "Pass a function of this rank's part of a vector, which may call collectives."
        errors.fail(TypeError, where, None, "A: a function", type(A).__name__, remedy)
    names: set[Any] = set()

    def look(tree: Tree) -> None:
        names.update(*(jax_internals.varying_axes(leaf) for leaf in jax.tree.leaves(tree)))

    def cast(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: vary(x, names), tree)

    def operator(x: Tree) -> Tree:
        return cast(_like(where, "the result of A", A(x), b))

    def preconditioner(x: Tree) -> Tree:
        return x if M is None else cast(_like(where, "the result of M", M(x), b))

    b = vectors.vary(axis_name, b, where)
    look((b, x0))
    jax.eval_shape(lambda x: look((A(x), x if M is None else M(x))), b)
    return operator, preconditioner, cast((b, x0))
