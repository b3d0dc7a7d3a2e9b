"""What a launcher's variables say of this process, to be compared with what MPI says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar

from pycollective.errors import message

T = TypeVar("T")


class Launcher(NamedTuple):
    """A launcher that starts several processes and tells each of them how many.

    Attributes:
        name: how people call it.
        size_variable: holds the number of processes it started for this program.
        remedy: what to do when MPI does not see the others.
    """

    name: str
    size_variable: str
    remedy: str


# SLURM_NTASKS would be wrong here: inside sbatch it is set for a program that srun did not start.
LAUNCHERS = (
    Launcher(
        "srun",
        "SLURM_STEP_NUM_TASKS",
        "Launch with 'srun --mpi=pmi2' (MPICH, Intel MPI) or 'srun --mpi=pmix' (Open MPI), or with mpiexec inside "
        "the allocation.",
    ),
    Launcher(
        "an Open MPI mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "mpi4py has loaded another MPI library: use that library's mpiexec, or install the MPI of this mpirun.",
    ),
    Launcher(
        "an MPICH or Intel MPI mpiexec",
        "PMI_SIZE",
        "mpi4py has loaded another MPI library: use that library's mpiexec, or install the MPI of this mpiexec.",
    ),
    Launcher("flux run", "FLUX_JOB_SIZE", "Launch with 'flux run -o mpi=...' as your MPI library needs it."),
)


def launched_size(environ: Mapping[str, str]) -> tuple[Launcher, int] | None:
    """The launcher that started more than one process for this program, and how many.

    Example:
        >>> launched_size({"PMI_SIZE": "4"})[1]
        4
        >>> launched_size({"SLURM_NTASKS": "4"}) is None
        True
    """
    for launcher in LAUNCHERS:
        text = environ.get(launcher.size_variable, "")
        if text.isdigit() and int(text) > 1:
            return launcher, int(text)
    return None


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as a rank, be it the only one.

    The only task of a ``srun`` is none: most often it is a shell in an allocation.

    Example:
        >>> is_rank({"PMI_SIZE": "1"}), is_rank({"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1"})
        (True, False)
    """
    if launched_size(environ) is not None:
        return True
    if "SLURM_STEP_NUM_TASKS" in environ and not any(size in environ for _, size in _PLACES):
        return False
    return any(launcher.size_variable in environ for launcher in LAUNCHERS)


class Place(NamedTuple):
    """Of a rank among those of its host.

    Attributes:
        rank: from 0.
        size: their number.
    """

    rank: int
    size: int


# Under an mpiexec inside sbatch srun's own variables speak of mpiexec's proxies, so they come last.
_PLACES = (("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"), ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def local_place(environ: Mapping[str, str]) -> Place | None:
    """This rank's place on its host; None under a launcher that does not say it.

    Example:
        >>> local_place({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"})
        Place(rank=1, size=4)
        >>> local_place({"SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"})
        Place(rank=0, size=3)
    """
    for rank, size in _PLACES:
        if environ.get(rank, "").isdigit() and environ.get(size, "").isdigit():
            return Place(int(environ[rank]), int(environ[size]))
    if all(name in environ for name in ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")):
        tasks = _numbers(environ["SLURM_STEP_TASKS_PER_NODE"])
        return Place(int(environ["SLURM_LOCALID"]), tasks[int(environ["SLURM_NODEID"])])
    return None


def own_part(things: Sequence[T], place: Place) -> Sequence[T]:
    """The part of a host's cores or GPUs for one of its ranks: as many for each; one, shared, where ranks are more.

    Example:
        >>> own_part(["0", "1", "2", "3", "4"], Place(rank=1, size=2))
        ['2', '3']
        >>> own_part(["0", "1"], Place(rank=2, size=3))
        ['0']
    """
    each = len(things) // place.size
    return things[place.rank * each : (place.rank + 1) * each] if each else [things[place.rank % len(things)]]


def visible_gpus(environ: Mapping[str, str], dev: Path = Path("/dev")) -> list[str]:
    """What CUDA_VISIBLE_DEVICES says, else the NVIDIA devices of this host."""
    said = environ.get("CUDA_VISIBLE_DEVICES")
    if said is not None:
        return [gpu for gpu in said.split(",") if gpu]
    return [str(i) for i in range(sum(file.name[6:].isdigit() for file in dev.glob("nvidia[0-9]*")))]


def slurm_tasks(environ: Mapping[str, str]) -> list[int]:
    """The tasks that somebody asked a Slurm allocation for, host by host; empty where that is not known.

    Example:
        >>> slurm_tasks({"SLURM_JOB_NODELIST": "a[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),3"})
        [4, 4, 3]
    """
    # Inside a step, a shell of srun's say, it is the step's.
    if "SLURM_JOB_NODELIST" not in environ or "SLURM_STEP_ID" in environ:
        return []
    return _numbers(environ.get("SLURM_TASKS_PER_NODE", ""))


def slurm_room(environ: Mapping[str, str]) -> list[int]:
    """How many ranks a Slurm allocation has room for, host by host: its tasks or CPUs; empty outside of one.

    Example:
        >>> slurm_room({"SLURM_JOB_NODELIST": "a[1-3]", "SLURM_JOB_CPUS_PER_NODE": "4(x2),3", "SLURM_STEP_ID": "0"})
        [4, 4, 3]
    """
    if "SLURM_JOB_NODELIST" not in environ:
        return []
    cpus, tasks = _numbers(environ.get("SLURM_JOB_CPUS_PER_NODE", "")), slurm_tasks(environ)
    return [max(pair) for pair in zip_longest(cpus, tasks, fillvalue=0)]


def _numbers(text: str) -> list[int]:
    """What Slurm writes as "4(x2),3"."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(number) for number, times in parts for _ in range(int(times or 1))]


def check_world(environ: Mapping[str, str], size: int, library: str) -> None:
    """Raises RuntimeError for a world of one rank where a launcher has started several.

    Args:
        environ: variables of this process.
        size: of MPI's world.
        library: MPI's own description of itself.
    """
    launched = launched_size(environ)
    if launched is None or size > 1:
        return
    launcher, number = launched
    raise RuntimeError(
        message(
            "init",
            f"a world of {number} ranks, as {launcher.name} started",
            f"one rank that sees no other ({library.splitlines()[0].strip()})",
            f"{launcher.remedy} PYCOLLECTIVE_ALLOW_SINGLETON=1 accepts it.",
        )
    )
