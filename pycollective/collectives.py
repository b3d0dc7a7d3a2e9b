"""The public functions: jax.lax's collectives and MPI's own, on a communicator."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from pycollective import ordering, primitives
from pycollective.communicator import Communicator, world
from pycollective.errors import message
from pycollective.mpi import MPI

Array = jax.Array
PyTree = Any
AxisName = Hashable
Groups = Sequence[Sequence[int]] | None


# Checks at trace time --------------------------------------------------------------------------------------


def _fail(kind: type[Exception], where: str, comm: Communicator | None, expected: Any, got: Any, remedy: str) -> NoReturn:
    rank, size = (comm.rank, comm.size) if comm is not None else (None, None)
    raise kind(message(where, expected, got, remedy, rank=rank, size=size))


def _communicator(where: str, axis_name: Any) -> Communicator:
    """The communicator that ``axis_name`` stands for."""
    comm = world() if axis_name is None else axis_name
    if not isinstance(comm, Communicator):
        remedy = "Pass pycollective.world(), a split of it, or pycollective.Communicator(mpi4py communicator)."
        if isinstance(comm, (str, tuple, list)):
            remedy = "This operation has no form over axis names. " + remedy
        _fail(TypeError, where, None, "a Communicator", repr(axis_name), remedy)
    comm.check_live(where)
    return comm


def _is_name(axis_name: Any) -> bool:
    """Whether ``axis_name`` is a name, or a tuple of names, bound by a JAX transform."""
    if isinstance(axis_name, (tuple, list)):
        return len(axis_name) > 0 and all(_is_name(name) for name in axis_name)
    return not (axis_name is None or isinstance(axis_name, (Communicator, MPI.Comm, bool, int, float)))


def _by_name(where: str, axis_name: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args)``, one of jax.lax's own, which know the named axes."""
    try:
        lax.axis_size(axis_name)
    except NameError as error:
        raise NameError(
            message(
                where,
                "an axis name bound by a transform around this call, or a Communicator",
                str(error),
                "Bind it with jax.vmap(axis_name=...) or jax.shard_map, or pass pycollective.world().",
            )
        ) from None
    return function(*args, **kwargs)


def _array(where: str, comm: Communicator, leaf: Any) -> Array:
    """A leaf as an array. Python scalars take JAX's default dtypes."""
    if isinstance(leaf, jax.core.Tracer):
        return leaf  # type: ignore[return-value]
    try:
        return jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        _fail(
            TypeError,
            where,
            comm,
            "arrays, or pytrees of them",
            f"{type(leaf).__name__} ({str(error).splitlines()[0]})",
            "Convert it to an array first.",
        )


def _map(where: str, comm: Communicator, function: Callable[[Array], Any], tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: function(_array(where, comm, leaf)), tree)


def _integer(where: str, comm: Communicator, name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        _fail(TypeError, where, comm, f"{name} to be an integer", repr(value), "It is fixed when the program is traced.")


def _rank(where: str, comm: Communicator, name: str, value: Any) -> int:
    rank = _integer(where, comm, name, value)
    if not 0 <= rank < comm.size:
        _fail(ValueError, where, comm, f"{name} from 0 to {comm.size - 1}", rank, "Ranks count from 0 in each communicator.")
    return rank


def _axis(where: str, comm: Communicator, name: str, value: Any, ndim: int) -> int:
    axis = _integer(where, comm, name, value)
    if not -ndim <= axis < ndim:
        _fail(ValueError, where, comm, f"{name} from {-ndim} to {ndim - 1}", axis, "Choose an axis of the array.")
    return axis % ndim


def _op(where: str, comm: Communicator, op: Any) -> str:
    if op not in primitives.OPS:
        _fail(ValueError, where, comm, f"op to be one of {list(primitives.OPS)}", repr(op), "Choose one of them.")
    return str(op)


def _reducible(where: str, comm: Communicator, x: Array, op: str) -> Array:
    if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_):
        _fail(TypeError, where, comm, f"a dtype that {op} is defined for", x.dtype, "Reduce numbers or bools.")
    if op in ("min", "max") and jnp.issubdtype(x.dtype, jnp.complexfloating):
        _fail(TypeError, where, comm, f"a dtype that {op} is defined for", x.dtype, "Complex numbers have no order: reduce abs(x), or the parts.")
    return x


def _group(where: str, comm: Communicator, groups: Groups, *, equal: bool) -> Communicator:
    """The communicator of this rank's group."""
    if groups is None:
        return comm
    canonical = tuple(tuple(_integer(where, comm, "axis_index_groups", rank) for rank in group) for group in groups)
    if sorted(rank for group in canonical for rank in group) != list(range(comm.size)):
        _fail(
            ValueError,
            where,
            comm,
            f"axis_index_groups with each rank from 0 to {comm.size - 1} once",
            canonical,
            "List every rank in exactly one group.",
        )
    if equal and len({len(group) for group in canonical}) > 1:
        _fail(ValueError, where, comm, "axis_index_groups of equal sizes", canonical, "The result's shape depends on it.")
    return comm.groups(canonical)


def _divide(where: str, comm: Communicator, x: Array, axis: int) -> Array:
    """Cuts ``axis`` into (size, rest) and moves the first of them to the front."""
    if x.shape[axis] % comm.size:
        _fail(
            ValueError,
            where,
            comm,
            f"axis {axis} to divide by the {comm.size} ranks",
            f"shape {tuple(x.shape)}",
            "Pad it, or use a communicator whose size divides it.",
        )
    shape = (*x.shape[:axis], comm.size, x.shape[axis] // comm.size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _join(blocks: Array, axis: int) -> Array:
    """Inverse of :func:`_divide`: concatenates the blocks ``(size, ...)`` along ``axis`` of a block."""
    shape = (*blocks.shape[1 : axis + 1], blocks.shape[0] * blocks.shape[axis + 1], *blocks.shape[axis + 2 :])
    return jnp.moveaxis(blocks, 0, axis).reshape(shape)


def _counts_ranks(where: str, comm: Communicator, x: Array, axis: int, name: str) -> Array:
    """Checks that ``axis`` has one entry for each rank and moves it to the front."""
    if x.shape[axis] != comm.size:
        _fail(
            ValueError,
            where,
            comm,
            f"{name} {axis} of length {comm.size}, one entry for each rank",
            f"shape {tuple(x.shape)}",
            "Reshape the array, or pass tiled=True where the operation has it.",
        )
    return jnp.moveaxis(x, axis, 0)


def _tag(where: str, comm: Communicator, name: str, value: int | None, wildcard: int | None) -> int:
    if value is None and wildcard is not None:
        return wildcard
    tag = _integer(where, comm, name, value)
    largest = comm.mpi.Get_attr(MPI.TAG_UB)
    if not 0 <= tag <= largest:
        _fail(ValueError, where, comm, f"{name} from 0 to {largest}", tag, "MPI has no other tags.")
    return tag


def _peer(where: str, comm: Communicator, name: str, value: int | None, wildcard: int) -> int:
    return wildcard if value is None else _rank(where, comm, name, value)


# jax.lax's collectives -------------------------------------------------------------------------------------


def psum(x: PyTree, axis_name: AxisName | Communicator | None = None, *, axis_index_groups: Groups = None) -> PyTree:
    """Sums over ranks: ``y_r = sum_s x_s``.

    Args:
        x: array or pytree of arrays, of equal shapes and dtypes on all ranks.
        axis_name: a communicator; default the world. A name bound by a JAX transform gives :func:`jax.lax.psum`.
        axis_index_groups: ranks to sum among, each rank in one group; default all.

    Returns:
        As ``x``; bool becomes int32. float16, bfloat16 and the 8-bit floats are summed in float32 and rounded once.
        Unlike under :func:`jax.lax.psum`, a Python number is this rank's own, as any other value.

    Raises:
        TypeError, ValueError: at trace time, for arguments that do not fit.

    Differentiation: its own transpose. Order: as in the program.
    Source: :func:`jax.lax.psum`; MPI_Allreduce (MPI standard, 6.9.6).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> bool((pc.psum(jnp.ones(3)) == pc.world().size).all())
        True
    """
    if _is_name(axis_name):
        return _by_name("psum", axis_name, lax.psum, x, axis_name, axis_index_groups=axis_index_groups)
    return _allreduce("psum", x, axis_name, "sum", axis_index_groups)


def _allreduce(where: str, x: PyTree, axis_name: Any, op: str, groups: Groups) -> PyTree:
    comm = _group(where, _communicator(where, axis_name), groups, equal=False)
    return _map(where, comm, lambda leaf: primitives.allreduce(_reducible(where, comm, leaf, op), comm=comm, op=op), x)


def pmean(x: PyTree, axis_name: AxisName | Communicator | None = None, *, axis_index_groups: Groups = None) -> PyTree:
    """Averages over ranks: ``y_r = sum_s x_s / size``. Integers become floats.

    Arguments, errors and order are those of :func:`psum`. Differentiation: its own transpose.
    Source: :func:`jax.lax.pmean`.

    Example:
        >>> import pycollective as pc
        >>> float(pc.pmean(3.0))
        3.0
    """
    if _is_name(axis_name):
        return _by_name("pmean", axis_name, lax.pmean, x, axis_name, axis_index_groups=axis_index_groups)
    comm = _communicator("pmean", axis_name)
    size = _group("pmean", comm, axis_index_groups, equal=False).size
    return jax.tree.map(lambda y: y / size, _allreduce("pmean", x, comm, "sum", axis_index_groups))


def pmax(x: PyTree, axis_name: AxisName | Communicator | None = None, *, axis_index_groups: Groups = None) -> PyTree:
    """Takes the maximum over ranks: ``y_r = max_s x_s``. NaN wins, as in JAX; bool is "or".

    Arguments, errors and order are those of :func:`psum`; complex numbers raise TypeError.
    Differentiation (beyond :func:`jax.lax.pmax`): the mean of the derivatives at the ranks that hold the maximum.
    Source: :func:`jax.lax.pmax`; MPI_Allreduce.

    Example:
        >>> import pycollective as pc
        >>> int(pc.pmax(pc.axis_index())) == pc.axis_size() - 1
        True
    """
    if _is_name(axis_name):
        return _by_name("pmax", axis_name, lax.pmax, x, axis_name, axis_index_groups=axis_index_groups)
    return _allreduce("pmax", x, axis_name, "max", axis_index_groups)


def pmin(x: PyTree, axis_name: AxisName | Communicator | None = None, *, axis_index_groups: Groups = None) -> PyTree:
    """Takes the minimum over ranks: ``y_r = min_s x_s``. NaN wins, as in JAX; bool is "and".

    Otherwise as :func:`pmax`. Source: :func:`jax.lax.pmin`.

    Example:
        >>> import pycollective as pc
        >>> int(pc.pmin(pc.axis_index()))
        0
    """
    if _is_name(axis_name):
        return _by_name("pmin", axis_name, lax.pmin, x, axis_name, axis_index_groups=axis_index_groups)
    return _allreduce("pmin", x, axis_name, "min", axis_index_groups)


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
        x: array or pytree of arrays, of equal shapes and dtypes on all ranks.
        axis_name: a communicator; default the world. A name gives :func:`jax.lax.all_gather`.
        axis_index_groups: ranks to gather among, in groups of equal size; default all.
        axis: of the result, along which the ranks lie.
        tiled: concatenate along an existing axis instead of stacking along a new one.

    Returns:
        - ``tiled=False``: shape of ``x`` with a new axis of length ``size`` at ``axis``;
        - ``tiled=True``: shape of ``x`` with ``axis`` ``size`` times as long.

    Raises:
        TypeError, ValueError: at trace time, for arguments that do not fit.

    Differentiation: the transpose is :func:`psum_scatter`. Order: as in the program.
    Source: :func:`jax.lax.all_gather`; MPI_Allgather (MPI standard, 6.7).

    Example:
        >>> import pycollective as pc
        >>> pc.all_gather(pc.axis_index()).tolist() == list(range(pc.axis_size()))
        True
    """
    if _is_name(axis_name):
        return _by_name(
            "all_gather", axis_name, lax.all_gather, x, axis_name, axis_index_groups=axis_index_groups, axis=axis, tiled=tiled
        )
    comm = _group("all_gather", _communicator("all_gather", axis_name), axis_index_groups, equal=True)

    def gather_leaf(leaf: Array) -> Array:
        at = _axis("all_gather", comm, "axis", axis, leaf.ndim if tiled else leaf.ndim + 1)
        blocks = primitives.allgather(leaf, comm=comm)
        return _join(blocks, at) if tiled else jnp.moveaxis(blocks, 0, at)

    return _map("all_gather", comm, gather_leaf, x)


def psum_scatter(
    x: PyTree,
    axis_name: AxisName | Communicator | None = None,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> PyTree:
    """Sums over ranks and leaves each rank its block: ``y_r = sum_s x_s[r]`` along ``scatter_dimension``.

    Args:
        x: array or pytree of arrays, of equal shapes and dtypes on all ranks.
        axis_name: a communicator; default the world. A name gives :func:`jax.lax.psum_scatter`.
        scatter_dimension: the axis that is cut.
        axis_index_groups: ranks to sum among, in groups of equal size; default all.
        tiled: keep the axis, ``1 / size`` as long, instead of removing it.

    Returns:
        - ``tiled=False``: shape of ``x`` without ``scatter_dimension``, whose length must be ``size``;
        - ``tiled=True``: shape of ``x`` with ``scatter_dimension`` divided by ``size``.

        bool becomes int32; small floats are summed in float32, as in :func:`psum`.

    Raises:
        TypeError, ValueError: at trace time, for arguments that do not fit.

    Differentiation: the transpose is :func:`all_gather`. Order: as in the program.
    Source: :func:`jax.lax.psum_scatter`; MPI_Reduce_scatter_block (MPI standard, 6.10.1).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> float(pc.psum_scatter(jnp.ones(pc.axis_size()))) == pc.axis_size()
        True
    """
    where = "psum_scatter"
    if _is_name(axis_name):
        return _by_name(
            where,
            axis_name,
            lax.psum_scatter,
            x,
            axis_name,
            scatter_dimension=scatter_dimension,
            axis_index_groups=axis_index_groups,
            tiled=tiled,
        )
    comm = _group(where, _communicator(where, axis_name), axis_index_groups, equal=True)

    def scatter_leaf(leaf: Array) -> Array:
        at = _axis(where, comm, "scatter_dimension", scatter_dimension, leaf.ndim)
        _reducible(where, comm, leaf, "sum")
        if tiled:
            blocks = _divide(where, comm, leaf, at)
        else:
            blocks = _counts_ranks(where, comm, leaf, at, "scatter_dimension")
        return primitives.reduce_scatter(blocks, comm=comm, op="sum")

    return _map(where, comm, scatter_leaf, x)


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
        x: array or pytree of arrays, of equal shapes and dtypes on all ranks.
        axis_name: a communicator; default the world. A name gives :func:`jax.lax.all_to_all`.
        split_axis: the axis of ``x`` that is cut into one block for each rank.
        concat_axis: the axis of the result along which the blocks lie.
        axis_index_groups: ranks to exchange among, in groups of equal size; default all.
        tiled: keep both axes, the one divided and the other multiplied by ``size``.

    Returns:
        - ``tiled=False``: shape of ``x`` without ``split_axis``, whose length must be ``size``, and with a new axis of
          that length at ``concat_axis``;
        - ``tiled=True``: shape of ``x`` with ``split_axis`` divided and ``concat_axis`` multiplied by ``size``.

    Raises:
        TypeError, ValueError: at trace time, for arguments that do not fit.

    Differentiation: the transpose exchanges back. Order: as in the program.
    Source: :func:`jax.lax.all_to_all`; MPI_Alltoall (MPI standard, 6.8).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> pc.all_to_all(jnp.full(pc.axis_size(), pc.axis_index())).tolist() == list(range(pc.axis_size()))
        True
    """
    where = "all_to_all"
    if _is_name(axis_name):
        return _by_name(
            where,
            axis_name,
            lax.all_to_all,
            x,
            axis_name,
            split_axis,
            concat_axis,
            axis_index_groups=axis_index_groups,
            tiled=tiled,
        )
    comm = _group(where, _communicator(where, axis_name), axis_index_groups, equal=True)

    def exchange_leaf(leaf: Array) -> Array:
        split = _axis(where, comm, "split_axis", split_axis, leaf.ndim)
        concat = _axis(where, comm, "concat_axis", concat_axis, leaf.ndim)
        if tiled:
            return _join(primitives.alltoall(_divide(where, comm, leaf, split), comm=comm), concat)
        blocks = _counts_ranks(where, comm, leaf, split, "split_axis")
        return jnp.moveaxis(primitives.alltoall(blocks, comm=comm), 0, concat)

    return _map(where, comm, exchange_leaf, x)


def ppermute(
    x: PyTree, axis_name: AxisName | Communicator | None = None, perm: Sequence[tuple[int, int]] | None = None
) -> PyTree:
    """Sends along pairs of ranks: ``y_d = x_s`` for each ``(s, d)`` in ``perm``, zeros elsewhere.

    Args:
        x: array or pytree of arrays, of equal shapes and dtypes on all ranks.
        axis_name: a communicator; default the world. A name gives :func:`jax.lax.ppermute`.
        perm: (source, destination) pairs, the same on all ranks; no rank twice as source or as destination.

    Returns:
        As ``x``.

    Raises:
        TypeError, ValueError: at trace time, for arguments that do not fit.

    Differentiation: the transpose is the inverse permutation. Order: as in the program.
    Source: :func:`jax.lax.ppermute`; MPI_Sendrecv (MPI standard, 3.10).

    Example:
        >>> import pycollective as pc
        >>> n = pc.axis_size()
        >>> shifted = pc.ppermute(pc.axis_index(), perm=[(r, (r + 1) % n) for r in range(n)])
        >>> int(shifted) == (pc.world().rank - 1) % n
        True
    """
    if perm is None:
        _fail(TypeError, "ppermute", None, "perm: (source, destination) pairs", "none", "Pass perm=[(0, 1), (1, 0)], say.")
    if _is_name(axis_name):
        return _by_name("ppermute", axis_name, lax.ppermute, x, axis_name, perm)
    comm = _communicator("ppermute", axis_name)
    pairs = tuple(_pair(comm, pair) for pair in perm)
    for side, ranks in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        if twice:
            _fail(ValueError, "ppermute", comm, f"each rank once as {side}", f"{twice} more than once in {list(pairs)}", "Use two calls.")
    return _map("ppermute", comm, lambda leaf: primitives.ppermute(leaf, comm=comm, perm=pairs), x)


def _pair(comm: Communicator, pair: Any) -> tuple[int, int]:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        _fail(TypeError, "ppermute", comm, "(source, destination) pairs in perm", repr(pair), "Pass perm=[(0, 1)], say.")
    return _rank("ppermute", comm, "a source", pair[0]), _rank("ppermute", comm, "a destination", pair[1])


def pshuffle(
    x: PyTree, axis_name: AxisName | Communicator | None = None, perm: Sequence[int] | None = None
) -> PyTree:
    """Permutes the ranks' arrays: ``y_r = x_perm[r]``.

    Args:
        x: array or pytree of arrays, of equal shapes and dtypes on all ranks.
        axis_name: a communicator; default the world. A name gives :func:`jax.lax.pshuffle`.
        perm: a permutation of the ranks, the same on all.

    Otherwise as :func:`ppermute`. Source: :func:`jax.lax.pshuffle`.

    Example:
        >>> import pycollective as pc
        >>> n = pc.axis_size()
        >>> int(pc.pshuffle(pc.axis_index(), perm=list(range(n))[::-1])) == n - 1 - pc.world().rank
        True
    """
    if perm is None:
        _fail(TypeError, "pshuffle", None, "perm: a permutation of the ranks", "none", "Pass perm=[1, 0], say.")
    if _is_name(axis_name):
        return _by_name("pshuffle", axis_name, lax.pshuffle, x, axis_name, perm)
    comm = _communicator("pshuffle", axis_name)
    if sorted(perm) != list(range(comm.size)):
        _fail(ValueError, "pshuffle", comm, f"a permutation of 0 to {comm.size - 1}", list(perm), "Name each rank once.")
    return ppermute(x, comm, list(zip(perm, range(comm.size), strict=True)))


def pswapaxes(
    x: PyTree,
    axis_name: AxisName | Communicator | None = None,
    axis: int = 0,
    *,
    axis_index_groups: Groups = None,
) -> PyTree:
    """Swaps the ranks with an axis of length ``size``: ``y_r[..., s, ...] = x_s[..., r, ...]``.

    The same as :func:`all_to_all` with both axes ``axis``. Source: :func:`jax.lax.pswapaxes`.

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> pc.pswapaxes(jnp.full(pc.axis_size(), pc.axis_index())).tolist() == list(range(pc.axis_size()))
        True
    """
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


def pbroadcast(x: PyTree, axis_name: AxisName | Communicator | None = None, source: int = 0) -> PyTree:
    """Copies one rank's arrays to all: ``y_r = x_source``. JAX's name for :func:`broadcast`.

    Source: :func:`jax.lax.pbroadcast`.

    Example:
        >>> import pycollective as pc
        >>> int(pc.pbroadcast(pc.axis_index(), source=pc.axis_size() - 1)) == pc.axis_size() - 1
        True
    """
    if _is_name(axis_name):
        return _by_name("pbroadcast", axis_name, lax.pbroadcast, x, axis_name, source)
    return _rooted("pbroadcast", primitives.bcast, x, axis_name, source, name="source")


def axis_index(axis_name: AxisName | Communicator | None = None) -> Array:
    """This rank's number, an int32 scalar. Source: :func:`jax.lax.axis_index`.

    Example:
        >>> import pycollective as pc
        >>> int(pc.axis_index()) == pc.world().rank
        True
    """
    if _is_name(axis_name):
        return _by_name("axis_index", axis_name, lax.axis_index, axis_name)
    return jnp.int32(_communicator("axis_index", axis_name).rank)


def axis_size(axis_name: AxisName | Communicator | None = None) -> int:
    """The number of ranks, a Python int. Source: :func:`jax.lax.axis_size`.

    Example:
        >>> import pycollective as pc
        >>> pc.axis_size() == pc.world().size
        True
    """
    if _is_name(axis_name):
        return int(_by_name("axis_size", axis_name, lax.axis_size, axis_name))
    return _communicator("axis_size", axis_name).size


# MPI's own -------------------------------------------------------------------------------------------------


def _rooted(
    where: str, function: Callable[..., Array], x: PyTree, axis_name: Any, root: Any, *, name: str = "root"
) -> PyTree:
    comm = _communicator(where, axis_name)
    rank = _rank(where, comm, name, root)
    return _map(where, comm, lambda leaf: function(leaf, comm=comm, root=rank), x)


def broadcast(x: PyTree, axis_name: Communicator | None = None, *, root: int = 0) -> PyTree:
    """Copies the root's arrays to all ranks: ``y_r = x_root``.

    Args:
        x: array or pytree of arrays, of equal shapes and dtypes on all ranks; also keys of :mod:`jax.random`.
        axis_name: a communicator; default the world.
        root: the rank whose values are taken.

    Returns:
        As ``x``.

    Raises:
        TypeError, ValueError: at trace time, for arguments that do not fit.

    Differentiation: the transpose sums the cotangents at the root and gives zeros elsewhere. Order: as in the program.
    Source: MPI_Bcast (MPI standard, 6.4).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> pc.broadcast({"w": jnp.arange(3)})["w"].tolist()
        [0, 1, 2]
    """
    return _rooted("broadcast", primitives.bcast, x, axis_name, root)


def reduce(x: PyTree, axis_name: Communicator | None = None, *, op: str = "sum", root: int = 0) -> PyTree:
    """Reduces over ranks to one: ``y_root = op_s x_s``, zeros on the other ranks.

    Args:
        x: array or pytree of arrays, of equal shapes and dtypes on all ranks.
        axis_name: a communicator; default the world.
        op: "sum", "prod", "min" or "max".
        root: the rank that gets the result.

    Returns:
        As ``x`` on every rank; sums and products of bool become int32.

    Raises:
        TypeError, ValueError: at trace time, for arguments that do not fit.

    Differentiation: for "sum", the transpose broadcasts the root's cotangent; others raise NotImplementedError.
    Order: as in the program. Source: MPI_Reduce (MPI standard, 6.9.1).

    Example:
        >>> import pycollective as pc
        >>> int(pc.reduce(1, op="sum")) == (pc.axis_size() if pc.world().rank == 0 else 0)
        True
    """
    comm = _communicator("reduce", axis_name)
    name, rank = _op("reduce", comm, op), _rank("reduce", comm, "root", root)

    def reduce_leaf(leaf: Array) -> Array:
        return primitives.reduce(_reducible("reduce", comm, leaf, name), comm=comm, op=name, root=rank)

    return _map("reduce", comm, reduce_leaf, x)


def gather(x: PyTree, axis_name: Communicator | None = None, *, root: int = 0) -> PyTree:
    """Gathers the ranks' arrays on one: ``y_root[s] = x_s``, zeros on the other ranks.

    Args:
        x: array or pytree of arrays, of equal shapes and dtypes on all ranks.
        axis_name: a communicator; default the world.
        root: the rank that gets the result.

    Returns:
        Shape ``(size, *x.shape)`` on every rank.

    Raises:
        TypeError, ValueError: at trace time, for arguments that do not fit.

    Differentiation: the transpose is :func:`scatter`. Order: as in the program.
    Source: MPI_Gather (MPI standard, 6.5).

    Example:
        >>> import pycollective as pc
        >>> pc.gather(pc.axis_index()).shape == (pc.axis_size(),)
        True
    """
    return _rooted("gather", primitives.gather, x, axis_name, root)


def scatter(x: PyTree, axis_name: Communicator | None = None, *, root: int = 0) -> PyTree:
    """Gives each rank its entry of the root's array: ``y_r = x_root[r]``.

    Args:
        x: array or pytree of arrays of shape ``(size, ...)`` on every rank; only the root's values are read.
        axis_name: a communicator; default the world.
        root: the rank whose values are taken.

    Returns:
        Shape of ``x`` without its first axis.

    Raises:
        TypeError, ValueError: at trace time, for arguments that do not fit.

    Differentiation: the transpose is :func:`gather`. Order: as in the program.
    Source: MPI_Scatter (MPI standard, 6.6).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> int(pc.scatter(jnp.arange(pc.axis_size()))) == pc.world().rank
        True
    """
    comm = _communicator("scatter", axis_name)
    rank = _rank("scatter", comm, "root", root)

    def scatter_leaf(leaf: Array) -> Array:
        if leaf.ndim == 0:
            _fail(ValueError, "scatter", comm, f"a leading axis of length {comm.size}", "a scalar", "Stack one entry for each rank.")
        return primitives.scatter(_counts_ranks("scatter", comm, leaf, 0, "axis"), comm=comm, root=rank)

    return _map("scatter", comm, scatter_leaf, x)


def _prefix(where: str, function: Callable[..., Array], x: PyTree, axis_name: Any, op: str) -> PyTree:
    comm = _communicator(where, axis_name)
    name = _op(where, comm, op)
    return _map(where, comm, lambda leaf: function(_reducible(where, comm, leaf, name), comm=comm, op=name), x)


def scan(x: PyTree, axis_name: Communicator | None = None, *, op: str = "sum") -> PyTree:
    """Reduces over this rank and those before it: ``y_r = op_{s <= r} x_s``.

    Args:
        x: array or pytree of arrays, of equal shapes and dtypes on all ranks.
        axis_name: a communicator; default the world.
        op: "sum", "prod", "min" or "max".

    Returns:
        As ``x``; sums and products of bool become int32.

    Raises:
        TypeError, ValueError: at trace time, for arguments that do not fit.

    Differentiation: for "sum", the transpose is the scan over the ranks in opposite order; others raise
    NotImplementedError. Order: as in the program. Source: MPI_Scan (MPI standard, 6.11.1).

    Example:
        >>> import pycollective as pc
        >>> int(pc.scan(1)) == pc.world().rank + 1
        True
    """
    return _prefix("scan", primitives.scan, x, axis_name, op)


def exscan(x: PyTree, axis_name: Communicator | None = None, *, op: str = "sum") -> PyTree:
    """Reduces over the ranks before this one: ``y_r = op_{s < r} x_s``, zeros on rank 0.

    Otherwise as :func:`scan`. Source: MPI_Exscan (MPI standard, 6.11.2).

    Example:
        >>> import pycollective as pc
        >>> int(pc.exscan(1)) == pc.world().rank
        True
    """
    return _prefix("exscan", primitives.exscan, x, axis_name, op)


def send(x: PyTree, axis_name: Communicator | None = None, *, dest: int, tag: int = 0) -> None:
    """Sends the arrays to one rank, which must call :func:`recv` (or :func:`sendrecv`).

    Args:
        x: array or pytree of arrays.
        axis_name: a communicator; default the world.
        dest: the rank that receives.
        tag: a number that the receiver can ask for.

    Raises:
        TypeError, ValueError: at trace time, for arguments that do not fit.
        NotImplementedError: differentiated with respect to ``x``; :func:`sendrecv` and :func:`ppermute` can be.

    Order: as in the program. May wait for the receiver. Source: MPI_Send (MPI standard, 3.2.1).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> if pc.world().size > 1 and pc.world().rank == 0: pc.send(jnp.arange(3), dest=1)
        >>> if pc.world().rank == 1: assert pc.recv(jnp.zeros(3, int), source=0).tolist() == [0, 1, 2]
    """
    comm = _communicator("send", axis_name)
    params = {"dest": _rank("send", comm, "dest", dest), "tag": _tag("send", comm, "tag", tag, None)}
    _map("send", comm, lambda leaf: primitives.send(leaf, comm=comm, **params), x)


def recv(
    like: PyTree, axis_name: Communicator | None = None, *, source: int | None = None, tag: int | None = None
) -> PyTree:
    """Receives arrays from one rank, which must call :func:`send` (or :func:`sendrecv`).

    Args:
        like: pytree of arrays or :class:`jax.ShapeDtypeStruct` with the shapes and dtypes of what arrives; values
            are not read.
        axis_name: a communicator; default the world.
        source: the rank that sends; None: any.
        tag: that of the sender; None: any.

    Returns:
        As ``like``.

    Raises:
        TypeError, ValueError: at trace time, for arguments that do not fit.
        NotImplementedError: differentiated with respect to ``like``.
        jax.errors.JaxRuntimeError: at run time, when the message has another length.

    Order: as in the program. Source: MPI_Recv (MPI standard, 3.2.4).

    Example:
        See :func:`send`.
    """
    comm = _communicator("recv", axis_name)
    params = {
        "source": _peer("recv", comm, "source", source, MPI.ANY_SOURCE),
        "tag": _tag("recv", comm, "tag", tag, MPI.ANY_TAG),
    }
    return jax.tree.map(lambda leaf: primitives.recv(_template("recv", comm, leaf), comm=comm, **params), like)


def _template(where: str, comm: Communicator, leaf: Any) -> Array | jax.ShapeDtypeStruct:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else _array(where, comm, leaf)


def sendrecv(
    x: PyTree,
    axis_name: Communicator | None = None,
    *,
    source: int | None,
    dest: int | None,
    like: PyTree | None = None,
    send_tag: int = 0,
    recv_tag: int | None = 0,
) -> PyTree:
    """Sends to one rank while receiving from another: no deadlock whatever the order of the ranks.

    Args:
        x: array or pytree of arrays to send.
        axis_name: a communicator; default the world.
        source: the rank to receive from; None: none, the result is zeros.
        dest: the rank to send to; None: none.
        like: pytree with the shapes and dtypes of what arrives, its structure that of ``x``; default ``x``.
        send_tag: of the message that goes out.
        recv_tag: of the message that comes in; None: any.

    Returns:
        As ``like``.

    Raises:
        TypeError, ValueError: at trace time, for arguments that do not fit.
        jax.errors.JaxRuntimeError: at run time, when the message has another length.

    Differentiation: the cotangent goes back from the source to the destination's place. Order: as in the program.
    Source: MPI_Sendrecv (MPI standard, 3.10).

    Example:
        >>> import pycollective as pc
        >>> n, r = pc.axis_size(), pc.world().rank
        >>> int(pc.sendrecv(pc.axis_index(), source=(r - 1) % n, dest=(r + 1) % n)) == (r - 1) % n
        True
    """
    comm = _communicator("sendrecv", axis_name)
    params = {
        "source": _peer("sendrecv", comm, "source", source, MPI.PROC_NULL),
        "dest": _peer("sendrecv", comm, "dest", dest, MPI.PROC_NULL),
        "send_tag": _tag("sendrecv", comm, "send_tag", send_tag, None),
        "recv_tag": _tag("sendrecv", comm, "recv_tag", recv_tag, MPI.ANY_TAG),
    }
    like = x if like is None else like
    if jax.tree.structure(x) != jax.tree.structure(like):
        _fail(
            ValueError,
            "sendrecv",
            comm,
            f"like of the structure of x, {jax.tree.structure(x)}",
            jax.tree.structure(like),
            "Send and receive the same number of arrays.",
        )

    def exchange_leaf(leaf: Any, template: Any) -> Array:
        template = _template("sendrecv", comm, template)
        return primitives.sendrecv(_array("sendrecv", comm, leaf), template, comm=comm, **params)

    return jax.tree.map(exchange_leaf, x, like)


def barrier(axis_name: Communicator | None = None) -> None:
    """Waits until every rank has come here. Outside :func:`jax.jit` the Python program waits, inside the compiled one.

    Order: as in the program. Source: MPI_Barrier (MPI standard, 6.3).

    Example:
        >>> import pycollective as pc
        >>> pc.barrier()
    """
    primitives.barrier_p.bind(comm=_communicator("barrier", axis_name))
