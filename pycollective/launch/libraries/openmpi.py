"""Open MPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pycollective.launch.job import Job
from pycollective.launch.libraries.library import NETWORK_SETTINGS, Library, Ulfm


class OpenMpi(Library):
    """Open MPI, whose mpiexec belongs to one major version."""

    family = "Open MPI"
    patterns = (r"(?:Open MPI v|\(Open(?:RTE| MPI)\) |PRRTE[^\d]*)(\d[\w.]*)",)
    mpiexec_names = ("mpiexec", "mpirun", "mpiexec.openmpi", "mpirun.openmpi", "orterun")
    pmi = "pmix"
    remote_shell_variables = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")  # of version 5, and of version 4
    lost_host = "(PRTE|ORTE) has lost communication with a remote daemon"  # of version 5, and of version 4
    job_failure = (r"(prterun|mpirun|mpiexec) (has exited due to|noticed that) process rank",)
    keepalive_variables: ClassVar[Mapping[str, str]] = {  # by default it takes 8 minutes
        f"{prefix}_oob_tcp_keepalive_{name}": value
        for prefix in ("PRTE_MCA", "OMPI_MCA")  # of version 5, and of version 4
        for name, value in {"time": "30", "intvl": "10", "probes": "3"}.items()
    }
    ulfm = Ulfm(major=5, options=("--with-ft", "ulfm"), attribute=12)  # of mpi.h: MPI_FT
    # Open MPI itself sets variables of other frameworks.
    setting_prefixes = (*NETWORK_SETTINGS, *(f"OMPI_MCA_{framework}" for framework in ("pml", "mtl", "btl", "coll")))
    shared_file_prefixes = ("sm_segment.",)

    @classmethod
    def session_folder(cls, launcher: int) -> str:
        return f"ompi.{launcher}"

    def can_start(self, library: Library) -> bool:
        """Whether the major versions are the same, too.

        Example:
            >>> OpenMpi("4.1.4", "/usr/bin/mpiexec").can_start(OpenMpi("5.0.11", "libmpi.so.40"))
            False
        """
        return super().can_start(library) and self.major == library.major

    def options(self, job: Job) -> list[str]:
        options = ["--bind-to", "none", *(self.ulfm.options if job.elastic else ())]
        if job.hosts:
            options += ["--host", ",".join(f"{name}:{number}" for name, number in job.shares())]
        elif job.hostfile:
            options += ["--hostfile", job.hostfile]
        if job.label:
            options += ["--output", "tag"] if self.major >= 5 else ["--tag-output"]
        if job.oversubscribe:
            options += ["--oversubscribe"]
        for name in job.carried:  # Open MPI leaves all other variables on this host
            options += ["-x", name]
        return options
