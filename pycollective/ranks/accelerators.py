"""Which accelerators of a host a rank drives: each rank takes its share, and no accelerator has two ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import jax

from pycollective.errors import message
from pycollective.launch.host_share import share_of, visible_gpus
from pycollective.launch.launchers.launcher import Place
from pycollective.launch.started_by import launcher_gives_gpus
from pycollective.transport import runtime
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
