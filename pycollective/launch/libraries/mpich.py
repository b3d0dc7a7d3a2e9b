"""MPICH, and the libraries that descend from it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar

from pycollective.launch.job import Job
from pycollective.launch.libraries.library import NETWORK_SETTINGS, Library

_NETWORK = "MPIR_CVAR_CH4_NETMOD"


class Mpich(Library):
    """MPICH, Cray MPICH or MVAPICH, whose mpiexec is Hydra."""

    family = "MPICH"
    patterns: ClassVar[tuple[str, ...]] = (
        r"MVAPICH2?(?: Version)?[\s:]*(\d[\w.]*)",
        r"(?:MPICH [Vv]ersion|HYDRA build details:\s*Version)[\s:]*(\d[\w.]*)",
    )
    mpiexec_names: ClassVar[tuple[str, ...]] = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich")
    pmi = "pmi2"
    remote_shell_variables: ClassVar[tuple[str, ...]] = ("HYDRA_LAUNCHER_EXEC",)
    setting_prefixes: ClassVar[tuple[str, ...]] = (*NETWORK_SETTINGS, "MPIR_CVAR_")
    device_pattern = r"Device:\s*(.+)"
    shared_file_prefixes: ClassVar[tuple[str, ...]] = ("mpich_shm_", "mpich_vci_")
    without_binding: ClassVar[tuple[str, ...]] = ("-bind-to", "none")

    @classmethod
    def variables_to_start(cls, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Under ``srun --mpi=pmi2`` the wheel of MPICH starts reliably with libfabric alone, and not with UCX.

        With UCX, MPICH publishes 4 KiB of its heap that begin with an address of about 300 B. Slurm reads lines of
        1 KiB, and the bytes after the address may make a longer line: "value not properly terminated in client request"
        (in 8 of 8 starts of 2 ranks on 2 hosts, and in none of 8 with libfabric; MPICH 5.0.2, Slurm 22.05).
        """
        if not {"PMI_FD", "SLURM_STEP_ID"} <= environ.keys() or _NETWORK in environ:
            return {}
        try:
            version("mpich")
        except PackageNotFoundError:
            return {}
        return {_NETWORK: "ofi"}

    def options(self, job: Job) -> list[str]:
        options = [*self.without_binding]
        if job.hosts:
            options += self.host_options(job)
        elif job.hostfile:
            options += ["-f", job.hostfile]
        return [*options, "-prepend-rank"] if job.label else options

    def host_options(self, job: Job) -> list[str]:
        """The options that name the hosts."""
        return ["-hosts", ",".join(f"{name}:{number}" for name, number in job.shares())]
