"""Which of a host's accelerators a rank drives: its share of them, and no other rank's."""

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
"""Which of the GPUs that CUDA shows JAX takes; read once, when its devices start. Unlike CUDA_VISIBLE_DEVICES it works
after MPI has started CUDA, and leaves the other GPUs of the host in MPI's reach."""

LANES = 1 << 32
"""Where the numbers of accelerators' lanes begin, beyond those of CPU devices; as in native/place.h."""


def kind_of(device: jax.Device) -> str:
    """The platform of a device: "cpu", "cuda" or "rocm"; as JAX says it for others.

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
    """By which the handlers know a device: CPU devices by XLA's number, accelerators by their runtime's, apart."""
    if device.platform == "cpu":
        return int(device.id)
    return LANES + int(device.local_hardware_id)


def share(lists: Sequence[Sequence[str]], rank: int) -> list[int] | None:
    """The places, in the list of GPUs that the ranks of a host see, of those that one of them should take.

    Args:
        lists: what each of the host's ranks sees.
        rank: among them.

    Returns:
        Places in its list; None where nothing is to be done: there is one rank, or GPU, or the launcher has already
        given the ranks different ones.

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


def take_own(neighbours: MPI.Intracomm, environ: Mapping[str, str] = os.environ) -> None:
    """Lets JAX start this rank's share of its host's GPUs alone. All ranks of the host must make this call.

    Where devices have started, or the user or the launcher has chosen some, nothing changes.

    Args:
        neighbours: those ranks, as ``mpi.host_of`` gives them.
        environ: the variables of this process.
    """
    chosen = jax.config.read(_OPTION) != "all" or launcher_gives_gpus(environ)
    lists = neighbours.allgather([] if chosen else visible_gpus(environ))
    own = share(lists, neighbours.rank)
    if own is not None:
        jax.config.update(_OPTION, ",".join(map(str, own)))


def check(mpi: MPI.Intracomm, devices: Sequence[jax.Device], *, may_share: bool) -> str:
    """The kind of all ranks' devices. All ranks of ``mpi`` must make this call.

    Raises:
        RuntimeError: on all ranks, if their devices are of different kinds, or if two ranks of a host drive one
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
            "See what JAX says on that rank, pycollective doctor too; or set JAX_PLATFORMS alike on all.",
        )
    if not may_share and (both := shared([identities for _, identities in told])) is not None:
        name, ranks = both
        fail(
            "an accelerator of its own for each rank",
            f"{kind} device {name[:8]} on ranks {', '.join(map(str, ranks))}",
            "Call pycollective.init before JAX's devices are in use, or start with pycollective run or with srun "
            "--gpus-per-task=1; start no more ranks than there are. PYCOLLECTIVE_ALLOW_SHARED_GPU=1 accepts it.",
        )
    return kind


def shared(identities: Sequence[Sequence[str | None]]) -> tuple[str, list[int]] | None:
    """A device that several ranks drive, and those ranks; None if there is none.

    Args:
        identities: of each rank's devices, as ``runtime.identity`` gives them.

    Example:
        >>> shared([["a"], ["b", "c"], ["b"]])
        ('b', [1, 2])
    """
    drivers: dict[str, list[int]] = {}
    for rank, own in enumerate(identities):
        for name in filter(None, own):
            drivers.setdefault(name, []).append(rank)
    return next(((name, ranks) for name, ranks in drivers.items() if len(ranks) > 1), None)
