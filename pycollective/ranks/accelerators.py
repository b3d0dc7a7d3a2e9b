"""Which accelerators of a host a rank drives: each rank takes its share, and no accelerator has two ranks."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from pycollective.errors import message
from pycollective.launch.host_share import share_of, visible_gpus
from pycollective.launch.launchers.launcher import Place
from pycollective.launch.started_by import launcher_gives_gpus
from pycollective.transport import native, runtime
from pycollective.transport.mpi import MPI

_OPTION = "jax_cuda_visible_devices"
"""JAX's option for the GPUs that it takes, of those that CUDA shows; JAX reads it once, when its devices start. Unlike
CUDA_VISIBLE_DEVICES it works after MPI has started CUDA, and MPI can still reach the other GPUs of the host."""

LANES = 1 << 32
"""The first lane id of accelerators, larger than those of CPU devices. native/devices/buffers.h has the same number."""


def kind_of(device: jax.Device) -> str:
    """The platform of a device: "cpu", "cuda" or "rocm"; for other devices the name that JAX gives.

    Example:
        >>> import pycollective as pc
        >>> comm = pc.init()  # before JAX's devices are in use
        >>> kind_of(jax.devices("cpu")[0])
        'cpu'
    """
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def lane_id(device: jax.Device) -> int:
    """The number of a device for the handlers: XLA's for a CPU device, the runtime's plus :data:`LANES` for others."""
    if device.platform == "cpu":
        return int(device.id)
    return LANES + int(device.local_hardware_id)


def share(lists: Sequence[Sequence[str]], rank: int) -> list[int] | None:
    """The GPUs that a rank should take, as places in the list of the GPUs that it sees.

    Args:
        lists: the GPUs that each rank of the host sees.
        rank: the place of the rank among them.

    Returns:
        The places; None if the rank should take all that it sees: it is the only rank, it sees one GPU or none, or the
        launcher has given the ranks different GPUs.

    Example:
        >>> share([["0", "1", "2", "3"]] * 2, 1)
        [2, 3]
        >>> share([["0"], ["1"]], 1) is None
        True
    """
    own = lists[rank]
    if len(lists) == 1 or len(own) < 2 or any(list(other) != list(own) for other in lists):
        return None
    return list(share_of(range(len(own)), Place(rank, len(lists))))


def take_share(neighbours: MPI.Intracomm, environ: Mapping[str, str] = os.environ) -> None:
    """Lets JAX start only this rank's share of its host's GPUs. All ranks of the host must make this call.

    Nothing changes if JAX's devices have started, or if the user or the launcher has chosen GPUs.

    Args:
        neighbours: the ranks of the host, as ``mpi.host_of`` gives them.
        environ: the variables of this process.
    """
    chosen = jax.config.read(_OPTION) != "all" or launcher_gives_gpus(environ)
    lists = neighbours.allgather([] if chosen else visible_gpus(environ))
    own = share(lists, neighbours.rank)
    if own is not None:
        jax.config.update(_OPTION, ",".join(map(str, own)))


def check(mpi: MPI.Intracomm, devices: Sequence[jax.Device], *, may_share: bool) -> str:
    """Returns the kind of devices that all ranks have. All ranks of ``mpi`` must make this call.

    Raises:
        RuntimeError: on all ranks, if ranks have devices of different kinds, or if two ranks of a host drive one
            accelerator and ``may_share`` is False.
    """
    kind = " and ".join(sorted({kind_of(device) for device in devices}))
    known = runtime.KINDS.get(kind)
    own = [runtime.identity(known, int(device.local_hardware_id)) for device in devices] if known else []
    told = mpi.allgather((kind, own))

    def fail(expected: str, got: str, remedy: str) -> None:
        raise RuntimeError(message("init", expected, got, remedy, rank=mpi.rank, size=mpi.size))

    kinds = [kind for kind, _ in told]
    other = next((rank for rank, other in enumerate(kinds) if other != kinds[0] or " and " in other), None)
    if other is not None:
        fail(
            "devices of one kind on all ranks",
            f"{kinds[0]} on rank 0, {kinds[other]} on rank {other}",
            "Look at what JAX and pycollective doctor say on that rank, or set JAX_PLATFORMS alike on all ranks.",
        )
    if not may_share and (both := shared([identities for _, identities in told])) is not None:
        name, ranks = both
        fail(
            "an accelerator of its own for each rank",
            f"{kind} device {name[:8]} on ranks {', '.join(map(str, ranks))}",
            "Call pycollective.init before JAX's devices are in use, or start with pycollective run or with srun "
            "--gpus-per-task=1, and no more ranks than there are GPUs. PYCOLLECTIVE_ALLOW_SHARED_GPU=1 accepts this.",
        )
    return kind


_PROBES = (4, 1 << 16)
"""How many int32 the sums of :func:`fault_in_device_memory` have: MPI sends short and long arrays in different ways."""


def fault_in_device_memory(mpi: MPI.Intracomm, device: jax.Device) -> str | None:
    """Sums small arrays in the memory of a device of each rank. All ranks of ``mpi`` must make this call.

    A library that says that it takes such memory may lack what the sum needs at run time: a transport, a driver, an
    option. A rank first sums alone, so that a library that refuses the memory does so before other ranks wait.

    Returns:
        What went wrong on the lowest rank where something did, the same on all ranks; None if all sums are right.
    """
    for comm in (MPI.COMM_SELF, mpi):
        faults = [_fault_of_sum(comm, device, count) for count in _PROBES]  # all of them: the other ranks wait in each
        own = next(filter(None, faults), None)
        for rank, fault in enumerate(mpi.allgather(own)):
            if fault is not None:
                return f"{fault} on rank {rank}"
    return None


def _fault_of_sum(comm: MPI.Intracomm, device: jax.Device, count: int) -> str | None:
    """Sums ``count`` numbers in the memory of a device of each rank. Returns what went wrong; None if nothing did."""
    numbers = np.arange(count, dtype=np.int32)
    x, y = (jax.block_until_ready(jax.device_put(numbers + start, device)) for start in (comm.rank, -1))
    where = [MPI.buffer.fromaddress(each.unsafe_buffer_pointer(), each.nbytes) for each in (x, y)]
    try:
        comm.Allreduce([where[0], count, MPI.INT32_T], [where[1], count, MPI.INT32_T], op=MPI.SUM)
    except MPI.Exception as error:
        return f"the error {error}"
    right = numbers * comm.size + comm.size * (comm.size - 1) // 2
    return None if (np.asarray(y) == right).all() else f"wrong sums of {count} numbers"


def use_direct(mpi: MPI.Intracomm, kind: str, device: jax.Device, *, chosen: bool | None) -> bool:
    """Whether MPI gets pointers to the memory of accelerators. All ranks of ``mpi`` must make this call.

    Args:
        mpi: the ranks.
        kind: the kind of the accelerators, one of ``runtime.KINDS``.
        device: an accelerator of this rank.
        chosen: what the user has chosen; None: MPI is asked.

    Raises:
        RuntimeError: the user has chosen it on all ranks, and a sum in such memory is wrong.
    """
    wanted = bool(runtime.takes_device_memory(runtime.KINDS[kind])) if chosen is None else chosen
    if not mpi.allreduce(wanted, op=MPI.LAND):
        return False
    runtime.make_current(runtime.KINDS[kind], int(device.local_hardware_id or 0))
    fault = fault_in_device_memory(mpi, device)
    if fault is None:
        return True
    expected, got = f"an MPI library that sums arrays in the memory of {kind} devices", fault
    if mpi.allreduce(bool(chosen), op=MPI.LAND):
        remedy = "Unset PYCOLLECTIVE_GPU_DIRECT, and look at what pycollective doctor says of MPI."
        raise RuntimeError(message("init", expected, got, remedy, rank=mpi.rank, size=mpi.size))
    if mpi.rank == 0:
        remedy = "Arrays go through the host. PYCOLLECTIVE_GPU_DIRECT=off says so without this test."
        warnings.warn(message("init", f"{expected}, as it says", got, remedy), RuntimeWarning, stacklevel=4)
    return False


_TRIAL_BYTES = 256
"""The size of the array on which a device tries dispatch ahead."""


def use_ahead(
    mpi: MPI.Intracomm,
    kind: str,
    devices: Sequence[jax.Device],
    libraries: Sequence[ctypes.CDLL | None],
    *,
    direct: bool,
) -> None:
    """Lets collectives be dispatched ahead, if that works on all devices of all ranks. Else rank 0 warns.

    All ranks of ``mpi`` must make this call, before the buffers of the devices are made. An MPI library that reads the
    memory of devices copies on streams of its own. These may share a hardware queue with a stream that waits for the
    copy, and no trial finds all of them.

    Args:
        mpi: the ranks.
        kind: the kind of the devices.
        devices: those of this rank.
        libraries: the runtime and the driver of the devices.
        direct: whether MPI gets pointers to the memory of the devices.
    """
    if direct:
        own: str | None = "an MPI library that copies on streams of its own, unless PYCOLLECTIVE_GPU_DIRECT=off"
    elif (missing := native.bind_ahead(*libraries)) is not None:
        own = f"no {missing}"
    else:
        own = next(filter(None, map(_fault_in_ahead, devices)), None)
    faults = {rank: fault for rank, fault in enumerate(mpi.allgather(own)) if fault is not None}
    native.set_ahead(not faults)
    if faults and mpi.rank == 0:
        expected = f"{kind} devices that copy while other streams wait for a number (PYCOLLECTIVE_GPU_DISPATCH=ahead)"
        rank, fault = next(iter(faults.items()))
        remedy = "Programs wait for their collectives, as with PYCOLLECTIVE_GPU_DISPATCH=wait."
        warnings.warn(message("init", expected, f"{fault} on rank {rank}", remedy), RuntimeWarning, stacklevel=4)


def _fault_in_ahead(device: jax.Device) -> str | None:
    memory = jax.block_until_ready(jax.device_put(np.zeros(_TRIAL_BYTES, np.uint8), device))
    return native.fault_in_ahead(int(device.local_hardware_id or 0), memory.unsafe_buffer_pointer(), _TRIAL_BYTES)


def shared(identities: Sequence[Sequence[str | None]]) -> tuple[str, list[int]] | None:
    """A device that several ranks drive, and these ranks; None if there is none.

    Args:
        identities: for each rank the identities of its devices, as ``runtime.identity`` gives them.

    Example:
        >>> shared([["a"], ["b", "c"], ["b"]])
        ('b', [1, 2])
    """
    drivers: dict[str, list[int]] = {}
    for rank, own in enumerate(identities):
        for name in filter(None, own):
            drivers.setdefault(name, []).append(rank)
    return next(((name, ranks) for name, ranks in drivers.items() if len(ranks) > 1), None)
