"""Sums in computations that all ranks make alike: a loss that is the same on all ranks counts once.

The transpose of :func:`psum` is :func:`psum`, so a loss that all ranks have counts once for each rank. In most programs
that is a constant factor. In a solver it gives wrong derivatives, since the derivative solves a system with the
transpose of the operator. The two functions here have the transposes of an operator that all ranks apply to one vector:

    function      from     to       of values        of cotangents
    copy_to       same     own      nothing          psum
    reduce_from   terms    same     psum             nothing
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pycollective import errors
from pycollective.collectives import checks
from pycollective.collectives.checks import PyTree
from pycollective.collectives.jax_collectives import all_gather
from pycollective.collectives.jax_reductions import psum
from pycollective.jax_support import jax_internals
from pycollective.named_axes.names import AxisName, by_name, has_types, is_name, names_of, varies
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.world import given_or_world


def gather(x: Any, axis_name: AxisName | Communicator | None, *, axis: int = 0, tiled: bool = False) -> Any:
    """Gathers ``x`` of all ranks or devices. By JAX's types the result is the same on all devices."""
    gather_all = jax_internals.all_gather_invarying if is_name(axis_name) and varies(x, axis_name) else all_gather
    return gather_all(x, axis_name, axis=axis, tiled=tiled)


def with_transpose(forward: Callable[[PyTree], PyTree], transpose: Callable[[PyTree], PyTree], x: PyTree) -> PyTree:
    """Returns ``forward(x)``, where ``forward`` is linear, keeps shapes and dtypes, and has the given transpose.

    It can be differentiated in both modes, as often as needed, and batched. The tangent is ``forward`` of a tangent.
    """
    # y = x is a linear equation. The caller of custom_linear_solve defines how JAX solves it and its transpose.
    # jax.custom_vjp refuses forward mode; JAX cannot batch jax.custom_derivatives.linear_call along a named axis.
    x = jax.tree.map(jnp.asarray, x)
    return lax.custom_linear_solve(lambda y: y, x, lambda _, b: forward(b), lambda _, ct: transpose(ct))


def copy_to(x: PyTree, axis_name: AxisName | Communicator | None = None) -> PyTree:
    """Returns ``x``, which is the same on all ranks, for computations that differ: ``y_r = x``. Cotangents are summed.

    If :func:`reduce_from` follows these computations, a loss that all ranks have counts once in derivatives. The
    derivative with respect to a value that all ranks share is complete, and the same on all ranks. The derivative with
    respect to a value of one rank is that of its own part. A parameter that all ranks share, and with which each rank
    does a part of the work, needs ``copy_to`` as well.

    Args:
        x: an array or a pytree of arrays, the same on all ranks.
        axis_name: a communicator, the world by default; or the name of an axis that a JAX transform binds, or a tuple
            of such names.

    Returns:
        The arrays. By JAX's types they vary along the axis.

    Raises:
        ValueError: by JAX's types, an array varies along the axis already.
        NameError: the axis is not bound.

    Shape:
        That of ``x``.

    Dtypes:
        All.

    Differentiation:
        Forward mode, reverse mode and both after each other, with and without JAX's types; the transpose is
        :func:`psum`.

    Order:
        No communication in the call itself; cotangents have program order.

    Source:
        f in Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.

    Example:
        A matrix is a sum of one term on each rank, and all ranks solve a system with it:

        >>> import jax, jax.numpy as jnp, pycollective as pc
        >>> term = jnp.array([[3.0, 1.0], [0.0, 2.0]])
        >>> def solve(term, b):
        ...     operator = lambda v: pc.reduce_from(term @ pc.copy_to(v))
        ...     return jax.scipy.sparse.linalg.bicgstab(operator, b)[0]
        >>> dense = lambda b: jnp.linalg.solve(pc.world().size * term, b)
        >>> b = jnp.array([1.0, 4.0])
        >>> grads = [jax.grad(lambda b: (f(b) ** 2).sum())(b) for f in (lambda b: solve(term, b), dense)]
        >>> bool(jnp.allclose(*grads, rtol=1e-3))
        True
    """
    if not is_name(axis_name):
        comm = given_or_world("copy_to", axis_name)
        return _copied(checks.map_arrays("copy_to", comm, lambda leaf: leaf, x), partial(psum, axis_name=comm))
    names = names_of(axis_name)

    def copied(x: PyTree) -> PyTree:
        if any(not jax_internals.varying_axes(leaf).isdisjoint(names) for leaf in jax.tree.leaves(x)):
            expected, got = f"an array that is the same along {axis_name!r}", "one that varies, by JAX's types"
            remedy = "Take it from an argument that is not cut, or from lax.pmean, which JAX knows to be the same."
            errors.fail(ValueError, "copy_to", None, expected, got, remedy)
        if has_types(axis_name):
            return jax.tree.map(lambda leaf: lax.pcast(leaf, names, to="varying"), x)
        return _copied(x, partial(lax.psum, axis_name=axis_name))

    return by_name("copy_to", axis_name, copied, x)


def reduce_from(x: PyTree, axis_name: AxisName | Communicator | None = None) -> PyTree:
    """Sums over ranks, for computations that all ranks make alike: ``y_r = sum_s x_s``. Cotangents stay as they are.

    Args:
        x: an array or a pytree of arrays, a term of the sum.
        axis_name: a communicator, the world by default; or the name of an axis that a JAX transform binds, or a tuple
            of such names.

    Returns:
        The sum, the same on all ranks.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Shape:
        That of ``x``.

    Dtypes:
        Numbers, and bool, whose sum is int32.

    Differentiation:
        As for :func:`copy_to`; the transpose returns the cotangent, which must be the same on all ranks.

    Order:
        Program order.

    Source:
        g in Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.

    Example:
        >>> import jax, jax.numpy as jnp, pycollective as pc
        >>> float(jax.grad(lambda x: pc.reduce_from(x) ** 2)(1.0)) == 2 * pc.world().size
        True
        >>> jax.vmap(lambda x: pc.reduce_from(x, "model"), axis_name="model")(jnp.array([1.0, 2.0]))
        Array([3., 3.], dtype=float32)
    """
    if not is_name(axis_name):
        comm = given_or_world("reduce_from", axis_name)

        def term(leaf: Any) -> Any:
            return checks.reducible("reduce_from", comm, leaf, "sum")

        x = checks.call_for_leaves("reduce_from", comm, term, x)
        return _reduced(x, partial(psum, axis_name=comm))

    def reduced(x: PyTree) -> PyTree:
        total = partial(lax.psum, axis_name=axis_name)
        return total(x) if has_types(axis_name) else _reduced(x, total)

    return by_name("reduce_from", axis_name, reduced, x)


def _copied(x: PyTree, total: Callable[[PyTree], PyTree]) -> PyTree:
    return _on_floats(lambda floats: with_transpose(lambda xs: xs, total, floats), lambda other: other, x)


def _reduced(x: PyTree, total: Callable[[PyTree], PyTree]) -> PyTree:
    return _on_floats(lambda floats: with_transpose(total, lambda cts: cts, floats), total, x)


def _on_floats(floats: Callable[[Any], Any], others: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Applies ``floats`` to the leaves that have derivatives, all at once, and ``others`` to each other leaf."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    results = dict(zip(places, floats([leaves[i] for i in places]) if places else [], strict=True))
    return jax.tree.unflatten(structure, [results[i] if i in results else others(x) for i, x in enumerate(leaves)])
