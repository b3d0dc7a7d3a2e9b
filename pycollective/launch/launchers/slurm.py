"""Slurm and its launcher, srun."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from itertools import zip_longest
from typing import ClassVar

from pycollective.errors import message
from pycollective.launch.find_mpi import SRUN_COMMANDS
from pycollective.launch.job import Job
from pycollective.launch.launchers.batch_system import BatchSystem
from pycollective.launch.launchers.launcher import BatchLauncher, Place
from pycollective.launch.libraries.library import Library

_SCONTROL_TIMEOUT_S = 10
_SRUN_TIMEOUT_S = 20


class Slurm(BatchSystem):
    """Slurm says how many tasks and CPUs each host of its allocation has."""

    job_variable = "SLURM_JOB_ID"
    how_to_get_more = "ask Slurm for more --ntasks"
    overlap_variables: ClassVar[Mapping[str, str]] = {"SLURM_OVERLAP": "1"}

    @classmethod
    def capacity(cls, environ: Mapping[str, str]) -> list[int]:
        """The larger of a host's tasks and its CPUs.

        Example:
            >>> Slurm.capacity({"SLURM_JOB_NODELIST": "a[1-3]", "SLURM_JOB_CPUS_PER_NODE": "4(x2),3"})
            [4, 4, 3]
        """
        if "SLURM_JOB_NODELIST" not in environ:
            return []
        cpus = _numbers(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        return [max(pair) for pair in zip_longest(cpus, cls.tasks(environ), fillvalue=0)]

    @classmethod
    def tasks(cls, environ: Mapping[str, str]) -> list[int]:
        """The tasks of the job. Inside a step, such as a shell that srun has started, only the step's are known.

        Example:
            >>> Slurm.tasks({"SLURM_JOB_NODELIST": "a[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),3"})
            [4, 4, 3]
        """
        if "SLURM_JOB_NODELIST" not in environ or "SLURM_STEP_ID" in environ:
            return []
        return _numbers(environ.get("SLURM_TASKS_PER_NODE", ""))

    @classmethod
    def host_names(cls, environ: Mapping[str, str]) -> list[str]:
        """Asks scontrol what "alpha[1-2]" stands for."""
        hosts = environ["SLURM_JOB_NODELIST"]
        command = ["scontrol", "show", "hostnames", hosts]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            expected = f"scontrol to name the hosts {hosts}"
            raise RuntimeError(message("run", expected, repr(error), "Say --hosts.")) from error
        return done.stdout.split()

    @classmethod
    def launcher_variables(cls, environ: Mapping[str, str]) -> dict[str, str]:
        """Makes the launcher see the whole job, also from a shell that srun has started, which sees its step alone."""
        variables = {}
        if "SLURM_STEP_ID" in environ:
            variables["SLURM_OVERLAP"] = "1"  # the shell's step holds cores that the ranks need
            variables["SLURM_NODELIST"] = environ.get("SLURM_JOB_NODELIST", "")
        # Open MPI takes these for its slots; but a shell's step has one task, and a task may have many cores.
        if capacity := cls.capacity(environ):
            variables["SLURM_TASKS_PER_NODE"] = ",".join(map(str, capacity))
        return variables

    @classmethod
    def check(cls, environ: Mapping[str, str], *, names_hosts: bool) -> None:
        """The variables of a heterogeneous job describe only its first part."""
        if "SLURM_HET_SIZE" in environ and not names_hosts:
            remedy = "Name them, or use srun itself."
            raise ValueError(message("run", "--hosts in a heterogeneous Slurm job", "none", remedy))


class Srun(BatchLauncher):
    """Slurm's srun. An mpiexec inside ``sbatch`` starts its proxies by srun, so its ranks see srun's variables too.

    SLURM_NTASKS is not the number of ranks: inside ``sbatch`` it is set for programs that srun did not start.
    """

    name = "srun"
    option = "srun"
    size_variable = "SLURM_STEP_NUM_TASKS"
    rank_variable = "SLURM_PROCID"
    rank_variables = ("SLURM_STEP_ID", "SLURM_PROCID")
    starts_launchers = True
    remedy = f"Launch with {SRUN_COMMANDS}, or with mpiexec inside the allocation."

    @classmethod
    def place(cls, environ: Mapping[str, str]) -> Place | None:
        if not all(name in environ for name in ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")):
            return None
        tasks = _numbers(environ["SLURM_STEP_TASKS_PER_NODE"])
        return Place(int(environ["SLURM_LOCALID"]), tasks[int(environ["SLURM_NODEID"])])

    @classmethod
    def gives_gpus(cls, environ: Mapping[str, str]) -> bool:
        """Under ``--gpus-per-task`` each task sees its own GPUs."""
        return "SLURM_GPUS_PER_TASK" in environ

    @classmethod
    def command_line(cls, job: Job, library: Library, environ: Mapping[str, str]) -> list[str]:
        if job.hostfile:
            raise ValueError(message("run", "no hostfile with srun", job.hostfile, "Name --hosts of the allocation."))
        line = ["srun", f"--mpi={library.pmi}", "-n", str(job.ranks), "--cpu-bind=none", "--kill-on-bad-exit=1"]
        line += ["--distribution=block"]  # otherwise srun takes that of the shell that calls it
        hosts = len(Slurm.capacity(environ))
        if job.hosts:
            names = [name for name, _ in job.shares()]
            line += ["-w", ",".join(names), "-N", str(len(names)), f"--ntasks-per-node={job.ranks_of_each_host()}"]
        elif hosts > 1 and job.ranks % hosts == 0:  # without these options Slurm fills the first hosts
            line += ["-N", str(hosts), f"--ntasks-per-node={job.ranks // hosts}"]
        line += ["--label"] if job.label else []
        line += ["--oversubscribe", "--overcommit"] if job.oversubscribe else []
        return [*line, *job.command]

    @classmethod
    def can_start(cls, library: Library, environ: Mapping[str, str]) -> bool:
        return Slurm.job_variable in environ and library.pmi in _plugins()

    @classmethod
    def must_start(cls, library: Library, environ: Mapping[str, str]) -> bool:
        if not cls.gives_gpus(environ):
            return False
        if library.pmi not in _plugins():
            expected = f"srun --mpi={library.pmi} for --gpus-per-task"
            remedy = "Ask Slurm for --gres=gpu:N instead: pycollective run gives each rank its part of these GPUs."
            raise ValueError(message("run", expected, "none", remedy))
        return True


def _plugins() -> set[str]:
    """The process management interfaces that srun offers here."""
    if shutil.which("srun") is None:
        return set()
    try:
        done = subprocess.run(
            ["srun", "--mpi=list"], capture_output=True, text=True, timeout=_SRUN_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        got = f"no answer within {_SRUN_TIMEOUT_S} s"
        raise RuntimeError(message("run", "srun --mpi=list to answer", got, "Say --mpi PATH of an mpiexec.")) from None
    return set(re.findall(r"[a-z0-9_]+", done.stdout + done.stderr))


def _numbers(text: str) -> list[int]:
    """The numbers that Slurm writes as "4(x2),3"."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(number) for number, times in parts for _ in range(int(times or 1))]
