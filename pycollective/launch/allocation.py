"""Which batch system has given this process hosts."""

from __future__ import annotations

from collections.abc import Mapping

from pycollective.launch.launchers.batch_system import BatchSystem
from pycollective.launch.launchers.flux import Flux
from pycollective.launch.launchers.slurm import Slurm


class Pbs(BatchSystem):
    """PBS gives hosts, which an mpiexec finds."""

    job_variable = "PBS_JOBID"


class Lsf(BatchSystem):
    """LSF gives hosts, which an mpiexec finds."""

    job_variable = "LSB_JOBID"


class GridEngine(BatchSystem):
    """Grid Engine gives hosts, which an mpiexec finds."""

    job_variable = "PE_HOSTFILE"


BATCH_SYSTEMS: tuple[type[BatchSystem], ...] = (Slurm, Pbs, Lsf, GridEngine, Flux)


def batch_system(environ: Mapping[str, str]) -> type[BatchSystem] | None:
    """The batch system whose allocation this process is in.

    Example:
        >>> batch_system({"PBS_JOBID": "1.server"}).__name__
        'Pbs'
        >>> batch_system({}) is None
        True
    """
    return next((system for system in BATCH_SYSTEMS if system.job_variable in environ), None)
