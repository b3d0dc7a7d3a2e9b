"""What ``pycollective bench`` measures: this package, raw MPI, JAX's own collectives, mpi4jax where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pycollective as pc
from pycollective.bench.operations import OPERATIONS, Operation
from pycollective.bench.workloads import AXIS, Workload, operands, step
from pycollective.transport.mpi import MPI

try:
    import mpi4jax
except ImportError:
    mpi4jax = None

_EACH_DEVICE = PartitionSpec(("group", AXIS))  # an element of the first dimension for each
_UNSUPPORTED_BY_XLA = ("broadcast",)  # its CPU collectives have none


@dataclass(frozen=True)
class Program:
    """A workload as an implementation runs it.

    Attributes:
        put: from the NumPy operands of this process's participants, a list for each, to the implementation's arrays.
        run: one call on these arrays, which returns when the results are there.
        get: from the results to a list of NumPy arrays for each participant of this process.
        feeds_back: whether the results are the operands of the next call.
        chained: whether in a loop each call takes the results of the call before, if those of the workload do.
        participants: the number of participants of this process: 1, or its local devices.
        tolerance: the relative error that rounding may make.
        checked: whether the results are those of the workload.
    """

    put: Callable[[list[list[Any]]], Any]
    run: Callable[[Any], Any]
    get: Callable[[Any], list[list[Any]]]
    feeds_back: bool = False
    chained: bool = True
    participants: int = 1
    tolerance: float = 0.0
    checked: bool = True


class Implementation(Protocol):
    """A way to run workloads.

    Attributes:
        name: its name in the table.
    """

    name: str

    def program(self, workload: Workload) -> Program | None:
        """The program for ``workload``; None where this implementation has none."""


def looped(function: Callable[..., Any], workload: Workload) -> Callable[..., Any]:
    """``function``, called in one program as often as ``workload`` says."""
    if workload.mode != "loop":
        return function
    if workload.is_chained:
        return lambda *xs: lax.fori_loop(
            0, workload.loop, lambda _, xs: tuple(function(*xs)), xs, unroll=workload.unroll
        )

    def repeat(*xs: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            xs, _ = lax.optimization_barrier(carry)  # or XLA's own collectives would leave the loop
            return xs, tuple(function(*xs))

        return lax.fori_loop(1, workload.loop, body, (xs, tuple(function(*xs))), unroll=workload.unroll)[1]

    return repeat


def ready(compiled: Callable[..., Any]) -> Callable[[Any], Any]:
    """Makes of ``compiled``, which takes several arrays, a function of their list that waits for the results."""

    def run(xs: Any) -> Any:
        ys = compiled(*xs)
        if len(ys) == 1:  # jax.block_until_ready would take 0.7 us more to look for the arrays
            ys[0].block_until_ready()
            return ys
        return jax.block_until_ready(ys)

    return run


class Pycollective:
    """This package, on one or more local devices of each rank; with ``wire_dtype`` only its sums."""

    def __init__(self, comm: pc.Communicator, devices: int, wire_dtype: str | None = None) -> None:
        self.name = "pycollective" if wire_dtype is None else f"pycollective, {wire_dtype}"
        self._comm = comm
        self._devices = devices
        self._wire_dtype = wire_dtype

    def program(self, workload: Workload) -> Program | None:
        tolerance = 0.0 if self._wire_dtype is None else 2**-7  # two roundings to 8 bits
        if self._wire_dtype is not None and workload.op not in ("psum", "tree"):
            return None
        if workload.mode == "eager":
            operation = workload.operation
            return self._eager(operation, tolerance) if self._devices == 1 and operation is not None else None
        function = looped(workload.function() if self._wire_dtype is None else self._narrow, workload)
        if self._devices > 1:
            devices = jax.local_devices()[: self._devices]
            mapped = pc.pmap(function, AXIS, donate_argnums=workload.donate_argnums, devices=devices)
            sharding = jax.sharding.NamedSharding(
                jax.sharding.Mesh(np.array(devices), "d"), jax.sharding.PartitionSpec("d")
            )
            return Program(
                lambda xs: [jax.device_put(np.stack(leaves), sharding) for leaves in zip(*xs, strict=True)],
                ready(mapped),
                lambda ys: [[np.asarray(y)[i] for y in ys] for i in range(self._devices)],
                workload.donated,
                participants=self._devices,
                tolerance=tolerance,
            )
        compiled = pc.jit(function, axis_name=AXIS, comm=self._comm, donate_argnums=workload.donate_argnums)
        return Program(_put, ready(compiled), _get, workload.donated, tolerance=tolerance)

    def _narrow(self, *xs: Any) -> tuple[Any, ...]:
        return tuple(pc.psum(xs, AXIS, wire_dtype=self._wire_dtype))

    def _eager(self, operation: Operation, tolerance: float) -> Program:
        comm = self._comm

        def run(xs: list[jax.Array]) -> list[jax.Array]:
            return [operation.call(pc, xs[0], comm).block_until_ready()]

        def run_narrow(xs: list[jax.Array]) -> list[jax.Array]:
            return [pc.psum(xs[0], comm, wire_dtype=self._wire_dtype).block_until_ready()]

        return Program(_put, run if self._wire_dtype is None else run_narrow, _get, tolerance=tolerance)


def _put(xs: list[list[Any]]) -> list[jax.Array]:
    return [jax.device_put(x, jax.local_devices()[0]) for x in xs[0]]


def _get(ys: Sequence[Any]) -> list[list[Any]]:
    return [[np.asarray(y) for y in ys]]


def _jitted(function: Callable[..., Any], workload: Workload) -> Program:
    """``function`` under plain :func:`jax.jit`."""
    compiled = jax.jit(looped(function, workload), donate_argnums=workload.donate_argnums)
    return Program(_put, ready(compiled), _get, workload.donated)


def _is_mpi(dtype: Any) -> bool:
    """Whether MPI has this dtype. It has neither float16 nor bfloat16."""
    return dtype.kind in "iuc" or (dtype.kind == "f" and dtype.itemsize > 2)


class RawMpi:
    """mpi4py on NumPy arrays that exist already: what MPI itself needs. A tree is one array."""

    name = "raw MPI"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def program(self, workload: Workload) -> Program | None:
        comm, is_tree = self._comm, workload.op == "tree"
        operation = OPERATIONS["psum"] if is_tree else workload.operation
        if operation is None or not _is_mpi(workload.dtype):
            return None
        call = operation.mpi(comm)

        def put(xs: list[list[Any]]) -> tuple[Any, Any]:
            x = np.concatenate(xs[0]) if is_tree else xs[0][0].copy()
            return x, x if operation.mpi_in_place else np.zeros(operation.result(workload.count, comm.size), x.dtype)

        def run(pair: tuple[Any, Any]) -> tuple[Any, Any]:
            for _ in range(workload.loop):
                call(*pair)
            return pair

        def get(pair: tuple[Any, Any]) -> list[list[Any]]:
            return [workload.split(pair[1]) if is_tree else [pair[1]]]

        return Program(put, run, get, chained=False)


class Floor:
    """A jitted function that does nothing, then raw MPI: about the least time of one call from JAX."""

    name = "dispatch, raw MPI"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._raw = RawMpi(comm)

    def program(self, workload: Workload) -> Program | None:
        raw = self._raw.program(workload)
        if workload.mode != "jit" or raw is None:
            return None
        dispatch = ready(jax.jit(lambda *xs: tuple(x + 1 for x in xs), donate_argnums=workload.donate_argnums))
        small = [jax.device_put(np.zeros(1, np.int32), jax.local_devices()[0]) for _ in workload.sizes]

        def run(pair: Any) -> Any:
            nonlocal small
            results = dispatch(small)
            if workload.donated:
                small = list(results)
            return raw.run(pair)

        return replace(raw, run=run)


class ThroughNumPy:
    """A copy to a NumPy array, raw MPI, and a copy back, one after the other: a GPU program without this package."""

    name = "through NumPy"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def program(self, workload: Workload) -> Program | None:
        raw, operation = RawMpi(self._comm).program(workload), workload.operation
        # The NumPy array of a JAX array is read-only, so MPI cannot write into it.
        if workload.mode != "jit" or raw is None or operation is None or operation.mpi_in_place:
            return None
        _, out = raw.put([operands(workload, self._comm.rank, self._comm.size, zeros=True)])

        def run(xs: list[jax.Array]) -> list[jax.Array]:
            fresh = xs[0] + 0  # an array keeps its NumPy array, and would give it again without a copy
            _, result = raw.run((np.asarray(fresh), out))
            return [jax.device_put(result, xs[0].sharding).block_until_ready()]

        return Program(_put, run, _get, chained=False)


class Copies:
    """Copies to page-locked memory of the host and back, without MPI: what a GPU's copy engines give."""

    name = "copies alone"

    def program(self, workload: Workload) -> Program | None:
        operation = workload.operation
        if workload.mode != "jit" or operation is None or operation.is_divided:
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

    def program(self, workload: Workload) -> Program | None:
        comm = self._comm
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
        if workload.mode == "eager" or workload.op not in functions or not _is_mpi(workload.dtype):
            return None
        return _jitted(functions[workload.op], workload)


class NoCommunication:
    """The same training step on each participant alone: the time that communication can only add to."""

    name = "no communication"

    def program(self, workload: Workload) -> Program | None:
        if workload.op != "step":
            return None
        return _jitted(lambda *xs: step(xs, lambda g: g), workload)


class GlobalArrays:
    """JAX's own collectives between processes: the workload's function under :func:`jax.shard_map`, over all devices.

    Args:
        name: its name in the table: jax, and what carries XLA's collectives.
        groups: the devices, a row for each group that makes the collectives by itself; default all in one group.
    """

    def __init__(self, name: str, groups: Any = None) -> None:
        self.name = name
        if groups is None:
            groups = np.array([sorted(jax.devices(), key=lambda device: (device.process_index, device.id))])
        self._mesh = Mesh(groups, ("group", AXIS))
        self._sharding = NamedSharding(self._mesh, _EACH_DEVICE)
        self._one = jax.make_array_from_process_local_data(
            self._sharding, np.zeros(jax.local_device_count(), np.float32)
        )
        self._meet = jax.jit(self._mapped(lambda x: lax.psum(x, ("group", AXIS))))

    def _mapped(self, function: Any) -> Any:
        specs = {"in_specs": _EACH_DEVICE, "out_specs": _EACH_DEVICE}
        return jax.shard_map(function, mesh=self._mesh, **specs, check_vma=False)

    def barrier(self) -> None:
        """Waits for the other processes."""
        self._meet(self._one).block_until_ready()

    def program(self, workload: Workload) -> Program | None:
        if workload.mode == "eager" or workload.op in _UNSUPPORTED_BY_XLA:
            return None
        function = looped(workload.function(), workload)

        def local(*blocks: Any) -> Any:
            return tuple(y[None] for y in function(*(x[0] for x in blocks)))

        compiled = jax.jit(self._mapped(local), donate_argnums=workload.donate_argnums)

        def put(xs: list[list[Any]]) -> list[jax.Array]:
            return [
                jax.make_array_from_process_local_data(self._sharding, np.stack(leaves))
                for leaves in zip(*xs, strict=True)
            ]

        def get(ys: Any) -> list[list[Any]]:
            shards = [sorted(y.addressable_shards, key=lambda shard: shard.device.id) for y in ys]
            return [[np.asarray(shard.data)[0] for shard in row] for row in zip(*shards, strict=True)]

        return Program(
            put,
            ready(compiled),
            get,
            workload.donated,
            participants=len(self._mesh.local_devices),
        )
