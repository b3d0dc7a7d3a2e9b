"""The launcher of MPICH and Intel MPI."""

from __future__ import annotations

from pycollective.launch.launchers.launcher import Launcher


class Hydra(Launcher):
    """The mpiexec of MPICH and Intel MPI. Its ranks find each other by PMI, as under ``srun --mpi=pmi2``."""

    name = "an MPICH or Intel MPI mpiexec"
    size_variable = "PMI_SIZE"
    rank_variable = "PMI_RANK"
    rank_variables = ("PMI_RANK", "PMI_FD", "PMI_PORT")
    place_variables = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    remedy = "mpi4py has loaded another MPI library: use that library's mpiexec, or install the MPI of this mpiexec."

    @classmethod
    def names_lost_ranks(cls, hosts: int) -> bool:
        """It prints a table without the rank."""
        return False
