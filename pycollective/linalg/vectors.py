"""Vectors that are cut: each rank or device has a tree of arrays, its part. Inner products are sums over all parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pycollective.collectives.jax_collectives import axis_index
from pycollective.collectives.jax_reductions import psum
from pycollective.jax_support import jax_internals
from pycollective.named_axes.names import AxisName, by_name, has_types, is_name, names_of
from pycollective.named_axes.names import vary as vary_along
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.world import given_or_world

Array = Any
Tree = Any
Axis = AxisName | Communicator | None


def vdot(x: Tree, y: Tree, axis_name: Axis = None) -> Array:
    """Computes the inner product of two vectors that are cut: ``sum_r sum_i conj(x_r[i]) y_r[i]``.

    Args:
        x: this rank's part of the first vector: an array or a pytree of arrays. Ranks may have parts of other shapes.
        y: this rank's part of the second vector, of the structure and shapes of ``x``.
        axis_name: the ranks or devices over which the vectors are cut: a communicator, the world by default; or the
            name of an axis that a JAX transform binds, or a tuple of names.

    Returns:
        The inner product, a scalar with the same bits on all ranks. float16 and bfloat16 are multiplied and added in
        float32.

    Raises:
        NameError: the axis is not bound.

    Differentiation:
        As for :func:`pycollective.psum`: each rank's result counts.

    Order:
        Program order: one sum of one number.

    Source:
        :func:`jax.numpy.vdot`.

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> part = {"a": jnp.ones(2), "b": jnp.ones((1, 2))}
        >>> float(pc.linalg.vdot(part, part)) == 4 * pc.world().size
        True
    """
    return total(axis_name, [dot(x, y)])[0]


def norm(x: Tree, axis_name: Axis = None) -> Array:
    """Computes the Euclidean norm of a vector that is cut: ``sqrt(sum_r sum_i |x_r[i]|^2)``.

    Libraries whose loops end by a norm, such as optimistix, take it as their ``norm=``: then all ranks end alike.

    Args:
        x: this rank's part of the vector: an array or a pytree of arrays. Ranks may have parts of other shapes.
        axis_name: as for :func:`vdot`.

    Returns:
        The norm, a real scalar with the same bits on all ranks, of at least 32 bits.

    Raises:
        NameError: the axis is not bound.

    Differentiation:
        As for :func:`pycollective.psum`: each rank's result counts. The derivative at zero is zero.

    Order:
        Program order: one sum of one number.

    Source:
        :func:`jax.numpy.linalg.norm`.

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> round(float(pc.linalg.norm(jnp.ones(4))) ** 2, 3) == 4 * pc.world().size
        True
    """
    squares = total(axis_name, [real_dot(x, x)])[0]
    return jnp.where(squares == 0, 0, jnp.sqrt(jnp.where(squares == 0, 1, squares)))


def total(axis_name: Axis, numbers: Sequence[Array]) -> Array:
    """Returns the sums of several arrays over all parts, flat in one array: one collective for all of them."""
    dtype = common_dtype(*numbers)
    flat = jnp.concatenate([jnp.ravel(number).astype(dtype) for number in numbers])
    return psum(vary(axis_name, flat), axis_name)


def of_first(axis_name: Axis, numbers: Sequence[Array]) -> Array:
    """Returns the numbers of the first rank or device on all, flat in one array: one collective for all of them."""
    first = axis_index(axis_name) == 0
    return total(axis_name, [jnp.where(first, number, 0) for number in numbers])


def vary(axis_name: Axis, tree: Tree, where: str = "linalg") -> Tree:
    """Casts arrays to types that vary along the axis, where JAX has such types. Messages name ``where``."""
    if not is_name(axis_name):
        given_or_world(where, axis_name)
        return tree
    names = names_of(axis_name)
    if not by_name(where, axis_name, has_types, axis_name):
        return tree
    return jax.tree.map(lambda x: vary_along(x, names), tree)


def typed_like(x: Array, like: Array) -> Array:
    """Casts an array to a type that varies along the axes of ``like``, where JAX has such types."""
    return vary_along(x, jax_internals.varying_axes(like))


def zeros_like(tree: Tree) -> Tree:
    """Returns zeros of the shapes, dtypes and types of the leaves."""
    return jax.tree.map(lambda x: typed_like(jnp.zeros_like(x), x), tree)


def common_dtype(*numbers: Any) -> Any:
    """Returns the dtype in which arrays and dtypes are computed with together."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*numbers)


def scalar_dtype(tree: Tree) -> Any:
    """Returns the dtype of inner products of a vector: at least 32 bits for each real number."""
    return common_dtype(jnp.float32, *jax.tree.leaves(tree))


def dot(x: Tree, y: Tree) -> Array:
    """Returns this part's term of the inner product, which is complex for complex vectors."""
    x, y = (jax.tree.map(jnp.asarray, tree) for tree in (x, y))
    dtype = common_dtype(scalar_dtype(x), scalar_dtype(y))

    def term(a: Array, b: Array) -> Array:
        return jnp.vdot(a.astype(dtype), b.astype(dtype), precision=lax.Precision.HIGHEST)

    return sum(jax.tree.leaves(jax.tree.map(term, x, y)), jnp.zeros((), dtype))


def real_dot(x: Tree, y: Tree) -> Array:
    """Returns the real part of this part's term of the inner product."""
    return dot(x, y).real


def add(x: Tree, factor: Any, y: Tree) -> Tree:
    """Returns ``x + factor y`` in the dtypes of ``x``."""

    def leaf(a: Array, b: Array) -> Array:
        dtype = common_dtype(a, factor)
        return (a.astype(dtype) + jnp.asarray(factor, dtype) * b.astype(dtype)).astype(a.dtype)

    return jax.tree.map(leaf, x, y)
