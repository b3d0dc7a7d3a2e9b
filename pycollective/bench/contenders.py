"""Who is measured in this process: this library, raw MPI, and mpi4jax where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np
from jax import lax

import pycollective as pc
from pycollective.bench.workloads import AXIS, OPERATIONS, Workload, operands, step
from pycollective.transport.mpi import MPI

try:
    import mpi4jax
except ImportError:
    mpi4jax = None


@dataclass(frozen=True)
class Program:
    """A work as a contender runs it.

    Attributes:
        put: from the NumPy operands of this process's participants, one list for each, to its own.
        run: one call on them, which returns when the results are there.
        get: from the results to a list of NumPy arrays for each participant of this process.
        feeds: the results are the operands of the next call.
        chains: in a loop, each call takes the results of the one before.
        participants: of this process: 1, or its local devices.
        tolerance: relative error that its rounding may make.
        checked: the results are those of the work.
    """

    put: Callable[[list[list[Any]]], Any]
    run: Callable[[Any], Any]
    get: Callable[[Any], list[list[Any]]]
    feeds: bool = False
    chains: bool = True
    participants: int = 1
    tolerance: float = 0.0
    checked: bool = True


class Contender(Protocol):
    """A way to do a work.

    Attributes:
        name: in the table.
    """

    name: str

    def program(self, work: Workload) -> Program | None:
        """None where this contender has no such work."""


def looped(function: Callable[..., Any], work: Workload) -> Callable[..., Any]:
    """``function`` as often in one program as ``work`` says."""
    if work.mode != "loop":
        return function
    return lambda *xs: lax.fori_loop(0, work.loop, lambda _, xs: tuple(function(*xs)), xs, unroll=work.unroll)


def ready(compiled: Callable[..., Any]) -> Callable[[Any], Any]:
    """``compiled``, of a tuple of arrays, as a function of their list that waits for the results."""

    def run(xs: Any) -> Any:
        ys = compiled(*xs)
        if len(ys) == 1:  # jax.block_until_ready takes another 0.7 us to look for the arrays
            ys[0].block_until_ready()
            return ys
        return jax.block_until_ready(ys)

    return run


class Pycollective:
    """This library, on one or more local devices of each rank; with ``wire_dtype`` sums alone."""

    def __init__(self, comm: pc.Communicator, devices: int, wire_dtype: str | None = None) -> None:
        self.name = "pycollective" if wire_dtype is None else f"pycollective, {wire_dtype}"
        self._comm = comm
        self._devices = devices
        self._wire_dtype = wire_dtype

    def program(self, work: Workload) -> Program | None:
        tolerance = 0.0 if self._wire_dtype is None else 2**-7  # two roundings of 8 bits
        if self._wire_dtype is not None and work.op not in ("psum", "tree"):
            return None
        if work.mode == "eager":
            return self._eager(work, tolerance) if self._devices == 1 and work.op in OPERATIONS else None
        function = looped(work.function() if self._wire_dtype is None else self._narrow, work)
        if self._devices > 1:
            devices = jax.local_devices()[: self._devices]
            mapped = pc.pmap(function, AXIS, donate_argnums=work.donate_argnums, devices=devices)
            sharding = jax.sharding.NamedSharding(
                jax.sharding.Mesh(np.array(devices), "d"), jax.sharding.PartitionSpec("d")
            )
            return Program(
                lambda rows: [jax.device_put(np.stack(leaves), sharding) for leaves in zip(*rows, strict=True)],
                ready(mapped),
                lambda ys: [[np.asarray(y)[i] for y in ys] for i in range(self._devices)],
                work.donated,
                participants=self._devices,
                tolerance=tolerance,
            )
        compiled = pc.jit(function, axis_name=AXIS, comm=self._comm, donate_argnums=work.donate_argnums)
        return Program(_put, ready(compiled), _get, work.donated, tolerance=tolerance)

    def _narrow(self, *xs: Any) -> tuple[Any, ...]:
        return tuple(pc.psum(xs, AXIS, wire_dtype=self._wire_dtype))

    def _eager(self, work: Workload, tolerance: float) -> Program:
        comm = self._comm
        ring = [(i, (i + 1) % comm.size) for i in range(comm.size)]
        calls: dict[str, Callable[[Any], Any]] = {
            "psum": lambda x: pc.psum(x, comm, wire_dtype=self._wire_dtype),
            "all_gather": lambda x: pc.all_gather(x, comm),
            "psum_scatter": lambda x: pc.psum_scatter(x, comm),
            "all_to_all": lambda x: pc.all_to_all(x, comm, 0, 0),
            "broadcast": lambda x: pc.broadcast(x, comm),
            "ppermute": lambda x: pc.ppermute(x, comm, ring),
        }
        call = calls[work.op]
        return Program(_put, lambda xs: [call(xs[0]).block_until_ready()], _get, tolerance=tolerance)


def _put(rows: list[list[Any]]) -> list[jax.Array]:
    return [jax.device_put(x, jax.local_devices()[0]) for x in rows[0]]


def _get(ys: Sequence[Any]) -> list[list[Any]]:
    return [[np.asarray(y) for y in ys]]


def _jitted(function: Callable[..., Any], work: Workload) -> Program:
    """``function`` under plain :func:`jax.jit`."""
    compiled = jax.jit(looped(function, work), donate_argnums=work.donate_argnums)
    return Program(_put, ready(compiled), _get, work.donated)


def _is_mpi(dtype: Any) -> bool:
    """Whether MPI has such numbers; float16 and bfloat16 it has not."""
    return dtype.kind in "iuc" or (dtype.kind == "f" and dtype.itemsize > 2)


class RawMpi:
    """mpi4py on NumPy arrays that exist already: what the library itself needs. Trees as one array."""

    name = "raw MPI"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def program(self, work: Workload) -> Program | None:
        comm = self._comm
        if work.op == "step" or not _is_mpi(work.dtype):
            return None
        flat = work.op == "tree"
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        calls: dict[str, Callable[[Any, Any], Any]] = {
            "psum": comm.Allreduce,
            "tree": comm.Allreduce,
            "all_gather": comm.Allgather,
            "psum_scatter": comm.Reduce_scatter_block,
            "all_to_all": comm.Alltoall,
            "broadcast": lambda x, _: comm.Bcast(x, 0),
            "ppermute": lambda x, y: comm.Sendrecv(x, right, recvbuf=y, source=left),
        }
        call = calls[work.op]

        def put(rows: list[list[Any]]) -> tuple[Any, Any]:
            x = np.concatenate(rows[0]) if flat else rows[0][0].copy()
            shape = {"all_gather": (comm.size, *x.shape), "psum_scatter": x.shape[1:]}.get(work.op, x.shape)
            return x, x if work.op == "broadcast" else np.zeros(shape, x.dtype)

        def run(pair: tuple[Any, Any]) -> tuple[Any, Any]:
            for _ in range(work.loop):
                call(*pair)
            return pair

        def get(pair: tuple[Any, Any]) -> list[list[Any]]:
            return [work.split(pair[1]) if flat else [pair[1]]]

        return Program(put, run, get, chains=False)


class Floor:
    """A jitted function that does nothing, then raw MPI: about what one call from JAX takes at least."""

    name = "dispatch, raw MPI"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._raw = RawMpi(comm)

    def program(self, work: Workload) -> Program | None:
        raw = self._raw.program(work)
        if work.mode != "jit" or raw is None:
            return None
        dispatch = ready(jax.jit(lambda *xs: tuple(x + 1 for x in xs), donate_argnums=work.donate_argnums))
        nothing = [jax.device_put(np.zeros(1, np.int32), jax.local_devices()[0]) for _ in work.sizes]

        def run(pair: Any) -> Any:
            nonlocal nothing
            results = dispatch(nothing)
            if work.donated:
                nothing = list(results)
            return raw.run(pair)

        return replace(raw, run=run)


class ThroughNumPy:
    """To a NumPy array, raw MPI, and back, one after the other: what a program on a GPU does without us."""

    name = "through NumPy"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def program(self, work: Workload) -> Program | None:
        raw = RawMpi(self._comm).program(work)
        # What a JAX array gives NumPy cannot be written, as a broadcast would.
        if work.mode != "jit" or work.op in ("tree", "broadcast") or raw is None:
            return None
        _, out = raw.put([operands(work, self._comm.rank, self._comm.size, zeros=True)])

        def run(xs: list[jax.Array]) -> list[jax.Array]:
            fresh = xs[0] + 0  # an array keeps what it once gave NumPy
            _, result = raw.run((np.asarray(fresh), out))
            return [jax.device_put(result, xs[0].sharding).block_until_ready()]

        return Program(_put, run, _get, chains=False)


class Copies:
    """To page-locked memory of the host and back, without MPI: what the copy engines of a GPU give."""

    name = "copies alone"

    def program(self, work: Workload) -> Program | None:
        if work.mode != "jit" or work.op not in ("psum", "ppermute", "broadcast"):
            return None
        device = jax.local_devices()[0]
        here = jax.sharding.SingleDeviceSharding(device)
        host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")

        def run(xs: list[jax.Array]) -> list[jax.Array]:
            return [jax.block_until_ready(jax.device_put(jax.device_put(xs[0], host), here))]

        return Program(_put, run, _get, checked=False)


class Mpi4jax:
    """mpi4jax in jax.jit, leaf by leaf: its newest interface has neither trees nor axes."""

    name = "mpi4jax"

    def __init__(self, comm: MPI.Intracomm) -> None:
        if mpi4jax is None:
            raise ImportError("mpi4jax is not installed")
        self._comm = comm

    def program(self, work: Workload) -> Program | None:
        comm = self._comm
        if work.mode == "eager" or work.op == "psum_scatter" or not _is_mpi(work.dtype):  # it has no reduce_scatter
            return None
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

        def total(x: Any) -> Any:
            return mpi4jax.allreduce(x, op=MPI.SUM, comm=comm)

        def mean(grads: list[Any]) -> list[Any]:
            return [total(g) / comm.size for g in grads]

        functions: dict[str, Callable[..., Any]] = {
            "psum": lambda x: (total(x),),
            "tree": lambda *xs: tuple(map(total, xs)),
            "step": lambda *xs: step(xs, mean),
            "all_gather": lambda x: (mpi4jax.allgather(x, comm=comm),),
            "all_to_all": lambda x: (mpi4jax.alltoall(x, comm=comm),),
            "broadcast": lambda x: (mpi4jax.bcast(x, 0, comm=comm),),
            "ppermute": lambda x: (mpi4jax.sendrecv(x, x, left, right, comm=comm),),
        }
        return _jitted(functions[work.op], work)


class NoCommunication:
    """The same training step on each participant alone: what is left for the others to lose."""

    name = "no communication"

    def program(self, work: Workload) -> Program | None:
        if work.op != "step":
            return None
        return _jitted(lambda *xs: step(xs, lambda g: g), work)
