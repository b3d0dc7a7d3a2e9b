"""Collectives of rows, of which each rank may have another number.

Arrays have a fixed number of rows, their capacity, and counts say how many of the rows are in use. The counts are
data: they may differ in each call of one program. What arrives lies at the front of a result, and rows that are not
used are zeros. Ranks tell each other the counts in each call, so a count that fits no array is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective import errors
from pycollective.collectives import checks
from pycollective.collectives.checks import Array, Groups, PyTree
from pycollective.jax_support import jax_internals
from pycollective.named_axes.names import AxisName, by_name, is_name, vary
from pycollective.primitives import exchanges, reductions
from pycollective.primitives.messages import barrier
from pycollective.primitives.passed import EMPTY_TREE
from pycollective.primitives.ragged import MOST_ROWS, ragged_alltoall, slices_of
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.participants import Participants
from pycollective.ranks.world import given_or_world


def ragged_all_to_all(
    operand: PyTree,
    output: PyTree,
    input_offsets: Array,
    send_sizes: Array,
    output_offsets: Array,
    recv_sizes: Array,
    *,
    axis_name: AxisName | Communicator | None = None,
    axis_index_groups: Groups = None,
) -> PyTree:
    """Exchanges slices of rows among all ranks: ``y_r[o : o + n] = x_s[i : i + n]``, with sizes known at run time.

    Entry ``d`` of ``input_offsets``, ``send_sizes`` and ``output_offsets`` describes the slice for rank ``d``: where it
    begins in ``operand``, how many rows it has, and where it begins in the result of rank ``d``. Entry ``s`` of
    ``recv_sizes`` is the number of rows that come from rank ``s``. With ``k`` entries for each rank there are as many
    slices. :func:`ragged_exchange` computes places and sizes by itself.

    Args:
        operand: an array of shape ``(n, ...)`` or a pytree of such arrays.
        output: an array of shape ``(m, ...)`` and the dtype of ``operand``, or a pytree of the same structure. Its rows
            stay where none arrive.
        input_offsets: integers of shape ``(k * size,)``.
        send_sizes: integers of the same shape.
        output_offsets: integers of the same shape.
        recv_sizes: integers of the same shape.
        axis_name: a communicator, the world by default. A name gives :func:`jax.lax.ragged_all_to_all`.
        axis_index_groups: lists of ranks of equal lengths, each rank in exactly one list. Ranks exchange with those of
            their own list, whose order is that of the entries. Default: one list of all ranks.

    Returns:
        ``output`` with the slices that have arrived.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NameError: while tracing, for an axis name that no transform around the call binds.
        jax.errors.JaxRuntimeError, ValueError: on all ranks, if on some rank a slice is not in its array, slices of a
            result overlap, or ``recv_sizes`` are not what the ranks send. With a name and several devices of a rank
            nothing is checked, as in JAX.

    Shape:
        That of ``output``.

    Dtypes:
        All.

    Differentiation:
        The transpose sends the slices back, and adds those of one row. With a name it is JAX's own: a row of the
        operand may be in one slice alone, and the cotangent of ``output`` is wrong where an empty slice begins.

    Order:
        Program order.

    Source:
        :func:`jax.lax.ragged_all_to_all`; MPI_Alltoallv (MPI standard, 6.8).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> rank, size = pc.axis_index(), pc.axis_size()
        >>> ones, ranks = jnp.ones(size, int), jnp.arange(size)
        >>> x, y = jnp.full(size, rank), jnp.zeros(size, int)
        >>> pc.ragged_all_to_all(x, y, ranks, ones, jnp.full(size, rank), ones).tolist() == list(range(size))
        True
    """
    where = "ragged_all_to_all"
    parts = (input_offsets, send_sizes, output_offsets, recv_sizes)
    if is_name(axis_name):
        exchange = partial(lax.ragged_all_to_all, axis_name=axis_name, axis_index_groups=axis_index_groups)
        return jax.tree.map(lambda x, y: by_name(where, axis_name, exchange, x, y, *parts), operand, output)
    comm = checks.group(where, given_or_world(where, axis_name), axis_index_groups, equal=True)
    names = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")
    given = [_counts(where, comm, name, part) for name, part in zip(names, parts, strict=True)]
    lengths = [part.shape[0] for part in given]
    if len(set(lengths)) > 1 or lengths[0] == 0 or lengths[0] % comm.size:
        errors.fail(
            ValueError,
            where,
            comm,
            f"offsets and sizes of one length, a multiple of the {comm.size} ranks",
            f"lengths {', '.join(map(str, lengths))}",
            "Give each rank as many entries, 0 rows for a rank without any.",
        )
    slices = slices_of(*given)
    return checks.call_with_leaves(
        lambda x, y: _exchange(where, comm, _rows(where, comm, x), _rows(where, comm, y), slices),
        operand,
        output,
        without_leaves=lambda: barrier(comm, EMPTY_TREE),
    )


def ragged_exchange(
    x: PyTree, counts: Array, comm: Communicator | None = None, *, capacity: int
) -> tuple[PyTree, Array]:
    """Sends each rank its rows: the first ``counts[0]`` rows go to rank 0, the next ``counts[1]`` to rank 1, and so on.

    Particles that change their owner, sorted by the new one, are an example. The rows arrive in the order of the ranks
    that send them.

    Args:
        x: an array of shape ``(n, ...)``, or a pytree of arrays with ``n`` rows. Rows behind the first
            ``sum(counts)`` are not sent.
        counts: integers of shape ``(size,)``, from 0 on, with a sum of at most ``n``.
        comm: a communicator, the world by default.
        capacity: the number of rows of the result, the same on all ranks.

    Returns:
        The rows that have arrived, and their number from each rank, an int32 array of shape ``(size,)``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        jax.errors.JaxRuntimeError, ValueError: on all ranks, if some rank has fewer rows than ``counts`` says, or gets
            more than ``capacity``.

    Shape:
        ``(capacity, ...)``; ``(size,)``.

    Dtypes:
        All.

    Differentiation:
        The transpose sends the cotangents of rows back.

    Order:
        Program order.

    Source:
        MPI_Alltoallv (MPI standard, 6.8).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> size = pc.axis_size()
        >>> rows, counts = pc.ragged_exchange(jnp.arange(size), jnp.ones(size, int), capacity=2 * size)
        >>> rows.tolist() == [pc.world().rank] * size + [0] * size, counts.tolist() == [1] * size
        (True, True)
    """
    where = "ragged_exchange"
    comm = given_or_world(where, comm)
    sent = _one_for_each(where, comm, "counts", counts)
    received = exchanges.alltoall(sent, comm=comm)
    targets = exchanges.alltoall(_starts(received), comm=comm)
    slices = jnp.stack([_starts(sent), sent, targets, received])
    return checks.call_for_leaves(where, comm, _packer(where, comm, capacity, slices), x), received


def ragged_all_gather(
    x: PyTree, count: Any, comm: Communicator | None = None, *, capacity: int | None = None
) -> tuple[PyTree, Array]:
    """Gathers the first ``count`` rows of each rank on all ranks, one rank's behind the other's.

    Args:
        x: an array of shape ``(n, ...)``, or a pytree of arrays with ``n`` rows.
        count: an integer from 0 to ``n``, on each rank its own.
        comm: a communicator, the world by default.
        capacity: the number of rows of the result, the same on all ranks. Default ``size * n``.

    Returns:
        The rows of all ranks, and each rank's ``count``, an int32 array of shape ``(size,)``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        jax.errors.JaxRuntimeError, ValueError: on all ranks, if ``count`` is more than ``n`` on some rank, or there are
            more rows than ``capacity``.

    Shape:
        ``(capacity, ...)``; ``(size,)``.

    Dtypes:
        All.

    Differentiation:
        The transpose adds the cotangents that the ranks have of a row.

    Order:
        Program order.

    Source:
        MPI_Allgatherv (MPI standard, 6.7).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> rank, size = pc.world().rank, pc.axis_size()
        >>> rows, counts = pc.ragged_all_gather(jnp.full(size, rank), rank + 1)
        >>> rows.tolist()[: sum(counts)] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3][: sum(counts)]
        True
        >>> counts.tolist() == list(range(1, size + 1))
        True
    """
    where = "ragged_all_gather"
    comm = given_or_world(where, comm)
    counts = _counts_of_all(where, comm, count)
    slices = _from_front(comm, counts, np.ones(comm.size, bool))
    return checks.call_for_leaves(where, comm, _packer(where, comm, capacity, slices), x), counts


def ragged_gather(
    x: PyTree, count: Any, comm: Communicator | None = None, *, root: int = 0, capacity: int | None = None
) -> tuple[PyTree, Array]:
    """Gathers the first ``count`` rows of each rank on the root, one rank's behind the other's. Other ranks get zeros.

    Args:
        x: an array of shape ``(n, ...)``, or a pytree of arrays with ``n`` rows.
        count: an integer from 0 to ``n``, on each rank its own.
        comm: a communicator, the world by default.
        root: the rank that gets the rows. Default 0.
        capacity: the number of rows of the result, the same on all ranks. Default ``size * n``.

    Returns:
        The rows of all ranks, or zeros, and on every rank each rank's ``count``, an int32 array of shape ``(size,)``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        jax.errors.JaxRuntimeError, ValueError: on all ranks, if ``count`` is more than ``n`` on some rank, or there are
            more rows than ``capacity``.

    Shape:
        ``(capacity, ...)``, on every rank; ``(size,)``.

    Dtypes:
        All.

    Differentiation:
        The transpose sends the root's cotangents back.

    Order:
        Program order.

    Source:
        MPI_Gatherv (MPI standard, 6.5).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> rows, counts = pc.ragged_gather(jnp.ones(3), 2)
        >>> int(rows.sum()) == (2 * pc.axis_size() if pc.world().rank == 0 else 0), rows.shape == (3 * pc.axis_size(),)
        (True, True)
    """
    where = "ragged_gather"
    comm = given_or_world(where, comm)
    to = checks.rank(where, comm, "root", root)
    counts = _counts_of_all(where, comm, count)
    slices = _from_front(comm, counts, np.arange(comm.size) == to)
    return checks.call_for_leaves_of_root(where, comm, _packer(where, comm, capacity, slices), x), counts


def ragged_scatter(
    x: PyTree, counts: Array, comm: Communicator | None = None, *, root: int = 0, capacity: int
) -> tuple[PyTree, Array]:
    """Gives each rank its rows of the root's array: the first ``counts[0]`` to rank 0, the next to rank 1, and so on.

    Args:
        x: an array of shape ``(n, ...)``, or a pytree of arrays with ``n`` rows. Only the root's values are read.
        counts: integers of shape ``(size,)``, from 0 on. Only the root's values are read.
        comm: a communicator, the world by default.
        root: the rank whose array is cut. Default 0.
        capacity: the number of rows of the result, the same on all ranks.

    Returns:
        This rank's rows, and their number, an int32 scalar.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        jax.errors.JaxRuntimeError, ValueError: on all ranks, if the root has fewer rows than ``counts`` says, or some
            rank gets more than ``capacity``.

    Shape:
        ``(capacity, ...)``; ``()``.

    Dtypes:
        All.

    Differentiation:
        The transpose sends the cotangents of rows to the root.

    Order:
        Program order.

    Source:
        MPI_Scatterv (MPI standard, 6.6).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> size, rank = pc.axis_size(), pc.world().rank
        >>> rows, count = pc.ragged_scatter(jnp.arange(10), jnp.arange(size), capacity=4)
        >>> int(count) == rank, rows.tolist()[:rank] == [[], [0], [1, 2], [3, 4, 5]][rank]
        (True, True)
    """
    where = "ragged_scatter"
    comm = given_or_world(where, comm)
    from_ = checks.rank(where, comm, "root", root)
    all_counts = reductions.bcast(_one_for_each(where, comm, "counts", counts), comm=comm, root=from_)
    count = all_counts[comm.rank]
    sent = all_counts if comm.rank == from_ else jnp.zeros_like(all_counts)
    received = jnp.where(jnp.arange(comm.size) == from_, count, 0)
    slices = jnp.stack([_starts(sent), sent, jnp.zeros_like(sent), received])
    return checks.call_for_leaves_of_root(where, comm, _packer(where, comm, capacity, slices), x), count


def _exchange(where: str, comm: Participants, x: Array, output: Array, slices: Array) -> Array:
    if x.shape[1:] != output.shape[1:] or x.dtype != output.dtype:
        errors.fail(
            ValueError,
            where,
            comm,
            "rows of one shape and dtype",
            f"{x.dtype}{list(x.shape[1:])} and, in output, {output.dtype}{list(output.shape[1:])}",
            "Only the number of rows may differ.",
        )
    # Operands of one type: what varies along fewer axes of a mesh has a cotangent that is a sum over the others.
    axes = frozenset().union(*map(jax_internals.varying_axes, (output, x, slices)))
    return ragged_alltoall(vary(output, axes), vary(x, axes), slices, comm=comm)


def _packer(where: str, comm: Participants, capacity: int | None, slices: Array) -> Callable[[Array], Array]:
    """Returns the exchange of one leaf. Its result has ``capacity`` rows; None: room for all rows of all ranks."""
    length = None if capacity is None else errors.integer(where, comm, "capacity", capacity)
    if length is not None and length < 0:
        errors.fail(ValueError, where, comm, "capacity from 0 on", length, "It is a number of rows.")

    def exchange_leaf(x: Array) -> Array:
        x = _rows(where, comm, x)
        shape = (comm.size * x.shape[0] if length is None else length, *x.shape[1:])
        return _exchange(where, comm, x, jnp.zeros(shape, x.dtype), slices)

    return exchange_leaf


def _rows(where: str, comm: Participants, x: Array) -> Array:
    x = checks.array(where, comm, x)
    if x.ndim == 0:
        errors.fail(ValueError, where, comm, "arrays of rows", "a scalar", "Give it a first axis.")
    return x


def _integers(where: str, comm: Participants, values: Any) -> Array:
    """Returns ``values`` as an array. JAX would cut the bits of NumPy's larger integers: they become wrong counts."""
    if not isinstance(values, jax.Array) and np.issubdtype(np.result_type(values), np.integer):
        values = np.clip(values, -1, MOST_ROWS).astype(np.int32)
    return checks.array(where, comm, values)


def _counts(where: str, comm: Participants, name: str, counts: Any) -> Array:
    counts = _integers(where, comm, counts)
    if not jnp.issubdtype(counts.dtype, jnp.integer) or counts.ndim != 1:
        errors.fail(
            TypeError,
            where,
            comm,
            f"{name} to be integers in an array of one axis",
            f"{counts.dtype}{list(counts.shape)}",
            "Count rows in integers.",
        )
    return counts


def _one_for_each(where: str, comm: Participants, name: str, counts: Any) -> Array:
    counts = _counts(where, comm, name, counts)
    if counts.shape[0] != comm.size:
        errors.fail(
            ValueError,
            where,
            comm,
            f"{name} with an entry for each of {comm.size} ranks",
            f"{counts.shape[0]} entries",
            "Write 0 for a rank that gets no rows.",
        )
    return slices_of(counts)[0]


def _counts_of_all(where: str, comm: Participants, count: Any) -> Array:
    """The numbers of rows of all ranks, as int32."""
    count = _integers(where, comm, count)
    if not jnp.issubdtype(count.dtype, jnp.integer) or count.ndim != 0:
        errors.fail(
            TypeError,
            where,
            comm,
            "count to be an integer",
            f"{count.dtype}{list(count.shape)}",
            "Give the number of rows of this rank.",
        )
    return reductions.allgather(slices_of(count)[0], comm=comm)


def _from_front(comm: Participants, counts: Array, receivers: np.ndarray) -> Array:
    """The slices by which each rank's first rows go to receivers, behind those of the ranks before it."""
    sent = jnp.where(receivers, counts[comm.rank], 0)
    received = counts if receivers[comm.rank] else jnp.zeros_like(counts)
    return jnp.stack([jnp.zeros_like(sent), sent, jnp.full_like(sent, _starts(counts)[comm.rank]), received])


def _starts(counts: Array) -> Array:
    """Where slices of these sizes begin, one behind the other."""
    return jnp.cumsum(counts, dtype=jnp.int32) - counts
