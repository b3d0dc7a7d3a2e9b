"""The public collectives that have MPI's names, and messages between two ranks.

They take a communicator, the world by default. They have no form over the names of axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pycollective import errors
from pycollective.collectives import checks
from pycollective.collectives.checks import Array, PyTree
from pycollective.collectives.jax_reductions import over_ranks
from pycollective.primitives import exchanges, messages, reductions
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.world import given_or_world
from pycollective.transport.message_constants import ANY_SOURCE, ANY_TAG, PROC_NULL, MessageConstant
from pycollective.transport.mpi import MPI


def _rooted(where: str, function: Callable[..., Array], x: PyTree, comm: Any, root: Any) -> PyTree:
    comm = given_or_world(where, comm)
    rank = checks.rank(where, comm, "root", root)
    return checks.call_for_leaves_of_root(where, comm, lambda leaf: function(leaf, comm=comm, root=rank), x)


def broadcast(x: PyTree, comm: Communicator | None = None, *, root: int = 0) -> PyTree:
    """Copies the root's arrays to all ranks: ``y_r = x_root``.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks. Keys of :mod:`jax.random` are
            arrays too.
        comm: a communicator, the world by default.
        root: the rank whose values all ranks get. Default 0.

    Returns:
        The root's arrays, of the shapes and dtypes of ``x``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.

    Shape:
        That of ``x``.

    Dtypes:
        All, and keys of :mod:`jax.random`.

    Differentiation:
        The transpose sums the cotangents at the root; other ranks get zeros.

    Order:
        Program order.

    Source:
        MPI_Bcast (MPI standard, 6.4).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> pc.broadcast({"w": jnp.arange(3)})["w"].tolist()
        [0, 1, 2]
    """
    return _rooted("broadcast", reductions.bcast, x, comm, root)


def reduce(x: PyTree, comm: Communicator | None = None, *, op: str = "sum", root: int = 0) -> PyTree:
    """Reduces over ranks and gives the root the result: ``y_root = op_s x_s``. Other ranks get zeros.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        comm: a communicator, the world by default.
        op: the reduction: "sum", the default, "prod", "min", "max", or "and", "or", "xor" of integers and bools.
        root: the rank that gets the result. Default 0.

    Returns:
        The result, or zeros, of the shapes and dtypes of ``x`` on every rank; sums and products of bool are int32.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.

    Shape:
        That of ``x``, on every rank.

    Dtypes:
        As for :func:`psum`; for "min" and "max" as for :func:`pmax`.

    Differentiation:
        For "sum", the transpose is :func:`broadcast` of the root's cotangent. Other operations raise
        NotImplementedError.

    Order:
        Program order.

    Source:
        MPI_Reduce (MPI standard, 6.9.1).

    Example:
        >>> import pycollective as pc
        >>> int(pc.reduce(1, op="sum")) == (pc.axis_size() if pc.world().rank == 0 else 0)
        True
    """
    comm = given_or_world("reduce", comm)
    name, rank = checks.op("reduce", comm, op), checks.rank("reduce", comm, "root", root)

    def reduce_leaf(leaf: Array) -> Array:
        return reductions.reduce(checks.reducible("reduce", comm, leaf, name), comm=comm, op=name, root=rank)

    return checks.call_for_leaves_of_root("reduce", comm, reduce_leaf, x)


def allreduce(
    x: PyTree, comm: Communicator | None = None, *, op: str | Callable[[PyTree, PyTree], PyTree] = "sum"
) -> PyTree:
    """Reduces over ranks and gives all of them the result: ``y_r = op_s x_s``.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        comm: a communicator, the world by default.
        op: the reduction: "sum", the default, "prod", "min", "max", or "and", "or", "xor" of integers and bools. Or a
            function of two trees like ``x`` that returns one, of the same shapes and dtypes, such as
            ``jnp.matmul``: the arrays of all ranks are gathered, and each rank combines them from left to right in the
            order of the ranks.

    Returns:
        The result, of the structure, shapes and dtypes of ``x``; sums and products of bool are int32.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value; for a function whose
            result is not like ``x``.

    Shape:
        That of ``x``.

    Dtypes:
        As for :func:`reduce`; with a function all that it takes.

    Differentiation:
        For "sum" as for :func:`psum`, for "min" and "max" as for :func:`pmax`; with a function that of the function, so
        ``jnp.multiply`` has the derivative that "prod" has not. Other operations raise NotImplementedError.

    Order:
        Program order.

    Source:
        MPI_Allreduce (MPI standard, 6.9.6).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> rank, size = pc.world().rank, pc.axis_size()
        >>> int(pc.allreduce(1 << rank, op="or")) == (1 << size) - 1
        True
        >>> shear = jnp.array([[1, 1], [0, 1]])
        >>> pc.allreduce(shear, op=jnp.matmul).tolist() == [[1, size], [0, 1]]
        True
    """
    comm = given_or_world("allreduce", comm)
    if not callable(op):
        return over_ranks("allreduce", x, comm, checks.op("allreduce", comm, op))
    x = checks.map_arrays("allreduce", comm, lambda leaf: leaf, x)
    of = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (jax.eval_shape(lambda: x), jax.eval_shape(op, x, x)))
    if of[0] != of[1]:
        errors.fail(
            TypeError,
            "allreduce",
            comm,
            f"op to return what it gets, {of[0]}",
            of[1],
            "Cast its result, and keep its shape.",
        )
    gathered = checks.call_for_leaves("allreduce", comm, lambda leaf: reductions.allgather(leaf, comm=comm), x)
    first, others = jax.tree.map(lambda each: each[0], gathered), jax.tree.map(lambda each: each[1:], gathered)
    return jax.lax.scan(lambda left, right: (op(left, right), None), first, others)[0]


def maxloc(x: PyTree, comm: Communicator | None = None) -> tuple[PyTree, PyTree]:
    """Takes the maximum over ranks, and the lowest rank that has it: ``y_r = max_s x_s``, element by element.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        comm: a communicator, the world by default.

    Returns:
        The maximum as :func:`pmax` takes it, so NaN wins, and the ranks, int32 arrays of the same shapes.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value, and for complex numbers.

    Shape:
        That of ``x``, twice.

    Dtypes:
        Real numbers and bool.

    Differentiation:
        As for :func:`pmax`.

    Order:
        Program order.

    Source:
        MPI_MAXLOC (MPI standard, 6.9.4).

    Example:
        >>> import pycollective as pc
        >>> value, rank = pc.maxloc(10 * pc.axis_index())
        >>> int(value) == 10 * int(rank), int(rank) == pc.axis_size() - 1
        (True, True)
    """
    return _with_rank("maxloc", x, comm, "max")


def minloc(x: PyTree, comm: Communicator | None = None) -> tuple[PyTree, PyTree]:
    """Takes the minimum over ranks, and the lowest rank that has it: ``y_r = min_s x_s``, element by element.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        comm: a communicator, the world by default.

    Returns:
        The minimum as :func:`pmin` takes it, so NaN wins, and the ranks, int32 arrays of the same shapes.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value, and for complex numbers.

    Shape:
        That of ``x``, twice.

    Dtypes:
        Real numbers and bool.

    Differentiation:
        As for :func:`pmin`.

    Order:
        Program order.

    Source:
        MPI_MINLOC (MPI standard, 6.9.4).

    Example:
        >>> import pycollective as pc
        >>> value, rank = pc.minloc(5)
        >>> int(value), int(rank)
        (5, 0)
    """
    return _with_rank("minloc", x, comm, "min")


def _with_rank(where: str, x: PyTree, comm: Any, op: str) -> tuple[PyTree, PyTree]:
    comm = given_or_world(where, comm)

    def find(leaf: Array) -> tuple[Array, Array]:
        (extreme,) = reductions.allreduce_all([checks.reducible(where, comm, leaf, op)], comm=comm, op=op)
        is_here = (leaf == extreme) | ((leaf != leaf) & (extreme != extreme))  # a NaN is no number
        place = jnp.where(is_here, jnp.int32(comm.rank), jnp.int32(comm.size))
        return extreme, reductions.allreduce_all([place], comm=comm, op="min")[0]

    found = checks.call_for_leaves(where, comm, find, x)
    extreme, rank = (jax.tree.map(lambda _, pair, i=i: pair[i], x, found) for i in (0, 1))
    return extreme, rank


def gather(x: PyTree, comm: Communicator | None = None, *, root: int = 0) -> PyTree:
    """Gathers the ranks' arrays on the root: ``y_root[s] = x_s``. Other ranks get zeros.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        comm: a communicator, the world by default.
        root: the rank that gets the result. Default 0.

    Returns:
        The ranks' arrays, or zeros, of shape ``(size, *x.shape)`` and the dtype of ``x`` on every rank.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.

    Shape:
        ``(size, *x.shape)``, on every rank.

    Dtypes:
        All.

    Differentiation:
        The transpose is :func:`scatter`.

    Order:
        Program order.

    Source:
        MPI_Gather (MPI standard, 6.5).

    Example:
        >>> import pycollective as pc
        >>> pc.gather(pc.axis_index()).shape == (pc.axis_size(),)
        True
    """
    return _rooted("gather", exchanges.gather, x, comm, root)


def scatter(x: PyTree, comm: Communicator | None = None, *, root: int = 0) -> PyTree:
    """Gives each rank its entry of the root's array: ``y_r = x_root[r]``.

    Args:
        x: an array or a pytree of arrays, of shape ``(size, ...)`` on every rank. Only the root's values are read.
        comm: a communicator, the world by default.
        root: the rank whose array is cut. Default 0.

    Returns:
        This rank's entry, of the shape of ``x`` without its first axis and the dtype of ``x``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.

    Shape:
        That of ``x`` without its first axis, whose length is ``size``.

    Dtypes:
        All.

    Differentiation:
        The transpose is :func:`gather`.

    Order:
        Program order.

    Source:
        MPI_Scatter (MPI standard, 6.6).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> int(pc.scatter(jnp.arange(pc.axis_size()))) == pc.world().rank
        True
    """
    comm = given_or_world("scatter", comm)
    rank = checks.rank("scatter", comm, "root", root)

    def scatter_leaf(leaf: Array) -> Array:
        if leaf.ndim == 0:
            errors.fail(
                ValueError,
                "scatter",
                comm,
                f"a leading axis of length {comm.size}",
                "a scalar",
                "Stack one entry for each rank.",
            )
        return exchanges.scatter(checks.one_entry_per_rank("scatter", comm, leaf, 0, "axis"), comm=comm, root=rank)

    return checks.call_for_leaves_of_root("scatter", comm, scatter_leaf, x)


def _prefix(where: str, function: Callable[..., Array], x: PyTree, comm: Any, op: str) -> PyTree:
    comm = given_or_world(where, comm)
    name = checks.op(where, comm, op)

    def reduce_leaf(leaf: Array) -> Array:
        return function(checks.reducible(where, comm, leaf, name), comm=comm, op=name)

    return checks.call_for_leaves(where, comm, reduce_leaf, x)


def scan(x: PyTree, comm: Communicator | None = None, *, op: str = "sum") -> PyTree:
    """Reduces over this rank and the ranks before it: ``y_r = op_{s <= r} x_s``.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        comm: a communicator, the world by default.
        op: the reduction: "sum", the default, "prod", "min", "max", or "and", "or", "xor" of integers and bools.

    Returns:
        The reduction up to this rank, of the shapes and dtypes of ``x``; sums and products of bool are int32.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.

    Shape:
        That of ``x``.

    Dtypes:
        As for :func:`reduce`.

    Differentiation:
        For "sum", the transpose is the scan over the ranks in opposite order. Other operations raise
        NotImplementedError.

    Order:
        Program order.

    Source:
        MPI_Scan (MPI standard, 6.11.1).

    Example:
        >>> import pycollective as pc
        >>> int(pc.scan(1)) == pc.world().rank + 1
        True
    """
    return _prefix("scan", reductions.scan, x, comm, op)


def exscan(x: PyTree, comm: Communicator | None = None, *, op: str = "sum") -> PyTree:
    """Reduces over the ranks before this one: ``y_r = op_{s < r} x_s``. Rank 0 gets zeros.

    Args:
        x: an array or a pytree of arrays, with the same shapes and dtypes on all ranks.
        comm: a communicator, the world by default.
        op: the reduction: "sum", the default, "prod", "min", "max", or "and", "or", "xor" of integers and bools.

    Returns:
        The reduction up to the rank before, of the shapes and dtypes of ``x``; sums and products of bool are int32.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.

    Shape:
        That of ``x``.

    Dtypes:
        As for :func:`reduce`.

    Differentiation:
        As for :func:`scan`.

    Order:
        Program order.

    Source:
        MPI_Exscan (MPI standard, 6.11.2).

    Example:
        >>> import pycollective as pc
        >>> int(pc.exscan(1)) == pc.world().rank
        True
    """
    return _prefix("exscan", reductions.exscan, x, comm, op)


def send(x: PyTree, comm: Communicator | None = None, *, dest: int | MessageConstant, tag: int = 0) -> None:
    """Sends the arrays to one rank, which must call :func:`recv` (or :func:`sendrecv`).

    Args:
        x: an array or a pytree of arrays.
        comm: a communicator, the world by default.
        dest: the rank that receives, or :data:`PROC_NULL`: then nothing is sent.
        tag: a number from 0 on that the receiver can ask for. Default 0.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NotImplementedError: while tracing, for a derivative with respect to ``x``. :func:`sendrecv` and
            :func:`ppermute` have derivatives.

    Dtypes:
        All.

    Differentiation:
        None: raises NotImplementedError.

    Order:
        Program order. The call may wait for the receiver.

    Source:
        MPI_Send (MPI standard, 3.2.1).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> if pc.world().size > 1 and pc.world().rank == 0: pc.send(jnp.arange(3), dest=1)
        >>> if pc.world().rank == 1: assert pc.recv(jnp.zeros(3, int), source=0).tolist() == [0, 1, 2]
    """
    comm = given_or_world("send", comm)
    params: dict[str, Any] = {
        "dest": checks.rank_or_constant("send", comm, "dest", dest, [PROC_NULL]),
        "tag": checks.tag("send", comm, "tag", tag),
    }
    arrays = checks.map_arrays("send", comm, lambda leaf: leaf, x)
    if dest is PROC_NULL:
        return
    checks.call_with_leaves(
        lambda leaf: messages.send(leaf, comm=comm, **params),
        arrays,
        without_leaves=lambda: messages.send_empty_tree(comm=comm, **params),
    )


def recv(
    like: PyTree,
    comm: Communicator | None = None,
    *,
    source: int | MessageConstant = ANY_SOURCE,
    tag: int | MessageConstant = ANY_TAG,
    status: MPI.Status | None = None,
) -> PyTree:
    """Receives arrays from one rank, which must call :func:`send` (or :func:`sendrecv`).

    Args:
        like: an array, a :class:`jax.ShapeDtypeStruct`, or a pytree of them: the shapes and dtypes of what arrives.
            Its values are read only with the source :data:`PROC_NULL`.
        comm: a communicator, the world by default.
        source: the rank that sends; :data:`ANY_SOURCE`, the default; or :data:`PROC_NULL`: then nothing is received.
        tag: the tag that the sender gave, or :data:`ANY_TAG`, the default.
        status: an mpi4py ``Status`` that tells the source and the tag when the result is there. In a tree the last leaf
            writes it. Default None.

    Returns:
        The arrays that arrived, of the shapes and dtypes of ``like``. With the source :data:`PROC_NULL` they are those
        of ``like``, as MPI leaves its buffer, and zeros for a :class:`jax.ShapeDtypeStruct`.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NotImplementedError: while tracing, for a derivative with respect to ``like``.
        jax.errors.JaxRuntimeError: at run time, when the message has another length.

    Shape:
        That of ``like``.

    Dtypes:
        All.

    Differentiation:
        None: raises NotImplementedError. With the source :data:`PROC_NULL`: that of ``like``.

    Order:
        Program order.

    Source:
        MPI_Recv (MPI standard, 3.2.4); MPI_PROC_NULL (3.11).

    Example:
        See :func:`send`.
    """
    comm = given_or_world("recv", comm)
    params: dict[str, Any] = {
        "source": checks.rank_or_constant("recv", comm, "source", source, [ANY_SOURCE, PROC_NULL]),
        "tag": checks.tag("recv", comm, "tag", tag, [ANY_TAG]),
        "status": checks.status("recv", comm, status),
    }
    like = jax.tree.map(lambda leaf: checks.template("recv", comm, leaf), like)
    if source is PROC_NULL:
        if status is not None:
            messages.recv_empty_tree(comm=comm, **params)  # MPI writes the status
        return jax.tree.map(checks.filled, like)
    return checks.call_with_leaves(
        lambda leaf: messages.recv(leaf, comm=comm, **params),
        like,
        without_leaves=lambda: messages.recv_empty_tree(comm=comm, **params),
    )


def sendrecv(
    x: PyTree,
    comm: Communicator | None = None,
    *,
    source: int | MessageConstant,
    dest: int | MessageConstant,
    like: PyTree | None = None,
    send_tag: int = 0,
    recv_tag: int | MessageConstant = 0,
    status: MPI.Status | None = None,
) -> PyTree:
    """Sends to one rank and receives from another at the same time, so ranks may do so in any pattern without deadlock.

    Args:
        x: an array or a pytree of arrays to send.
        comm: a communicator, the world by default.
        source: the rank to receive from, or :data:`PROC_NULL`: then nothing is received, and the result is zeros.
        dest: the rank to send to, or :data:`PROC_NULL`: then nothing is sent.
        like: arrays or :class:`jax.ShapeDtypeStruct` with the structure of ``x`` and the shapes and dtypes of what
            arrives. Its values are not read. Default: ``x``.
        send_tag: the tag of the message that is sent. Default 0.
        recv_tag: the tag of the message that is received, or :data:`ANY_TAG`. Default 0.
        status: as for :func:`recv`. Cotangents and tangents write none.

    Returns:
        The arrays that arrived, of the shapes and dtypes of ``like``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NotImplementedError: while tracing, for the transpose with ``recv_tag`` :data:`ANY_TAG`.
        jax.errors.JaxRuntimeError: at run time, when the message has another length.

    Shape:
        That of ``like``, by default of ``x``.

    Dtypes:
        All.

    Differentiation:
        The transpose is :func:`sendrecv` with ``source`` and ``dest`` swapped. What goes to :data:`PROC_NULL` has the
        derivative zero. A rank whose derivative does not depend on what it received sends no cotangent, and the other
        rank waits for it: add ``0 * jnp.sum(y)`` to its loss.

    Order:
        Program order.

    Source:
        MPI_Sendrecv (MPI standard, 3.10); MPI_PROC_NULL (3.11).

    Example:
        Each rank of an open chain receives from the rank before; rank 0 gets zeros:

        >>> import pycollective as pc
        >>> n, r = pc.axis_size(), pc.world().rank
        >>> before = r - 1 if r > 0 else pc.PROC_NULL
        >>> after = r + 1 if r < n - 1 else pc.PROC_NULL
        >>> int(pc.sendrecv(pc.axis_index() + 1, source=before, dest=after)) == r
        True
    """
    comm = given_or_world("sendrecv", comm)
    params: dict[str, Any] = {
        "source": checks.rank_or_constant("sendrecv", comm, "source", source, [PROC_NULL]),
        "dest": checks.rank_or_constant("sendrecv", comm, "dest", dest, [PROC_NULL]),
        "send_tag": checks.tag("sendrecv", comm, "send_tag", send_tag),
        "recv_tag": checks.tag("sendrecv", comm, "recv_tag", recv_tag, [ANY_TAG]),
        "status": checks.status("sendrecv", comm, status),
    }
    like = x if like is None else like
    if jax.tree.structure(x) != jax.tree.structure(like):
        errors.fail(
            ValueError,
            "sendrecv",
            comm,
            f"like of the structure of x, {jax.tree.structure(x)}",
            jax.tree.structure(like),
            "Send and receive the same number of arrays.",
        )

    def exchange_leaf(leaf: Any, template: Any) -> Array:
        template = checks.template("sendrecv", comm, template)
        return messages.sendrecv(checks.array("sendrecv", comm, leaf), template, comm=comm, **params)

    return checks.call_with_leaves(
        exchange_leaf, x, like, without_leaves=lambda: messages.sendrecv_empty_tree(comm=comm, **params)
    )


def barrier(comm: Communicator | None = None) -> None:
    """Waits until every rank has called it. Inside :func:`jax.jit` the compiled program waits, outside it Python.

    Args:
        comm: a communicator, the world by default.

    Raises:
        TypeError: while tracing, for what is no communicator.

    Differentiation:
        None: there is no operand.

    Order:
        Program order.

    Source:
        MPI_Barrier (MPI standard, 6.3).

    Example:
        >>> import pycollective as pc
        >>> pc.barrier()
    """
    messages.barrier(given_or_world("barrier", comm))
