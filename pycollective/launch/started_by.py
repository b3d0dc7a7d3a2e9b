"""Which launcher has started this process, and what the launcher's variables say about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pycollective.errors import message
from pycollective.launch.launchers.flux import FluxRun
from pycollective.launch.launchers.hydra import Hydra
from pycollective.launch.launchers.launcher import Launcher, Place
from pycollective.launch.launchers.openmpi import Mpirun
from pycollective.launch.launchers.slurm import Srun

LAUNCHERS: tuple[type[Launcher], ...] = (Srun, Mpirun, Hydra, FluxRun)


def launched_sizes(environ: Mapping[str, str]) -> list[tuple[type[Launcher], int]]:
    """Every launcher whose variables are set, with the number of ranks that it has started."""
    sizes = ((launcher, launcher.size(environ)) for launcher in LAUNCHERS)
    return [(launcher, size) for launcher, size in sizes if size is not None]


def launched_size(environ: Mapping[str, str]) -> tuple[type[Launcher], int] | None:
    """The launcher that has started several ranks for this program, and their number.

    Example:
        >>> launched_size({"PMI_SIZE": "4"})[1]
        4
        >>> launched_size({"SLURM_NTASKS": "4"}) is None
        True
    """
    return next(((launcher, size) for launcher, size in launched_sizes(environ) if size > 1), None)


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as a rank, even as the only one.

    The only task of an srun is no rank: it is most often a shell in an allocation. A rank of an mpiexec that was called
    in this shell has a place of its own.

    Example:
        >>> is_rank({"PMI_SIZE": "1"}), is_rank({"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1"})
        (True, False)
    """
    if launched_size(environ) is not None:
        return True
    sizes = launched_sizes(environ)
    if any(launcher.starts_launchers for launcher, _ in sizes):
        return any(launcher.place(environ) for launcher in LAUNCHERS if not launcher.starts_launchers)
    return bool(sizes)


def local_place(environ: Mapping[str, str]) -> Place | None:
    """This rank's place on its host; None under a launcher that does not say it.

    Example:
        >>> local_place({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"})
        Place(rank=1, size=4)
        >>> local_place({"SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"})
        Place(rank=0, size=3)
    """
    return next((place for _, place in _places(environ)), None)


class JobPlace(NamedTuple):
    """A rank's place in its job.

    Attributes:
        rank: its number.
        size: the number of ranks.
        local_size: the number of ranks on its host; 0 under a launcher that does not say it.
        rank_variable: the variable that holds its number.
    """

    rank: int
    size: int
    local_size: int
    rank_variable: str


def place_in_job(environ: Mapping[str, str]) -> JobPlace | None:
    """This rank's place in its job; None without a launcher.

    Example:
        >>> place_in_job({"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
        JobPlace(rank=1, size=4, local_size=2, rank_variable='PMI_RANK')
    """
    for launcher in _inner_first():
        size, rank = launcher.size(environ), environ.get(launcher.rank_variable, "")
        if size is not None and rank.isdecimal():
            place = launcher.place(environ)
            return JobPlace(int(rank), size, 0 if place is None else place.size, launcher.rank_variable)
    return None


def names_lost_ranks(environ: Mapping[str, str], hosts: int) -> bool:
    """Whether the launcher says which rank has died, in a job on so many hosts; True if nobody knows the launcher.

    Example:
        >>> names_lost_ranks({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}, 1)
        False
        >>> open_mpi = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
        >>> names_lost_ranks(open_mpi, 1), names_lost_ranks(open_mpi, 2)
        (True, False)
    """
    return next((launcher.names_lost_ranks(hosts) for launcher, _ in _places(environ)), True)


def _places(environ: Mapping[str, str]) -> Iterator[tuple[type[Launcher], Place]]:
    """This rank's place on its host, as each launcher that says it has it."""
    for launcher in _inner_first():
        if (place := launcher.place(environ)) is not None:
            yield launcher, place


def _inner_first() -> list[type[Launcher]]:
    """A launcher that starts launchers comes last: its own tasks may be the other launcher's proxies."""
    return sorted(LAUNCHERS, key=lambda launcher: launcher.starts_launchers)


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that tell this rank from every other rank, of its job and of other jobs.

    Example:
        >>> rank_variables({"PMI_RANK": "1", "HOME": "/root"})
        {'PMI_RANK': '1'}
    """
    names = (name for launcher in LAUNCHERS for name in launcher.rank_variables)
    return {name: environ[name] for name in names if name in environ}


def launcher_gives_gpus(environ: Mapping[str, str]) -> bool:
    """Whether the GPUs that this rank sees are its own, by its launcher's doing."""
    return any(launcher.gives_gpus(environ) for launcher in LAUNCHERS)


def check_world(environ: Mapping[str, str], size: int, library: str) -> None:
    """Raises RuntimeError for a world of one rank where a launcher has started several.

    Args:
        environ: the variables of this process.
        size: the size of MPI's world.
        library: MPI's description of itself.
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
