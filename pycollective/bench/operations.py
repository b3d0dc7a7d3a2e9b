"""The table of operations: how this package, raw MPI and NumPy do each of them, and the traffic that each needs.

The names and factors are those of nccl-tests (its PERFORMANCE.md). *Algorithm bandwidth* is bytes over time. *Bus
bandwidth* multiplies this with the share of the bytes that each participant must move, and so compares with what the
hardware gives. A participant is a rank, or one of its devices where it has several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

Array = np.ndarray[Any, Any]

OperandOf = Callable[[int], Array]
"""From a participant to its operand."""

Shape = Callable[[int, int], tuple[int, ...]]
"""From a number of elements, of the larger of operand and result, and the number of participants to a shape."""


def whole(count: int, _: int) -> tuple[int, ...]:
    """All elements."""
    return (count,)


def part(count: int, n: int) -> tuple[int, ...]:
    """A participant's part of them."""
    return (count // n,)


def blocks(count: int, n: int) -> tuple[int, ...]:
    """All elements, in a block for each participant."""
    return (n, count // n)


@dataclass(frozen=True)
class Operation:
    """A collective on one array.

    Attributes:
        call: the collective in JAX, from the module that has it (``jax.lax`` or ``pycollective``), an operand, and an
            axis name or a communicator.
        mpi: the same in MPI, from mpi4py's communicator to a function of two NumPy arrays, operand and result.
        expected: the same in NumPy, from all operands, a participant and the number of participants to its result.
        factor: bus bandwidth over algorithm bandwidth, from the number of participants.
        operand: the shape of an operand.
        result: the shape of a result.
        mpi_in_place: MPI's function writes the result over the operand.
        in_place: XLA may write the result over the operand.
        devices_share_the_link: between hosts, the devices of a host can send and receive one array for all of them.
    """

    call: Callable[[Any, Any, Any], Any]
    mpi: Callable[[Any], Callable[[Any, Any], Any]]
    expected: Callable[[OperandOf, int, int], Array]
    factor: Callable[[int], float]
    operand: Shape = whole
    result: Shape = whole
    mpi_in_place: bool = False
    in_place: bool = False
    devices_share_the_link: bool = True

    @property
    def keeps_shape(self) -> bool:
        """Whether an operand may be donated."""
        return self.operand is self.result

    @property
    def is_divided(self) -> bool:
        """Whether the participants divide the elements."""
        return (self.operand, self.result) != (whole, whole)


def is_narrow(dtype: Any) -> bool:
    """Whether ``dtype`` is a float of fewer than 32 bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32)


def _total(operands: Iterable[Array]) -> Array:
    """The sum; in float32 where the dtype is narrower."""
    return functools.reduce(np.add, (x.astype(np.float32) if is_narrow(x.dtype) else x for x in operands))


def _share(n: int) -> float:
    return (n - 1) / n


@functools.cache
def _ring(n: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % n) for i in range(n)]


def _sendrecv(comm: Any) -> Callable[[Any, Any], Any]:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return lambda x, y: comm.Sendrecv(x, right, recvbuf=y, source=left)


OPERATIONS = {
    "psum": Operation(
        call=lambda lib, x, axis: lib.psum(x, axis),
        mpi=lambda comm: comm.Allreduce,
        expected=lambda operand_of, _, n: _total(map(operand_of, range(n))),
        factor=lambda n: 2 * (n - 1) / n,
        in_place=True,
    ),
    "all_gather": Operation(
        call=lambda lib, x, axis: lib.all_gather(x, axis),
        mpi=lambda comm: comm.Allgather,
        expected=lambda operand_of, _, n: np.stack([operand_of(k) for k in range(n)]),
        factor=_share,
        operand=part,
        result=blocks,
    ),
    "psum_scatter": Operation(
        call=lambda lib, x, axis: lib.psum_scatter(x, axis),
        mpi=lambda comm: comm.Reduce_scatter_block,
        expected=lambda operand_of, i, n: _total(operand_of(k)[i] for k in range(n)),
        factor=_share,
        operand=blocks,
        result=part,
    ),
    "all_to_all": Operation(
        call=lambda lib, x, axis: lib.all_to_all(x, axis, 0, 0),
        mpi=lambda comm: comm.Alltoall,
        expected=lambda operand_of, i, n: np.stack([operand_of(k)[i] for k in range(n)]),
        factor=_share,
        operand=blocks,
        result=blocks,
        devices_share_the_link=False,
    ),
    "broadcast": Operation(
        call=lambda lib, x, axis: lib.pbroadcast(x, axis, 0),
        mpi=lambda comm: lambda x, _: comm.Bcast(x, 0),
        expected=lambda operand_of, *_: operand_of(0),
        factor=lambda _: 1.0,
        mpi_in_place=True,
        in_place=True,
    ),
    "ppermute": Operation(
        call=lambda lib, x, axis: lib.ppermute(x, axis, _ring(lib.axis_size(axis))),
        mpi=_sendrecv,
        expected=lambda operand_of, i, n: operand_of((i - 1) % n),
        factor=lambda _: 1.0,
    ),
}
