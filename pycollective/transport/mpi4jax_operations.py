"""The operations of programs as functions of mpi4jax.

What mpi4jax lacks is made of its other functions: ``reduce_scatter``, ``exscan``, ``ppermute``, and all operations of a
part of the ranks, which has no communicator of mpi4py's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pycollective.transport import native
from pycollective.transport.gathered_rows import with_slices
from pycollective.transport.mpi import MPI
from pycollective.transport.protocol import Structs

Array = jax.Array

_TAG = 0
"""Of the messages on a communicator's second duplicate, on which no receive of a program can match them."""


class Ranks(NamedTuple):
    """The ranks of a communicator, or of a part of one.

    Attributes:
        main: the duplicate for collectives and the program's own messages.
        auxiliary: the duplicate for the messages of this file.
        rank: the place of this rank among them.
        members: their ranks in the communicator.
        all_in_order: whether these are all its ranks, in its order.
    """

    main: MPI.Intracomm
    auxiliary: MPI.Intracomm
    rank: int
    members: tuple[int, ...]
    all_in_order: bool


MPI_OPS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "and": MPI.BAND,
    "or": MPI.BOR,
    "xor": MPI.BXOR,
}
_FUNCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": lax.add,
    "prod": lax.mul,
    "min": lax.min,
    "max": lax.max,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
}


class _Operations:
    """The operations over some ranks, made of ``allgather``, ``alltoall`` and mpi4jax's messages.

    Each is a function from the operands of our primitive to a list of its results.

    Args:
        mpi4jax: the module.
        ranks: the ranks.
        results: the results of the operation.
    """

    def __init__(self, mpi4jax: ModuleType, ranks: Ranks, results: Structs) -> None:
        self._mpi4jax, self._ranks, self._results = mpi4jax, ranks, results
        self._rank, self._size = ranks.rank, len(ranks.members)

    def allgather(self, x: Array) -> list[Array]:
        raise NotImplementedError

    def alltoall(self, x: Array) -> list[Array]:
        raise NotImplementedError

    def allreduce(self, *xs: Array, op: int) -> list[Array]:
        return [_reduced(op, self._blocks(x)) for x in xs]

    def reduce(self, x: Array, *, op: int, root: int) -> list[Array]:
        y = self.allreduce(x, op=op)
        return y if self._rank == root else self._zeros()

    def reduce_scatter(self, x: Array, *, op: int) -> list[Array]:
        return [_reduced(op, list(self.alltoall(x)[0]))]

    def scan(self, x: Array, *, op: int) -> list[Array]:
        return [_reduced(op, self._blocks(x)[: self._rank + 1])]

    def exscan(self, x: Array, *, op: int) -> list[Array]:
        blocks = self._blocks(x)[: self._rank]
        return [_reduced(op, blocks)] if blocks else self._zeros()

    def bcast(self, x: Array, *, root: int) -> list[Array]:
        return [self._blocks(x)[root]]

    def gather(self, x: Array, *, root: int) -> list[Array]:
        blocks = self.allgather(x)
        return blocks if self._rank == root else self._zeros()

    def scatter(self, x: Array, *, root: int) -> list[Array]:
        return [self.alltoall(x)[0][root]]

    def ragged_alltoall(self, output: Array, x: Array, slices: Array, *, adds: int) -> list[Array]:
        each = slices.shape[1] // self._size
        to_this_rank = slice(self._rank * each, (self._rank + 1) * each)
        starts, sizes, targets, _ = jnp.moveaxis(self.allgather(slices)[0][:, :, to_this_rank], 1, 0)
        return [with_slices(output, self._blocks(x), starts, sizes, targets, adds=bool(adds))]

    def barrier(self) -> list[Array]:
        self.allgather(jnp.zeros(1, jnp.uint8))
        return []

    def ppermute(self, x: Array, *, dest: Sequence[int], source: Sequence[int]) -> list[Array]:
        (to,), (from_,) = dest, source  # one device of each rank
        y = self._exchange(x, to, from_)
        return self._zeros() if y is None else [y]

    def _blocks(self, x: Array) -> list[Array]:
        return list(self.allgather(x)[0])

    def _zeros(self) -> list[Array]:
        return [jnp.zeros(struct.shape, struct.dtype) for struct in self._results]

    def _exchange(self, x: Array, to: int, from_: int) -> Array | None:
        """Sends ``x`` to one of the ranks, and returns what another one sends; -1: to none, from none."""
        if to == from_ == self._rank:
            return x
        sent = _as_moved(x)
        comm = self._ranks.auxiliary
        dest, source = (self._ranks.members[rank] if rank >= 0 else rank for rank in (to, from_))
        if to >= 0 and from_ >= 0:
            got = self._mpi4jax.sendrecv(sent, sent, source, dest, sendtag=_TAG, recvtag=_TAG, comm=comm)
        elif from_ >= 0:
            got = self._mpi4jax.recv(sent, source, tag=_TAG, comm=comm)
        else:
            if to >= 0:
                self._mpi4jax.send(sent, dest, tag=_TAG, comm=comm)
            return None
        return _as_dtype(got, x.dtype)


class OfSome(_Operations):
    """The operations over a part of the ranks, which has no communicator: they are made of messages."""

    def allgather(self, x: Array) -> list[Array]:
        return self._of_all([x] * self._size)

    def alltoall(self, x: Array) -> list[Array]:
        return self._of_all(list(x))

    def _of_all(self, blocks: list[Array]) -> list[Array]:
        """Sends block s to rank s, and returns the blocks that arrive in the order of their ranks.

        In step k a rank sends to the k-th rank behind it, while the k-th rank before it sends to this one.
        """
        got = [blocks[self._rank]] * self._size
        for step in range(1, self._size):
            to, from_ = (self._rank + step) % self._size, (self._rank - step) % self._size
            y = self._exchange(blocks[to], to, from_)
            assert y is not None
            got[from_] = y
        return [jnp.stack(got)]


class OfAll(_Operations):
    """The operations over all ranks of a communicator, with mpi4jax's own functions where it has them."""

    def allgather(self, x: Array) -> list[Array]:
        return [_as_dtype(self._mpi4jax.allgather(_as_moved(x), comm=self._ranks.main), x.dtype)]

    def alltoall(self, x: Array) -> list[Array]:
        return [_as_dtype(self._mpi4jax.alltoall(_as_moved(x), comm=self._ranks.main), x.dtype)]

    def allreduce(self, *xs: Array, op: int) -> list[Array]:
        return [self._in_mpi(self._mpi4jax.allreduce, x, op) for x in xs]

    def reduce(self, x: Array, *, op: int, root: int) -> list[Array]:
        y = self._in_mpi(self._mpi4jax.reduce, x, op, root=root)
        return [y] if self._rank == root else self._zeros()

    def scan(self, x: Array, *, op: int) -> list[Array]:
        return [self._in_mpi(self._mpi4jax.scan, x, op)]

    def bcast(self, x: Array, *, root: int) -> list[Array]:
        return [_as_dtype(self._mpi4jax.bcast(_as_moved(x), root, comm=self._ranks.main), x.dtype)]

    def gather(self, x: Array, *, root: int) -> list[Array]:
        y = self._mpi4jax.gather(_as_moved(x), root, comm=self._ranks.main)
        return [_as_dtype(y, x.dtype)] if self._rank == root else self._zeros()

    def scatter(self, x: Array, *, root: int) -> list[Array]:
        sent = _as_moved(x)
        block = self._mpi4jax.scatter(sent if self._rank == root else sent[0], root, comm=self._ranks.main)
        return [_as_dtype(block, x.dtype)]

    def barrier(self) -> list[Array]:
        self._mpi4jax.barrier(comm=self._ranks.main)
        return []

    def send(self, x: Array, *, dest: int, tag: int) -> list[Array]:
        self._mpi4jax.send(_as_moved(x), dest, tag=tag, comm=self._ranks.main)
        return []

    def recv(self, _: Array, *, source: int, tag: int, status: MPI.Status) -> list[Array]:
        (like,) = self._zeros()
        y = self._mpi4jax.recv(_as_moved(like), source, tag=tag, comm=self._ranks.main, status=status)
        return [like if source == MPI.PROC_NULL else _as_dtype(y, like.dtype)]

    def sendrecv(
        self, x: Array, *, source: int, dest: int, send_tag: int, recv_tag: int, status: MPI.Status
    ) -> list[Array]:
        (like,) = self._zeros()
        y = self._mpi4jax.sendrecv(
            _as_moved(x),
            _as_moved(like),
            source,
            dest,
            sendtag=send_tag,
            recvtag=recv_tag,
            comm=self._ranks.main,
            status=status,
        )
        return [like if source == MPI.PROC_NULL else _as_dtype(y, like.dtype)]

    def _in_mpi(self, function: Callable[..., Array], x: Array, op: int, **options: Any) -> Array:
        """A reduction by one of mpi4jax's functions, in numbers with which MPI computes as XLA does."""
        name = native.op_names()[op]
        there, back = _for_mpi(x.dtype, name)
        return back(function(there(x), op=MPI_OPS[name], comm=self._ranks.main, **options))


def _attributes_of(method: Callable[..., list[Array]]) -> tuple[str, ...]:
    parameters = inspect.signature(method).parameters.values()
    return tuple(one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name != "status")


ATTRIBUTES = {
    name: _attributes_of(method)
    for name, method in {**vars(_Operations), **vars(OfAll)}.items()
    if not name.startswith("_")
}
"""The attributes of each operation that say what it does: the parameters of its method."""


def _reduced(op: int, blocks: Sequence[Array]) -> Array:
    return functools.reduce(_FUNCTIONS[native.op_names()[op]], blocks)


# Dtypes -----------------------------------------------------------------------------------------------------

_KNOWN = frozenset(
    [
        "bool",
        *("float32", "float64", "complex64", "complex128"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    ]
)
"""The dtypes that mpi4jax knows."""


def _as_moved(x: Array) -> Array:
    """``x`` in a dtype that mpi4jax knows, bit by bit."""
    return x if str(x.dtype) in _KNOWN else lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _as_dtype(y: Array, dtype: Any) -> Array:
    """The inverse of :func:`_as_moved`."""
    return y if y.dtype == dtype else lax.bitcast_convert_type(y, dtype)


def _for_mpi(dtype: Any, name: str) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """The functions that make an array into one that MPI reduces as XLA does, and the result into one of ``dtype``."""
    if dtype == jnp.bool_:
        return lambda x: x.astype(jnp.uint8), lambda y: y.astype(dtype)
    if name in ("min", "max") and jnp.issubdtype(dtype, jnp.floating):
        return lambda x: _in_order(x, name), lambda y: _out_of_order(y, dtype)
    if name == "sum" and jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4:  # Open MPI's stop at the limits
        return lambda x: x.astype(jnp.int32), lambda y: y.astype(dtype)
    return lambda x: x, lambda y: y


def _in_order(x: Array, name: str) -> Array:
    """Floats as integers of the same order. MPI's minimum and maximum of a NaN are anything; here NaN wins, as in XLA.

    A float's bits, read as an integer, are in order where the sign bit is not set; where it is, the other bits count
    downwards. The bits of the largest and of the smallest integer are those of a NaN.
    """
    integers = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    limits = jnp.iinfo(integers)
    bits = lax.bitcast_convert_type(x, integers)
    ordered = jnp.where(bits < 0, bits ^ limits.max, bits)
    return jnp.where(jnp.isnan(x), jnp.asarray(limits.max if name == "max" else limits.min, integers), ordered)


def _out_of_order(y: Array, dtype: Any) -> Array:
    """The inverse of :func:`_in_order`."""
    bits = jnp.where(y < 0, y ^ jnp.iinfo(y.dtype).max, y)
    return lax.bitcast_convert_type(bits, dtype)
