"""The public collectives that have jax.lax's names.

Each takes a communicator, the world by default, or the name of an axis. For a name it calls jax.lax's own function.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from pycollective import errors
from pycollective.collectives import checks
from pycollective.collectives.checks import Array, Groups, PyTree
from pycollective.named_axes.names import AxisName, by_name, is_name
from pycollective.primitives import exchanges, reductions
from pycollective.primitives.blocks import join
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.world import given_or_world


def all_gather(
    x: PyTree,
    axis_name: AxisName | Communicator | None = None,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
) -> PyTree:
    """Gathers the ranks' arrays on all ranks: ``y[s] = x_s`` along ``axis``.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        axis_name: a communicator, the world by default. A name gives :func:`jax.lax.all_gather`.
        axis_index_groups: lists of ranks of equal lengths, each rank in exactly one list. A rank gets the arrays of
            its own list, in the order of that list. Default: one list of all ranks.
        axis: the axis of the result along which the ranks' arrays lie. Default 0.
        tiled: whether the arrays are concatenated along the existing ``axis``. Default False: they are stacked along a
            new one.

    Returns:
        The arrays of all ranks, of the dtype of ``x``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Shape:
        That of ``x`` with a new axis of length ``size`` at ``axis``; ``tiled``: with ``axis`` ``size`` times as long.

    Dtypes:
        All.

    Differentiation:
        The transpose is :func:`psum_scatter`.

    Order:
        Program order.

    Source:
        :func:`jax.lax.all_gather`; MPI_Allgather (MPI standard, 6.7).

    Example:
        >>> import pycollective as pc
        >>> pc.all_gather(pc.axis_index()).tolist() == list(range(pc.axis_size()))
        True
    """
    if is_name(axis_name):
        options = {"axis_index_groups": axis_index_groups, "axis": axis, "tiled": tiled}
        return by_name("all_gather", axis_name, lax.all_gather, x, axis_name, **options)
    comm = checks.group("all_gather", given_or_world("all_gather", axis_name), axis_index_groups, equal=True)

    def gather_leaf(leaf: Array) -> Array:
        at = checks.axis("all_gather", comm, "axis", axis, leaf.ndim if tiled else leaf.ndim + 1)
        blocks = reductions.allgather(leaf, comm=comm)
        return join(blocks, at) if tiled else jnp.moveaxis(blocks, 0, at)

    return checks.call_for_leaves("all_gather", comm, gather_leaf, x)


def psum_scatter(
    x: PyTree,
    axis_name: AxisName | Communicator | None = None,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> PyTree:
    """Sums over ranks and gives each rank one block of the sum: ``y_r = sum_s x_s[r]`` along ``scatter_dimension``.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        axis_name: a communicator, the world by default. A name gives :func:`jax.lax.psum_scatter`.
        scatter_dimension: the axis that is cut into blocks, one for each rank. Default 0.
        axis_index_groups: lists of ranks of equal lengths, each rank in exactly one list. A rank gets its block of the
            sum over its own list. Default: one list of all ranks.
        tiled: whether the result keeps the axis, with ``1 / size`` of its length. Default False: the axis, whose
            length must be ``size``, is removed.

    Returns:
        This rank's block of the sum, rounded as that of :func:`psum`.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Shape:
        That of ``x`` without ``scatter_dimension``, whose length is ``size``; ``tiled``: with its length divided by
        ``size``.

    Dtypes:
        As for :func:`psum`.

    Differentiation:
        The transpose is :func:`all_gather`.

    Order:
        Program order.

    Source:
        :func:`jax.lax.psum_scatter`; MPI_Reduce_scatter_block (MPI standard, 6.10.1).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> float(pc.psum_scatter(jnp.ones(pc.axis_size()))) == pc.axis_size()
        True
    """
    where = "psum_scatter"
    if is_name(axis_name):
        options = {"scatter_dimension": scatter_dimension, "axis_index_groups": axis_index_groups, "tiled": tiled}
        return by_name(where, axis_name, lax.psum_scatter, x, axis_name, **options)
    comm = checks.group(where, given_or_world(where, axis_name), axis_index_groups, equal=True)

    def scatter_leaf(leaf: Array) -> Array:
        at = checks.axis(where, comm, "scatter_dimension", scatter_dimension, leaf.ndim)
        checks.reducible(where, comm, leaf, "sum")
        blocks = (
            checks.one_block_per_rank(where, comm, leaf, at)
            if tiled
            else checks.one_entry_per_rank(where, comm, leaf, at, "scatter_dimension")
        )
        return reductions.reduce_scatter(blocks, comm=comm, op="sum")

    return checks.call_for_leaves(where, comm, scatter_leaf, x)


def all_to_all(
    x: PyTree,
    axis_name: AxisName | Communicator | None = None,
    split_axis: int = 0,
    concat_axis: int = 0,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> PyTree:
    """Exchanges blocks among all ranks: ``y_r[s] = x_s[r]``.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        axis_name: a communicator, the world by default. A name gives :func:`jax.lax.all_to_all`.
        split_axis: the axis of ``x`` that is cut into blocks, one for each rank. Default 0.
        concat_axis: the axis of the result along which the received blocks lie. Default 0.
        axis_index_groups: lists of ranks of equal lengths, each rank in exactly one list. The ranks of a list exchange
            blocks with each other. Default: one list of all ranks.
        tiled: whether both axes stay. Default False: ``split_axis``, whose length must be ``size``, goes, and a new
            axis comes at ``concat_axis``.

    Returns:
        The blocks from all ranks, in the order of the ranks, of the dtype of ``x``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Shape:
        That of ``x`` without ``split_axis``, whose length is ``size``, and with a new axis of that length at
        ``concat_axis``; ``tiled``: with the length of ``split_axis`` divided and that of ``concat_axis`` multiplied by
        ``size``.

    Dtypes:
        All.

    Differentiation:
        The transpose is the exchange back: :func:`all_to_all` with the two axes swapped.

    Order:
        Program order.

    Source:
        :func:`jax.lax.all_to_all`; MPI_Alltoall (MPI standard, 6.8).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> pc.all_to_all(jnp.full(pc.axis_size(), pc.axis_index())).tolist() == list(range(pc.axis_size()))
        True
    """
    where = "all_to_all"
    if is_name(axis_name):
        options = {"axis_index_groups": axis_index_groups, "tiled": tiled}
        return by_name(where, axis_name, lax.all_to_all, x, axis_name, split_axis, concat_axis, **options)
    comm = checks.group(where, given_or_world(where, axis_name), axis_index_groups, equal=True)

    def exchange_leaf(leaf: Array) -> Array:
        split = checks.axis(where, comm, "split_axis", split_axis, leaf.ndim)
        concat = checks.axis(where, comm, "concat_axis", concat_axis, leaf.ndim)
        if tiled:
            return join(exchanges.alltoall(checks.one_block_per_rank(where, comm, leaf, split), comm=comm), concat)
        blocks = checks.one_entry_per_rank(where, comm, leaf, split, "split_axis")
        return jnp.moveaxis(exchanges.alltoall(blocks, comm=comm), 0, concat)

    return checks.call_for_leaves(where, comm, exchange_leaf, x)


def ppermute(x: PyTree, axis_name: AxisName | Communicator | None, perm: Sequence[tuple[int, int]]) -> PyTree:
    """Sends along pairs of ranks: ``y_d = x_s`` for each ``(s, d)`` in ``perm``. Other ranks get zeros.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        axis_name: a communicator; None: the world. A name gives :func:`jax.lax.ppermute`.
        perm: pairs of ranks ``(source, destination)``, the same on all ranks. No rank is twice a source, or twice a
            destination.

    Returns:
        The arrays of the source that sends to this rank, of the shapes and dtypes of ``x``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Shape:
        That of ``x``.

    Dtypes:
        All.

    Differentiation:
        The transpose is :func:`ppermute` with each pair reversed.

    Order:
        Program order.

    Source:
        :func:`jax.lax.ppermute`; MPI_Sendrecv (MPI standard, 3.10).

    Example:
        >>> import pycollective as pc
        >>> n = pc.axis_size()
        >>> shifted = pc.ppermute(pc.axis_index(), pc.world(), [(r, (r + 1) % n) for r in range(n)])
        >>> int(shifted) == (pc.world().rank - 1) % n
        True
    """
    if is_name(axis_name):
        return by_name("ppermute", axis_name, lax.ppermute, x, axis_name, perm)
    comm = given_or_world("ppermute", axis_name)
    try:
        listed = list(perm)
    except TypeError:
        remedy = "Pass e.g. perm=[(0, 1), (1, 0)]."
        errors.fail(TypeError, "ppermute", comm, "perm: (source, destination) pairs", repr(perm), remedy)
    pairs = tuple(_pair(comm, pair) for pair in listed)
    for side, ranks in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        if twice:
            errors.fail(
                ValueError,
                "ppermute",
                comm,
                f"each rank once as {side}",
                f"{twice} more than once in {list(pairs)}",
                "Use two calls.",
            )
    return checks.call_for_leaves("ppermute", comm, lambda leaf: exchanges.ppermute(leaf, comm=comm, perm=pairs), x)


def _pair(comm: Communicator, pair: Any) -> tuple[int, int]:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        errors.fail(
            TypeError, "ppermute", comm, "(source, destination) pairs in perm", repr(pair), "Pass e.g. perm=[(0, 1)]."
        )
    return checks.rank("ppermute", comm, "a source", pair[0]), checks.rank("ppermute", comm, "a destination", pair[1])


def pshuffle(x: PyTree, axis_name: AxisName | Communicator | None, perm: Sequence[int]) -> PyTree:
    """Permutes the ranks' arrays: ``y_r = x_perm[r]``.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        axis_name: a communicator; None: the world. A name gives :func:`jax.lax.pshuffle`.
        perm: for each rank the rank whose arrays it gets; a permutation, the same on all ranks.

    Returns:
        The arrays of rank ``perm[r]``, of the shapes and dtypes of ``x``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Shape:
        That of ``x``.

    Dtypes:
        All.

    Differentiation:
        The transpose is :func:`pshuffle` with the inverse permutation.

    Order:
        Program order.

    Source:
        :func:`jax.lax.pshuffle`; MPI_Sendrecv (MPI standard, 3.10).

    Example:
        >>> import pycollective as pc
        >>> n = pc.axis_size()
        >>> int(pc.pshuffle(pc.axis_index(), pc.world(), list(range(n))[::-1])) == n - 1 - pc.world().rank
        True
    """
    if is_name(axis_name):
        return by_name("pshuffle", axis_name, lax.pshuffle, x, axis_name, perm)
    comm = given_or_world("pshuffle", axis_name)
    try:
        is_permutation = sorted(perm) == list(range(comm.size))
    except TypeError:
        is_permutation = False
    if not is_permutation:
        errors.fail(
            ValueError, "pshuffle", comm, f"a permutation of 0 to {comm.size - 1}", perm, "Name each rank once."
        )
    return ppermute(x, comm, list(zip(perm, range(comm.size), strict=True)))


def pswapaxes(
    x: PyTree,
    axis_name: AxisName | Communicator | None = None,
    axis: int = 0,
    *,
    axis_index_groups: Groups = None,
) -> PyTree:
    """Swaps the ranks with an axis of length ``size``: ``y_r[..., s, ...] = x_s[..., r, ...]``.

    It is :func:`all_to_all` with ``split_axis`` and ``concat_axis`` both ``axis``.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        axis_name: a communicator, the world by default. A name gives :func:`jax.lax.pswapaxes`.
        axis: the axis of ``x`` that is swapped; its length is ``size``. Default 0.
        axis_index_groups: as for :func:`all_to_all`. Default: one list of all ranks.

    Returns:
        The arrays from all ranks along ``axis``, of the dtype of ``x``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Shape:
        That of ``x``.

    Dtypes:
        All.

    Differentiation:
        The transpose is :func:`pswapaxes`.

    Order:
        Program order.

    Source:
        :func:`jax.lax.pswapaxes`; MPI_Alltoall (MPI standard, 6.8).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> pc.pswapaxes(jnp.full(pc.axis_size(), pc.axis_index())).tolist() == list(range(pc.axis_size()))
        True
    """
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


def pbroadcast(x: PyTree, axis_name: AxisName | Communicator | None = None, source: int = 0) -> PyTree:
    """Copies one rank's arrays to all ranks: ``y_r = x_source``.

    It is JAX's name for :func:`broadcast`.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        axis_name: a communicator, the world by default. A name gives :func:`jax.lax.pbroadcast`.
        source: the rank whose arrays all ranks get. Default 0.

    Returns:
        The arrays of rank ``source``, of the shapes and dtypes of ``x``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Shape:
        That of ``x``.

    Dtypes:
        All, and keys of :mod:`jax.random`.

    Differentiation:
        As for :func:`broadcast`.

    Order:
        Program order.

    Source:
        :func:`jax.lax.pbroadcast`; MPI_Bcast (MPI standard, 6.4).

    Example:
        >>> import pycollective as pc
        >>> int(pc.pbroadcast(pc.axis_index(), source=pc.axis_size() - 1)) == pc.axis_size() - 1
        True
    """
    if is_name(axis_name):
        return by_name("pbroadcast", axis_name, lax.pbroadcast, x, axis_name, source)
    comm = given_or_world("pbroadcast", axis_name)
    root = checks.rank("pbroadcast", comm, "source", source)
    copy = partial(reductions.bcast, comm=comm, root=root)
    return checks.call_for_leaves_of_root("pbroadcast", comm, copy, x)


def axis_index(axis_name: AxisName | Communicator | None = None) -> Array:
    """Returns this rank's number in the communicator.

    Args:
        axis_name: a communicator, the world by default. A name gives :func:`jax.lax.axis_index`.

    Returns:
        The rank, an int32 scalar.

    Raises:
        TypeError, ValueError: while tracing, for what is no communicator.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Shape:
        ``()``.

    Dtypes:
        int32.

    Differentiation:
        None: there is no operand.

    Order:
        No communication.

    Source:
        :func:`jax.lax.axis_index`; MPI_Comm_rank (MPI standard, 7.4.1).

    Example:
        >>> import pycollective as pc
        >>> int(pc.axis_index()) == pc.world().rank
        True
    """
    if is_name(axis_name):
        return by_name("axis_index", axis_name, lax.axis_index, axis_name)
    return jnp.int32(given_or_world("axis_index", axis_name).rank)


def axis_size(axis_name: AxisName | Communicator | None = None) -> int:
    """Returns the number of ranks of the communicator.

    Args:
        axis_name: a communicator, the world by default. A name gives :func:`jax.lax.axis_size`.

    Returns:
        The number, a Python int.

    Raises:
        TypeError, ValueError: while tracing, for what is no communicator.
        NameError: while tracing, for an axis name that no transform around the call binds.

    Differentiation:
        None: there is no operand.

    Order:
        No communication.

    Source:
        :func:`jax.lax.axis_size`; MPI_Comm_size (MPI standard, 7.4.1).

    Example:
        >>> import pycollective as pc
        >>> pc.axis_size() == pc.world().size
        True
    """
    if is_name(axis_name):
        return int(by_name("axis_size", axis_name, lax.axis_size, axis_name))
    return given_or_world("axis_size", axis_name).size
