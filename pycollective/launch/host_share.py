"""A rank's share of the cores and GPUs of its host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pycollective.launch.launchers.launcher import Place

T = TypeVar("T")


def share_of(things: Sequence[T], place: Place) -> Sequence[T]:
    """The rank's share of a host's cores or GPUs: the same number for each rank, or one that several ranks share.

    Example:
        >>> share_of(["0", "1", "2", "3", "4"], Place(rank=1, size=2))
        ['2', '3']
        >>> share_of(["0", "1"], Place(rank=2, size=3))
        ['0']
    """
    each = len(things) // place.size
    return things[place.rank * each : (place.rank + 1) * each] if each else [things[place.rank % len(things)]]


def physical_cores(cpus: set[int], sys_cpu: Path = Path("/sys/devices/system/cpu")) -> list[set[int]]:
    """Groups ``cpus``, which are hardware threads, by their core; in the order of their numbers."""
    cores: dict[str, set[int]] = {}
    for cpu in sorted(cpus):
        file = sys_cpu / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.setdefault(file.read_text() if file.exists() else str(cpu), set()).add(cpu)
    return list(cores.values())


def visible_gpus(environ: Mapping[str, str], dev: Path = Path("/dev")) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES lists; where it is not set, the NVIDIA devices of this host."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [gpu for gpu in listed.split(",") if gpu]
    return [str(i) for i in range(sum(file.name[6:].isdigit() for file in dev.glob("nvidia[0-9]*")))]
