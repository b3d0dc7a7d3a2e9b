"""Intel MPI."""

from __future__ import annotations

from pycollective.launch.job import Job
from pycollective.launch.libraries.library import NETWORK_SETTINGS
from pycollective.launch.libraries.mpich import Mpich


class IntelMpi(Mpich):
    """Intel MPI, whose mpiexec is a Hydra with a few options of its own."""

    family = "Intel MPI"
    patterns = (r"Intel\(R\) MPI Library(?: for Linux\* OS, Version)? (\d[\w.]*)",)
    mpiexec_names = ("mpiexec", "mpirun", "mpiexec.hydra")
    remote_shell_variables = ()
    setting_prefixes = (*NETWORK_SETTINGS, "I_MPI_FABRICS", "I_MPI_OFI")
    takes_unequal_hosts = False
    without_binding = ("-genv", "I_MPI_PIN", "off")

    def host_options(self, job: Job) -> list[str]:
        return ["-hosts", ",".join(name for name, _ in job.shares()), "-ppn", str(job.ranks_of_each_host())]
