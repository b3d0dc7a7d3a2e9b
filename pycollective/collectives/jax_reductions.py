"""Sums, means and extrema over ranks, with jax.lax's names."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from pycollective import errors
from pycollective.collectives import checks
from pycollective.collectives.checks import Groups, PyTree
from pycollective.collectives.wire_dtype import round_with_residual, sum_on_wire
from pycollective.named_axes.names import AxisName, by_name, is_name
from pycollective.primitives import reductions
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.world import given_or_world


def psum(
    x: PyTree,
    axis_name: AxisName | Communicator | None = None,
    *,
    axis_index_groups: Groups = None,
    wire_dtype: Any = None,
    residual: PyTree = None,
) -> PyTree:
    """Sums over ranks: ``y_r = sum_s x_s``.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks. A Python number is this
            rank's own value, as an array is; :func:`jax.lax.psum` takes it as a constant of all devices.
        axis_name: a communicator, the world by default; or the name of an axis that a JAX transform binds, or a tuple
            of such names. A name gives :func:`jax.lax.psum`.
        axis_index_groups: lists of ranks, each rank in exactly one list. A rank gets the sum over its own list.
            Default: one list of all ranks.
        wire_dtype: the dtype of floats on the wire. ``jnp.bfloat16`` sends each float of at most 32 bits in 16 bits,
            half the bytes of float32. Each rank rounds its operand once. A rank with several local devices rounds the
            sum of their operands; where several hosts have several ranks, each host rounds the sum of its ranks'
            operands (from 1 KiB on). The rounded operands are added in float32, the total is rounded once, and all
            ranks get the same bits. Cotangents are sent in the same way. Leaves of other dtypes, and sums over one
            rank, are not rounded. Default: None, which sends all bits.
        residual: what the rounding of ``x`` lost in the last call, for error feedback: float32 arrays of the structure
            and the shapes of ``x``, zeros for the first call. It is added to ``x`` before the rounding. It does not
            hold what the rounding of a sum loses. It needs ``wire_dtype``. Default: None.

    Returns:
        The sum, of the structure, shapes and dtypes of ``x``; sums of bool are int32. float16, bfloat16 and 8-bit
        floats are added in float32, and the sum is rounded once. With ``residual``, the sum and the new residual.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Shape:
        That of ``x``.

    Dtypes:
        Numbers, and bool, whose sum is int32.

    Differentiation:
        The transpose is :func:`psum`.

    Order:
        Program order.

    Source:
        :func:`jax.lax.psum`; MPI_Allreduce (MPI standard, 6.9.6).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> bool((pc.psum(jnp.ones(3)) == pc.world().size).all())
        True
        >>> y, left = pc.psum(jnp.full(3, 1.001), wire_dtype=jnp.bfloat16, residual=jnp.zeros(3))
        >>> float(y[0]) == pc.world().size, bool(abs(left[0] - 0.001) < 1e-6)
        (True, True)
    """
    if residual is not None:
        x, left = round_with_residual("psum", x, residual, wire_dtype)
        return psum(x, axis_name, axis_index_groups=axis_index_groups, wire_dtype=wire_dtype), left
    if is_name(axis_name):

        def total(x: PyTree) -> PyTree:
            return lax.psum(x, axis_name, axis_index_groups=axis_index_groups)

        if wire_dtype is None:
            return by_name("psum", axis_name, total, x)
        by_name("psum", axis_name, lambda: None)  # the name must be bound
        if axis_index_groups is not None:
            remedy = "Name an axis for each group, or pass a communicator."
            errors.fail(ValueError, "psum", None, "no axis_index_groups with wire_dtype", axis_index_groups, remedy)
        return sum_on_wire("psum", x, axis_name, wire_dtype, total)
    if wire_dtype is None:
        return over_ranks("psum", x, axis_name, "sum", axis_index_groups)
    comm = checks.group("psum", given_or_world("psum", axis_name), axis_index_groups, equal=False)
    x = checks.call_for_leaves("psum", comm, lambda leaf: checks.reducible("psum", comm, leaf, "sum"), x)
    return sum_on_wire("psum", x, comm, wire_dtype, lambda xs: reductions.allreduce_all(xs, comm=comm, op="sum"))


def over_ranks(where: str, x: PyTree, axis_name: Any, op: str, groups: Groups = None) -> PyTree:
    """Returns the reductions of the leaves of ``x``, made by one call, for the public function ``where``."""
    comm = checks.group(where, given_or_world(where, axis_name), groups, equal=False)
    leaves, tree = jax.tree.flatten(
        checks.call_for_leaves(where, comm, lambda leaf: checks.reducible(where, comm, leaf, op), x)
    )
    return jax.tree.unflatten(tree, reductions.allreduce_all(leaves, comm=comm, op=op))


def pmean(
    x: PyTree,
    axis_name: AxisName | Communicator | None = None,
    *,
    axis_index_groups: Groups = None,
    wire_dtype: Any = None,
    residual: PyTree = None,
) -> PyTree:
    """Averages over ranks: ``y_r = sum_s x_s / size``. Integers become floats.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        axis_name: a communicator, the world by default; or an axis name or a tuple of names, as for :func:`psum`.
        axis_index_groups: as for :func:`psum`. Default: one list of all ranks.
        wire_dtype: as for :func:`psum`. Default: None.
        residual: as for :func:`psum`. Default: None.

    Returns:
        The mean, of the structure and shapes of ``x``. With ``residual``, the mean and the new residual.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Shape:
        That of ``x``.

    Dtypes:
        Numbers and bool; the mean of integers is a float.

    Differentiation:
        The transpose is :func:`pmean`.

    Order:
        Program order.

    Source:
        :func:`jax.lax.pmean`; MPI_Allreduce (MPI standard, 6.9.6).

    Example:
        >>> import pycollective as pc
        >>> float(pc.pmean(3.0))
        3.0
    """
    if is_name(axis_name):
        if wire_dtype is None and residual is None:
            return by_name("pmean", axis_name, lax.pmean, x, axis_name, axis_index_groups=axis_index_groups)
        size = by_name("pmean", axis_name, lax.axis_size, axis_name)
    else:
        axis_name = given_or_world("pmean", axis_name)
        size = checks.group("pmean", axis_name, axis_index_groups, equal=False).size
    out = psum(x, axis_name, axis_index_groups=axis_index_groups, wire_dtype=wire_dtype, residual=residual)
    y, *left = (out,) if residual is None else out
    mean = jax.tree.map(lambda y: y / size, y)
    return (mean, *left) if left else mean


def pmax(x: PyTree, axis_name: AxisName | Communicator | None = None, *, axis_index_groups: Groups = None) -> PyTree:
    """Takes the maximum over ranks: ``y_r = max_s x_s``. NaN wins, as in JAX, and 0 is more than -0. Of bools: "or".

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        axis_name: a communicator, the world by default; or an axis name or a tuple of names, as for :func:`psum`.
        axis_index_groups: as for :func:`psum`. Default: one list of all ranks.

    Returns:
        The maximum, of the structure, shapes and dtypes of ``x``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value, and for complex numbers.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Shape:
        That of ``x``.

    Dtypes:
        Real numbers and bool.

    Differentiation:
        The derivative is the mean of the derivatives on the ranks that hold the maximum. :func:`jax.lax.pmax` has none.

    Order:
        Program order.

    Source:
        :func:`jax.lax.pmax`; MPI_Allreduce (MPI standard, 6.9.6).

    Example:
        >>> import pycollective as pc
        >>> int(pc.pmax(pc.axis_index())) == pc.axis_size() - 1
        True
    """
    if is_name(axis_name):
        return by_name("pmax", axis_name, lax.pmax, x, axis_name, axis_index_groups=axis_index_groups)
    return over_ranks("pmax", x, axis_name, "max", axis_index_groups)


def pmin(x: PyTree, axis_name: AxisName | Communicator | None = None, *, axis_index_groups: Groups = None) -> PyTree:
    """Takes the minimum over ranks: ``y_r = min_s x_s``. NaN wins, as in JAX, and -0 is less than 0. Of bools: "and".

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        axis_name: a communicator, the world by default; or an axis name or a tuple of names, as for :func:`psum`.
        axis_index_groups: as for :func:`psum`. Default: one list of all ranks.

    Returns:
        The minimum, of the structure, shapes and dtypes of ``x``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value, and for complex numbers.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Shape:
        That of ``x``.

    Dtypes:
        Real numbers and bool.

    Differentiation:
        The derivative is the mean of the derivatives on the ranks that hold the minimum. :func:`jax.lax.pmin` has none.

    Order:
        Program order.

    Source:
        :func:`jax.lax.pmin`; MPI_Allreduce (MPI standard, 6.9.6).

    Example:
        >>> import pycollective as pc
        >>> int(pc.pmin(pc.axis_index()))
        0
    """
    if is_name(axis_name):
        return by_name("pmin", axis_name, lax.pmin, x, axis_name, axis_index_groups=axis_index_groups)
    return over_ranks("pmin", x, axis_name, "min", axis_index_groups)
