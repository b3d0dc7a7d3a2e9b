"""The functions of mpi4jax, by its names and signatures: ``import pycollective.compat.mpi4jax as mpi4jax``.

The package mpi4jax need not be installed. The results are those of mpi4jax, and so are the derivatives that mpi4jax
has. Here all functions except ``send``, ``recv`` and ``barrier`` have derivatives: reductions for SUM, ``allreduce``
for MIN and MAX as well. All functions can be batched.

``y, token = allreduce(...)``, the form before mpi4jax 0.8, is an error, even if ``y`` has two rows.

The first call on an MPI communicator must be made by all its ranks (:class:`pycollective.Communicator`), and the first
call of all by all ranks of the world. So a program in which only some ranks exchange messages must begin with
``pycollective.init()``, and with ``pycollective.Communicator(comm)`` for each communicator of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pycollective as pc
from pycollective.compat.no_token import returns_no_token
from pycollective.errors import fail, integer, message
from pycollective.ranks import world as worlds
from pycollective.transport.mpi import MPI
from pycollective.transport.mpi4jax_operations import MPI_OPS

Array = jax.Array

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "bcast",
    "gather",
    "recv",
    "reduce",
    "scan",
    "scatter",
    "send",
    "sendrecv",
    "has_cuda_support",
    "has_sycl_support",
]


class _NotGiven:
    """The type of the default of ``token``."""

    def __repr__(self) -> str:
        return "<not given>"


_NOT_GIVEN = _NotGiven()

# Arguments -------------------------------------------------------------------------------------------------------


def _communicator(where: str, comm: Any, token: Any) -> pc.Communicator:
    """Returns the communicator of an mpi4py communicator, of a wrapper of one, or of all processes for None."""
    if token is not _NOT_GIVEN:
        remedy = "Leave it out: calls run in program order, as in mpi4jax 0.8 and later."
        raise RuntimeError(message(f"compat.{where}", "no token", repr(token), remedy))
    comm = getattr(comm, "wrapped", comm)
    if isinstance(comm, pc.Communicator):
        return comm
    if comm is not None and not isinstance(comm, MPI.Intracomm):
        raise TypeError(
            message(f"compat.{where}", "an mpi4py intracommunicator, or None", repr(comm), "Pass MPI.COMM_WORLD, say.")
        )
    if worlds.world_if_known() is None:
        worlds.init(warns=False)  # programs for mpi4jax may use jax.numpy before their first call
    return pc.Communicator(MPI.COMM_WORLD if comm is None else comm)


def _array(where: str, comm: pc.Communicator, name: str, x: Any) -> Array:
    if isinstance(x, jax.core.Tracer):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(
            message(
                f"compat.{where}",
                f"{name} to be an array or a number",
                type(x).__name__,
                "Call it for each leaf of a tree, or use pycollective's own functions.",
                rank=comm.rank,
                size=comm.size,
            )
        ) from None


def _integer(where: str, comm: pc.Communicator, name: str, value: Any) -> int:
    if isinstance(value, bool):
        fail(TypeError, f"compat.{where}", comm, f"{name} to be an integer", repr(value), "Pass a rank or a tag.")
    return integer(f"compat.{where}", comm, name, value)


def _is_differentiable(x: Array) -> bool:
    return isinstance(x, jax.core.Tracer) and bool(jnp.issubdtype(x.dtype, jnp.inexact))


# Reductions ------------------------------------------------------------------------------------------------------


def _truth(of: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda x, y: of(x != 0, y != 0).astype(x.dtype)


_FOLDS: tuple[tuple[MPI.Op, Callable[[Array, Array], Array]], ...] = (
    (MPI.LAND, _truth(jnp.logical_and)),
    (MPI.LOR, _truth(jnp.logical_or)),
    (MPI.LXOR, _truth(jnp.logical_xor)),
)
"""Operations that are computed on this rank, from the arrays of all ranks."""


def _reduction(
    where: str, comm: pc.Communicator, op: Any, by_name: Callable[[str], Array], by_fold: Callable[[Any], Array]
) -> Array:
    """Reduces by ``by_name`` for an operation of this package, else by ``by_fold`` with a function of two arrays."""
    op = getattr(op, "wrapped", op)
    if not isinstance(op, MPI.Op):
        fail(TypeError, f"compat.{where}", comm, "op to be an mpi4py.MPI.Op", repr(op), "Pass mpi4py.MPI.SUM, say.")
    for name, known in MPI_OPS.items():
        if op == known:
            return by_name(name)
    for known, fold in _FOLDS:
        if op == known:
            return by_fold(fold)
    known_ops = "SUM, PROD, MIN, MAX, LAND, LOR, LXOR, BAND, BOR or BXOR"
    remedy = "Use allgather, and reduce the result by jax.numpy."
    raise NotImplementedError(
        message(
            f"compat.{where}",
            f"op to be MPI.{known_ops}",
            "another operation",
            remedy,
            rank=comm.rank,
            size=comm.size,
        )
    )


def _fold(comm: pc.Communicator, x: Array, ranks: int, function: Any) -> Array:
    """Folds the arrays of the first ``ranks`` ranks."""
    return functools.reduce(function, pc.all_gather(x, comm)[:ranks])


def _sum(x: Array, comm: pc.Communicator) -> Array:
    """The sum over ranks, whose transpose is the identity, as in mpi4jax."""
    if not _is_differentiable(x):
        return pc.psum(x, comm)
    return jax.custom_derivatives.linear_call(lambda _, x: pc.psum(x, comm), lambda _, ct: ct, (), x)


@returns_no_token
def allreduce(x: Any, op: Any, *, comm: Any = None, token: Any = _NOT_GIVEN) -> Array:
    """Reduces over ranks: ``y_r = op_s x_s``.

    Args:
        x: an array or a number, with the same shape and dtype on all ranks.
        op: an mpi4py ``Op``: SUM, PROD, MIN, MAX, LAND, LOR, LXOR, BAND, BOR or BXOR.
        comm: an mpi4py communicator. Default None: all processes.
        token: not supported: leave it out.

    Returns:
        The reduction, of the shape and dtype of ``x``.

    Raises:
        TypeError: while tracing: an argument has a wrong type; or two names get the result, ``y, token = ...``.
        RuntimeError: while tracing: ``token`` is given.
        NotImplementedError: while tracing: ``op`` is another operation, or it has no derivative.

    Differentiation:
        For SUM, the transpose is the identity, as in mpi4jax; :func:`pycollective.psum` has another rule. For MIN and
        MAX, as for :func:`pycollective.pmin`.

    Order:
        Program order.

    Source:
        ``mpi4jax.allreduce``; MPI_Allreduce (MPI standard, 6.9.6).

    Example:
        >>> from mpi4py import MPI
        >>> import pycollective.compat.mpi4jax as mpi4jax
        >>> int(mpi4jax.allreduce(1, op=MPI.SUM)) == MPI.COMM_WORLD.size
        True
    """
    ranks = _communicator("allreduce", comm, token)
    x = _array("allreduce", ranks, "x", x)

    def by_name(name: str) -> Array:
        return _sum(x, ranks) if name == "sum" else pc.allreduce(x, ranks, op=name)

    return _reduction("allreduce", ranks, op, by_name, functools.partial(_fold, ranks, x, ranks.size))


@returns_no_token
def reduce(x: Any, op: Any, root: int, *, comm: Any = None, token: Any = _NOT_GIVEN) -> Array:
    """Reduces over ranks for the root: ``y_root = op_s x_s``. The other ranks get their own ``x``.

    Args:
        x: an array or a number, with the same shape and dtype on all ranks.
        op: as for :func:`allreduce`.
        root: the rank that gets the result.
        comm: an mpi4py communicator. Default None: all processes.
        token: not supported: leave it out.

    Returns:
        On the root the reduction, on the other ranks ``x``; of the shape and dtype of ``x``.

    Raises:
        TypeError: while tracing: an argument has a wrong type; or two names get the result, ``y, token = ...``.
        RuntimeError: while tracing: ``token`` is given.
        ValueError: while tracing: an argument has a wrong shape or value.
        NotImplementedError: while tracing: ``op`` is another operation than those of :func:`allreduce`.

    Differentiation:
        For SUM, that of the linear map over all ranks.

    Order:
        Program order.

    Source:
        ``mpi4jax.reduce``; MPI_Reduce (MPI standard, 6.9.1).

    Example:
        >>> from mpi4py import MPI
        >>> import pycollective.compat.mpi4jax as mpi4jax
        >>> world = MPI.COMM_WORLD
        >>> int(mpi4jax.reduce(1, MPI.SUM, 0)) == (world.size if world.rank == 0 else 1)
        True
    """
    ranks = _communicator("reduce", comm, token)
    x, root = _array("reduce", ranks, "x", x), _integer("reduce", ranks, "root", root)

    def by_name(name: str) -> Array:
        return pc.reduce(x, ranks, op=name, root=root)

    y = _reduction("reduce", ranks, op, by_name, functools.partial(_fold, ranks, x, ranks.size))
    return _at_root(ranks, root, y, x)


@returns_no_token
def scan(x: Any, op: Any, *, comm: Any = None, token: Any = _NOT_GIVEN) -> Array:
    """Reduces over this rank and the ranks before it: ``y_r = op_{s <= r} x_s``.

    Args:
        x: an array or a number, with the same shape and dtype on all ranks.
        op: as for :func:`allreduce`.
        comm: an mpi4py communicator. Default None: all processes.
        token: not supported: leave it out.

    Returns:
        The reduction up to this rank, of the shape and dtype of ``x``.

    Raises:
        TypeError: while tracing: an argument has a wrong type; or two names get the result, ``y, token = ...``.
        RuntimeError: while tracing: ``token`` is given.
        NotImplementedError: while tracing: ``op`` is another operation than those of :func:`allreduce`.

    Differentiation:
        For SUM, that of :func:`pycollective.scan`.

    Order:
        Program order.

    Source:
        ``mpi4jax.scan``; MPI_Scan (MPI standard, 6.11.1).

    Example:
        >>> from mpi4py import MPI
        >>> import pycollective.compat.mpi4jax as mpi4jax
        >>> int(mpi4jax.scan(1, MPI.SUM)) == MPI.COMM_WORLD.rank + 1
        True
    """
    ranks = _communicator("scan", comm, token)
    x = _array("scan", ranks, "x", x)

    def by_name(name: str) -> Array:
        return pc.scan(x, ranks, op=name)

    return _reduction("scan", ranks, op, by_name, functools.partial(_fold, ranks, x, ranks.rank + 1))


# From one rank, to one rank, among all ---------------------------------------------------------------------------


def _at_root(comm: pc.Communicator, root: int, result: Array, x: Array) -> Array:
    """Returns ``result`` on the root, and ``x`` on the other ranks.

    On the other ranks the barrier makes ``x`` depend on the collective that made ``result``. So either all ranks make
    the call of the transpose, or none does.
    """
    return result if comm.rank == root else lax.optimization_barrier((x, result))[0]


@returns_no_token
def bcast(x: Any, root: int, *, comm: Any = None, token: Any = _NOT_GIVEN) -> Array:
    """Copies the root's array to all ranks: ``y_r = x_root``.

    Args:
        x: an array or a number, of the same shape and dtype on all ranks. Only the root's values are read.
        root: the rank whose values all ranks get.
        comm: an mpi4py communicator. Default None: all processes.
        token: not supported: leave it out.

    Returns:
        The root's array, of the shape and dtype of ``x``.

    Raises:
        TypeError: while tracing: an argument has a wrong type; or two names get the result, ``y, token = ...``.
        RuntimeError: while tracing: ``token`` is given.
        ValueError: while tracing: an argument has a wrong shape or value.

    Differentiation:
        That of :func:`pycollective.broadcast`.

    Order:
        Program order.

    Source:
        ``mpi4jax.bcast``; MPI_Bcast (MPI standard, 6.4).

    Example:
        >>> from mpi4py import MPI
        >>> import pycollective.compat.mpi4jax as mpi4jax
        >>> int(mpi4jax.bcast(MPI.COMM_WORLD.rank, 0))
        0
    """
    ranks = _communicator("bcast", comm, token)
    return pc.broadcast(_array("bcast", ranks, "x", x), ranks, root=_integer("bcast", ranks, "root", root))


@returns_no_token
def gather(x: Any, root: int, *, comm: Any = None, token: Any = _NOT_GIVEN) -> Array:
    """Gathers the ranks' arrays on the root: ``y_root[s] = x_s``. The other ranks get their own ``x``.

    Args:
        x: an array or a number, with the same shape and dtype on all ranks.
        root: the rank that gets the result.
        comm: an mpi4py communicator. Default None: all processes.
        token: not supported: leave it out.

    Returns:
        On the root an array of shape ``(size, *x.shape)``, on the other ranks ``x``; of the dtype of ``x``.

    Raises:
        TypeError: while tracing: an argument has a wrong type; or two names get the result, ``y, token = ...``.
        RuntimeError: while tracing: ``token`` is given.
        ValueError: while tracing: an argument has a wrong shape or value.

    Differentiation:
        That of the linear map over all ranks.

    Order:
        Program order.

    Source:
        ``mpi4jax.gather``; MPI_Gather (MPI standard, 6.5).

    Example:
        >>> from mpi4py import MPI
        >>> import pycollective.compat.mpi4jax as mpi4jax
        >>> world = MPI.COMM_WORLD
        >>> mpi4jax.gather(1, 0).shape == ((world.size,) if world.rank == 0 else ())
        True
    """
    ranks = _communicator("gather", comm, token)
    x, root = _array("gather", ranks, "x", x), _integer("gather", ranks, "root", root)
    return _at_root(ranks, root, pc.gather(x, ranks, root=root), x)


@returns_no_token
def scatter(x: Any, root: int, *, comm: Any = None, token: Any = _NOT_GIVEN) -> Array:
    """Gives each rank its entry of the root's array: ``y_r = x_root[r]``.

    Args:
        x: on the root an array of shape ``(size, ...)``; on the other ranks an array of the shape and dtype of the
            result, whose values are not read.
        root: the rank whose array is cut.
        comm: an mpi4py communicator. Default None: all processes.
        token: not supported: leave it out.

    Returns:
        This rank's entry, of the shape of the root's ``x`` without its first axis and the dtype of ``x``.

    Raises:
        TypeError: while tracing: an argument has a wrong type; or two names get the result, ``y, token = ...``.
        RuntimeError: while tracing: ``token`` is given.
        ValueError: while tracing: an argument has a wrong shape or value.

    Differentiation:
        That of the linear map over all ranks.

    Order:
        Program order.

    Source:
        ``mpi4jax.scatter``; MPI_Scatter (MPI standard, 6.6).

    Example:
        >>> import jax.numpy as jnp
        >>> from mpi4py import MPI
        >>> import pycollective.compat.mpi4jax as mpi4jax
        >>> world = MPI.COMM_WORLD
        >>> x = jnp.arange(world.size) if world.rank == 0 else jnp.zeros((), int)
        >>> int(mpi4jax.scatter(x, 0)) == world.rank
        True
    """
    ranks = _communicator("scatter", comm, token)
    x, root = _array("scatter", ranks, "x", x), _integer("scatter", ranks, "root", root)
    if ranks.rank != root:
        x = jnp.broadcast_to(x, (ranks.size, *x.shape))  # depends on x: all ranks make the transpose's call
    elif x.ndim == 0 or x.shape[0] != ranks.size:
        expected = "Scatter input must have shape (nproc, ...), that is"
        fail(
            ValueError,
            "compat.scatter",
            ranks,
            f"{expected} {ranks.size} rows on the root",
            str(x.shape),
            "Stack them.",
        )
    return pc.scatter(x, ranks, root=root)


@returns_no_token
def allgather(x: Any, *, comm: Any = None, token: Any = _NOT_GIVEN) -> Array:
    """Gathers the ranks' arrays on all ranks: ``y[s] = x_s``.

    Args:
        x: an array or a number, with the same shape and dtype on all ranks.
        comm: an mpi4py communicator. Default None: all processes.
        token: not supported: leave it out.

    Returns:
        The arrays of all ranks, of shape ``(size, *x.shape)`` and the dtype of ``x``.

    Raises:
        TypeError: while tracing: an argument has a wrong type; or two names get the result, ``y, token = ...``.
        RuntimeError: while tracing: ``token`` is given.

    Differentiation:
        That of :func:`pycollective.all_gather`.

    Order:
        Program order.

    Source:
        ``mpi4jax.allgather``; MPI_Allgather (MPI standard, 6.7).

    Example:
        >>> from mpi4py import MPI
        >>> import pycollective.compat.mpi4jax as mpi4jax
        >>> world = MPI.COMM_WORLD
        >>> mpi4jax.allgather(world.rank).tolist() == list(range(world.size))
        True
    """
    ranks = _communicator("allgather", comm, token)
    return pc.all_gather(_array("allgather", ranks, "x", x), ranks)


@returns_no_token
def alltoall(x: Any, *, comm: Any = None, token: Any = _NOT_GIVEN) -> Array:
    """Exchanges rows among all ranks: ``y_r[s] = x_s[r]``.

    Args:
        x: an array of shape ``(size, ...)``, with the same shape and dtype on all ranks.
        comm: an mpi4py communicator. Default None: all processes.
        token: not supported: leave it out.

    Returns:
        The rows from all ranks, of the shape and dtype of ``x``.

    Raises:
        TypeError: while tracing: an argument has a wrong type; or two names get the result, ``y, token = ...``.
        RuntimeError: while tracing: ``token`` is given.
        ValueError: while tracing: an argument has a wrong shape or value.

    Differentiation:
        That of :func:`pycollective.all_to_all`.

    Order:
        Program order.

    Source:
        ``mpi4jax.alltoall``; MPI_Alltoall (MPI standard, 6.8).

    Example:
        >>> import jax.numpy as jnp
        >>> from mpi4py import MPI
        >>> import pycollective.compat.mpi4jax as mpi4jax
        >>> world = MPI.COMM_WORLD
        >>> mpi4jax.alltoall(jnp.full(world.size, world.rank)).tolist() == list(range(world.size))
        True
    """
    ranks = _communicator("alltoall", comm, token)
    x = _array("alltoall", ranks, "x", x)
    if x.ndim == 0 or x.shape[0] != ranks.size:
        expected = f"Alltoall input must have shape (nproc, ...), that is {ranks.size} rows"
        fail(ValueError, "compat.alltoall", ranks, expected, str(x.shape), "Stack one row for each rank.")
    return pc.all_to_all(x, ranks)


def barrier(*, comm: Any = None, token: Any = _NOT_GIVEN) -> None:
    """Waits until every rank has called it.

    Args:
        comm: an mpi4py communicator. Default None: all processes.
        token: not supported: leave it out.

    Raises:
        TypeError: while tracing: ``comm`` is no communicator.
        RuntimeError: while tracing: ``token`` is given.

    Differentiation:
        None: there is no operand.

    Order:
        Program order.

    Source:
        ``mpi4jax.barrier``; MPI_Barrier (MPI standard, 6.3).

    Example:
        >>> import pycollective.compat.mpi4jax as mpi4jax
        >>> mpi4jax.barrier()
    """
    pc.barrier(_communicator("barrier", comm, token))


# Messages --------------------------------------------------------------------------------------------------------


def send(x: Any, dest: int, *, tag: int = 0, comm: Any = None, token: Any = _NOT_GIVEN) -> None:
    """Sends an array to one rank, which must call :func:`recv` or :func:`sendrecv`.

    Args:
        x: an array or a number.
        dest: the rank that receives. ``MPI.PROC_NULL``: nothing is sent.
        tag: the tag of the message. Default 0.
        comm: an mpi4py communicator. Default None: all processes.
        token: not supported: leave it out.

    Raises:
        TypeError, ValueError: while tracing: an argument has a wrong type or value.
        RuntimeError: while tracing: ``token`` is given.
        NotImplementedError: while tracing: a derivative with respect to ``x``.

    Differentiation:
        None: raises NotImplementedError.

    Order:
        Program order. The call may wait for the receiver.

    Source:
        ``mpi4jax.send``; MPI_Send (MPI standard, 3.2.1).

    Example:
        >>> import jax.numpy as jnp
        >>> from mpi4py import MPI
        >>> import pycollective.compat.mpi4jax as mpi4jax
        >>> world = MPI.COMM_WORLD
        >>> if world.size > 1 and world.rank == 0: mpi4jax.send(jnp.arange(3), 1)
        >>> if world.rank == 1: assert mpi4jax.recv(jnp.zeros(3, int), 0).tolist() == [0, 1, 2]
    """
    ranks = _communicator("send", comm, token)
    x, dest = _array("send", ranks, "x", x), _integer("send", ranks, "dest", dest)
    if dest != MPI.PROC_NULL:
        pc.send(x, ranks, dest=dest, tag=_integer("send", ranks, "tag", tag))


@returns_no_token
def recv(
    x: Any,
    source: int = MPI.ANY_SOURCE,
    *,
    tag: int = MPI.ANY_TAG,
    comm: Any = None,
    status: Any = None,
    token: Any = _NOT_GIVEN,
) -> Array:
    """Receives an array from one rank, which must call :func:`send` or :func:`sendrecv`.

    Args:
        x: an array of the shape and dtype of what arrives. Its values are not read.
        source: the rank that sends. Default ``MPI.ANY_SOURCE``. ``MPI.PROC_NULL``: nothing is received, and the result
            is zeros.
        tag: the tag of the message. Default ``MPI.ANY_TAG``.
        comm: an mpi4py communicator. Default None: all processes.
        status: an mpi4py ``Status``, which is written when the message has arrived. Default None.
        token: not supported: leave it out.

    Returns:
        The array that arrived, of the shape and dtype of ``x``.

    Raises:
        TypeError: while tracing: an argument has a wrong type; or two names get the result, ``y, token = ...``.
        RuntimeError: while tracing: ``token`` is given.
        ValueError: while tracing: an argument has a wrong shape or value.
        NotImplementedError: while tracing: a derivative with respect to ``x``.

    Differentiation:
        None: raises NotImplementedError.

    Order:
        Program order.

    Source:
        ``mpi4jax.recv``; MPI_Recv (MPI standard, 3.2.4).

    Example:
        See :func:`send`.
    """
    ranks = _communicator("recv", comm, token)
    x, source, tag = (
        _array("recv", ranks, "x", x),
        _integer("recv", ranks, "source", source),
        _integer("recv", ranks, "tag", tag),
    )
    if source == MPI.PROC_NULL:
        return jnp.zeros_like(x)
    return pc.recv(
        x,
        ranks,
        source=pc.ANY_SOURCE if source == MPI.ANY_SOURCE else source,
        tag=pc.ANY_TAG if tag == MPI.ANY_TAG else tag,
        status=getattr(status, "wrapped", status),
    )


@returns_no_token
def sendrecv(
    sendbuf: Any,
    recvbuf: Any,
    source: int,
    dest: int,
    *,
    sendtag: int = 0,
    recvtag: int = MPI.ANY_TAG,
    comm: Any = None,
    status: Any = None,
    token: Any = _NOT_GIVEN,
) -> Array:
    """Sends to one rank and receives from another at the same time, without deadlock in any pattern of ranks.

    Args:
        sendbuf: an array or a number to send.
        recvbuf: an array of the shape and dtype of what arrives. Its values are not read.
        source: the rank to receive from. ``MPI.PROC_NULL``: nothing is received, and the result is zeros.
        dest: the rank to send to. ``MPI.PROC_NULL``: nothing is sent.
        sendtag: the tag of the message that is sent. Default 0.
        recvtag: the tag of the message that is received. Default ``MPI.ANY_TAG``.
        comm: an mpi4py communicator. Default None: all processes.
        status: an mpi4py ``Status``, which is written when the message has arrived. Default None.
        token: not supported: leave it out.

    Returns:
        The array that arrived, of the shape and dtype of ``recvbuf``.

    Raises:
        TypeError: while tracing: an argument has a wrong type; or two names get the result, ``y, token = ...``.
        RuntimeError: while tracing: ``token`` is given.
        ValueError: while tracing: an argument has a wrong shape or value.
        NotImplementedError: while tracing: ``source`` is ``MPI.ANY_SOURCE``.

    Differentiation:
        Both modes. The transpose has ``source`` and ``dest`` swapped and the same tags, as in mpi4jax.

    Order:
        Program order.

    Source:
        ``mpi4jax.sendrecv``; MPI_Sendrecv (MPI standard, 3.10).

    Example:
        >>> from mpi4py import MPI
        >>> import pycollective.compat.mpi4jax as mpi4jax
        >>> size, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
        >>> int(mpi4jax.sendrecv(rank, 0, source=(rank - 1) % size, dest=(rank + 1) % size)) == (rank - 1) % size
        True
    """
    ranks = _communicator("sendrecv", comm, token)
    x, like = _array("sendrecv", ranks, "sendbuf", sendbuf), _array("sendrecv", ranks, "recvbuf", recvbuf)
    source, dest = _integer("sendrecv", ranks, "source", source), _integer("sendrecv", ranks, "dest", dest)
    sendtag, recvtag = _integer("sendrecv", ranks, "sendtag", sendtag), _integer("sendrecv", ranks, "recvtag", recvtag)
    if source == MPI.ANY_SOURCE:
        remedy = "Name the source, or use send and recv."
        fail(NotImplementedError, "compat.sendrecv", ranks, "a source", "any source", remedy)

    def exchange(x: Array, like: Array, source: int, dest: int, status: Any = None) -> Array:
        return pc.sendrecv(
            x,
            ranks,
            source=pc.PROC_NULL if source == MPI.PROC_NULL else source,
            dest=pc.PROC_NULL if dest == MPI.PROC_NULL else dest,
            like=jax.ShapeDtypeStruct(like.shape, like.dtype),
            send_tag=sendtag,
            recv_tag=pc.ANY_TAG if recvtag == MPI.ANY_TAG else recvtag,
            status=status,
        )

    status = getattr(status, "wrapped", status)

    if not _is_differentiable(x) or not jnp.issubdtype(like.dtype, jnp.inexact):
        return exchange(x, like, source, dest, status)

    def forward(_: Any, sent: Array) -> Array:
        return exchange(sent, like, source, dest, status)

    def backward(_: Any, ct: Array) -> Array:
        return exchange(ct, x, dest, source)

    return jax.custom_derivatives.linear_call(forward, backward, (), x)


# Support ---------------------------------------------------------------------------------------------------------


def has_cuda_support() -> bool:
    """Returns True: every build of this package's compiled library supports arrays on CUDA devices.

    Example:
        >>> import pycollective.compat.mpi4jax as mpi4jax
        >>> mpi4jax.has_cuda_support()
        True
    """
    return True


def has_sycl_support() -> bool:
    """Returns False: this package has no handlers for SYCL devices.

    Example:
        >>> import pycollective.compat.mpi4jax as mpi4jax
        >>> mpi4jax.has_sycl_support()
        False
    """
    return False
