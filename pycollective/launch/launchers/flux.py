"""Flux and its launcher, flux run."""

from __future__ import annotations

from pycollective.launch.launchers.batch_system import BatchSystem
from pycollective.launch.launchers.launcher import Launcher


class Flux(BatchSystem):
    """Flux gives hosts, which an mpiexec finds."""

    job_variable = "FLUX_URI"


class FluxRun(Launcher):
    """Flux's ``flux run``."""

    name = "flux run"
    size_variable = "FLUX_JOB_SIZE"
    rank_variable = "FLUX_TASK_RANK"
    rank_variables = ("FLUX_JOB_ID", "FLUX_TASK_RANK")
    remedy = "Launch with 'flux run -o mpi=...' as your MPI library needs it."
