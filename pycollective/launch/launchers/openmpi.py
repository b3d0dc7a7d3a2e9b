"""The launcher of Open MPI."""

from __future__ import annotations

from pycollective.launch.launchers.launcher import Launcher


class Mpirun(Launcher):
    """Open MPI's mpirun, also called mpiexec. Its ranks find each other by PMIx, as under ``srun --mpi=pmix``."""

    name = "an Open MPI mpirun"
    size_variable = "OMPI_COMM_WORLD_SIZE"
    rank_variable = "OMPI_COMM_WORLD_RANK"
    rank_variables = ("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
    place_variables = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    remedy = "mpi4py has loaded another MPI library: use that library's mpiexec, or install the MPI of this mpirun."

    @classmethod
    def names_lost_ranks(cls, hosts: int) -> bool:
        """Ranks on other hosts see their connections closed and abort; it may name one of them instead."""
        return hosts == 1
