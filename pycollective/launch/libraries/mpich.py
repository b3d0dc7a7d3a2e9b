"""MPICH, and the libraries that descend from it."""

from __future__ import annotations

from typing import ClassVar

from pycollective.launch.job import Job
from pycollective.launch.libraries.library import Library


class Mpich(Library):
    """MPICH, Cray MPICH or MVAPICH, whose mpiexec is Hydra."""

    family = "MPICH"
    patterns: ClassVar[tuple[str, ...]] = (
        r"MVAPICH2?(?: Version)?[\s:]*(\d[\w.]*)",
        r"(?:MPICH [Vv]ersion|HYDRA build details:\s*Version)[\s:]*(\d[\w.]*)",
    )
    mpiexec_names: ClassVar[tuple[str, ...]] = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich")
    pmi = "pmi2"
    agent_variables: ClassVar[tuple[str, ...]] = ("HYDRA_LAUNCHER_EXEC",)
    unbound: ClassVar[tuple[str, ...]] = ("-bind-to", "none")

    def options(self, job: Job) -> list[str]:
        options = [*self.unbound]
        if job.hosts:
            options += self.host_options(job)
        elif job.hostfile:
            options += ["-f", job.hostfile]
        return [*options, "-prepend-rank"] if job.label else options

    def host_options(self, job: Job) -> list[str]:
        """The options that name the hosts."""
        return ["-hosts", ",".join(f"{name}:{number}" for name, number in job.shares())]
