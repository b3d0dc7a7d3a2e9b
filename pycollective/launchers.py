"""What a launcher's variables say of this process, to be compared with what MPI says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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
