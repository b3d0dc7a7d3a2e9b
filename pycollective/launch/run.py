"""``pycollective run``: starts a program as ranks, through the launcher of the MPI library that mpi4py loads."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from pycollective.errors import message
from pycollective.launch import command_lines
from pycollective.launch.arguments import positive
from pycollective.launch.command_lines import Job
from pycollective.launch.launchers import launched_size, slurm_room, slurm_tasks
from pycollective.launch.libraries import Library, belongs, identify_mpiexec, loaded, mpiexec_of
from pycollective.launch.rank_wrapper import physical_cores

_EXAMPLES = """examples:
  pycollective run -n 4 train.py --epochs 3
  pycollective run -n 4 --hosts alpha,beta --devices-per-rank 2 train.py
  pycollective run -n 2 --dry-run python -m pytest tests

Each rank is bound to its share of its host's cores and sees its share of its GPUs; OMP_NUM_THREADS,
OPENBLAS_NUM_THREADS and MKL_NUM_THREADS say how many cores those are, unless you set them. What pycollective.init
sets by itself (memory, XLA's threads) works without this command too.
"""

# What the library speaks with srun.
_PMI = {"MPICH": "pmi2", "Intel MPI": "pmi2", "Open MPI": "pmix"}

# Variables of MPICH and Open MPI 5 and 4 that name what they call in the place of ssh.
_AGENTS = ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")

# Set inside an allocation of Slurm, PBS, LSF, Grid Engine, Flux: launchers find its hosts, and reach them without ssh.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "FLUX_URI")

# Settings that the ranks of other hosts need as well, where the launcher does not carry all.
_CARRIED = ("PYCOLLECTIVE_", "JAX_", "XLA_", "MPI4PY_", "OMP_", "NPROC", "PATH", "LD_LIBRARY_PATH", "PYTHONPATH")

_ANSWER_S = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    parser.add_argument("-n", "-np", "--ranks", type=positive, required=True, help="how many")
    parser.add_argument("--devices-per-rank", type=positive, metavar="D", help="local CPU devices of JAX")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--hosts", type=hosts, default=(), metavar="A,B:2", help="where, with ranks of each if not equal"
    )
    where.add_argument("--hostfile", metavar="FILE", help="where, in the form of the MPI library's mpiexec")
    parser.add_argument(
        "--mpi", metavar="PATH|srun", help="the launcher (default: the mpiexec of the library that mpi4py loads)"
    )
    parser.add_argument(
        "--bind", choices=("core", "none"), default="core", help="each rank to its cores (default core)"
    )
    parser.add_argument("--oversubscribe", action="store_true", help="more ranks than cores are meant")
    parser.add_argument("--label", action="store_true", help="each line of output says its rank")
    parser.add_argument("--dry-run", action="store_true", help="print the command and its environment, start nothing")
    parser.add_argument("program", help="a Python file, or any program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own")


def hosts(text: str) -> tuple[tuple[str, int | None], ...]:
    """Names between commas, each with its number of ranks or without.

    Example:
        >>> hosts("alpha,beta:2")
        (('alpha', None), ('beta', 2))
    """
    parts = [part.partition(":") for part in text.split(",")]
    for name, _, ranks in parts:
        if not name or (ranks and (not ranks.isdecimal() or int(ranks) == 0)):
            raise argparse.ArgumentTypeError(f"expected hosts as alpha,beta:2, got {text!r}")
    return tuple((name, int(ranks) if ranks else None) for name, _, ranks in parts)


def main(arguments: Sequence[str]) -> int:
    """Becomes the launcher, so that signals reach it and its exit status is this one's."""
    parser = argparse.ArgumentParser(prog="pycollective run", description="Starts a program as ranks.")
    add_options(parser)
    options = parser.parse_args(arguments)
    try:
        command, variables = plan(options, os.environ)
        if not (options.dry_run or allocated(os.environ)):
            check_hosts(host_names(options), os.environ)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    if not options.dry_run:
        os.execvpe(command[0], command, {**os.environ, **variables})
    settings = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
    sys.stdout.write(f"{settings}{shlex.join(command)}\n")
    return 0


def plan(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command line to start, and what to add to its environment.

    Raises:
        FileNotFoundError: no such program, hostfile or launcher.
        RuntimeError: inside a rank of another run.
        ValueError: the launcher belongs to another MPI library; more ranks than cores, or than an allocation has.
    """
    if (launched := launched_size(environ)) is not None:
        got = f"one of {launched[1]} ranks of {launched[0].name}"
        raise RuntimeError(message("run", "a process that no launcher started", got, "Call it outside of the ranks."))
    program = words([options.program, *options.arguments])
    if options.hostfile and not Path(options.hostfile).is_file():
        raise FileNotFoundError(message("run", "a hostfile", f"{options.hostfile!r}", "Check its path."))
    if "SLURM_HET_SIZE" in environ and not options.hosts:
        remedy = "Name them, or use srun itself."
        raise ValueError(message("run", "--hosts in a heterogeneous Slurm job", "none", remedy))
    variables = {}
    if options.devices_per_rank is not None:
        variables["JAX_NUM_CPU_DEVICES"] = str(options.devices_per_rank)
    if "SLURM_STEP_ID" in environ:  # a shell of srun's, which holds cores that the ranks need
        variables["SLURM_OVERLAP"] = "1"
        variables["SLURM_NODELIST"] = environ.get("SLURM_JOB_NODELIST", "")
    if room := slurm_room(environ):  # Open MPI's slots, which would be a shell's one task, or tasks of many cores
        variables["SLURM_TASKS_PER_NODE"] = ",".join(map(str, room))
    rank = [sys.executable, "-m", "pycollective.launch.rank_wrapper", "--bind", options.bind, "--", *program]
    carried = [name for name in {**environ, **variables} if name.startswith(_CARRIED)]
    job = Job(options.ranks, rank, options.hosts, options.hostfile, options.label, options.oversubscribe, carried)
    if not options.oversubscribe:
        _check_room(job, environ)
    library = loaded()
    mpiexec = _mpiexec(options.mpi, library, environ)
    if mpiexec is not None:
        return command_lines.mpiexec(mpiexec, _over_allocation(job, library, environ)), variables
    if job.hostfile:
        raise ValueError(message("run", "no hostfile with srun", job.hostfile, "Name --hosts of the allocation."))
    return command_lines.srun(_PMI[library.family], job, nodes=len(slurm_room(environ))), variables


def allocated(environ: Mapping[str, str]) -> bool:
    """Whether a batch system has given this process hosts."""
    return any(name in environ for name in _ALLOCATIONS)


def _check_room(job: Job, environ: Mapping[str, str]) -> None:
    given = slurm_room(environ)
    slots = [ranks for _, ranks in job.hosts]
    share = "or say --oversubscribe: ranks that share a core are slow."
    if slots and None not in slots:
        room = sum(filter(None, slots))
        expected, remedy = f"{room} ranks on {len(slots)} hosts", "Start fewer, or let --hosts say more."
    elif given and not job.hosts:
        room = sum(given)
        expected, remedy = f"{room} ranks in this allocation", f"Start fewer, ask Slurm for more --ntasks, {share}"
    elif not (job.hosts or job.hostfile or allocated(environ)):
        room = len(physical_cores(os.sched_getaffinity(0)))
        expected, remedy = f"{room} ranks for {room} cores", f"Start fewer, on more --hosts, {share}"
    else:
        return
    if job.ranks > room:
        raise ValueError(message("run", f"at most {expected}", job.ranks, remedy))


def _mpiexec(wish: str | None, library: Library, environ: Mapping[str, str]) -> Library | None:
    """The one that is asked for, or that belongs to the library; None: srun."""
    pmi = _PMI[library.family]
    if wish == "srun":
        return None
    if wish is not None:
        named = identify_mpiexec(wish)
        if named is None or not belongs(named, library):
            got = f"{wish} of {named.name}" if named else f"{wish}, which does not say what it is"
            remedy = f"mpi4py loads {library.path or library.name}: name its mpiexec, or leave --mpi out."
            raise ValueError(message("run", f"an mpiexec of {library.name}", got, remedy))
        return named
    if "SLURM_GPUS_PER_TASK" in environ:
        if pmi not in _plugins():
            got = f"--gpus-per-task, which mpiexec would not keep, and no srun --mpi={pmi}"
            raise ValueError(message("run", "--gres=gpu:N, GPUs of each node", got, "Ask Slurm for them so."))
        return None
    try:
        return mpiexec_of(library, environ)
    except FileNotFoundError:
        # Some clusters have none, and their srun instead.
        if "SLURM_JOB_ID" not in environ or pmi not in _plugins():
            raise
        return None


def _over_allocation(job: Job, library: Library, environ: Mapping[str, str]) -> Job:
    """On all hosts of a Slurm allocation, as Slurm says or else evenly; mpiexecs would fill the first ones."""
    room, tasks = slurm_room(environ), slurm_tasks(environ)
    if job.hosts or job.hostfile or not room:
        return job
    numbers = tasks if sum(tasks) == job.ranks else command_lines.spread(job.ranks, room)
    if len(room) < 2 or (library.family == "Intel MPI" and len(set(numbers)) > 1):  # it takes one number for all
        return job
    names = _node_names(environ["SLURM_JOB_NODELIST"])
    return replace(job, hosts=list(zip(names, numbers, strict=False)))


def _node_names(nodes: str) -> list[str]:
    """Slurm's "alpha[1-2]" as names."""
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        expected = f"scontrol to name the hosts {nodes}"
        raise RuntimeError(message("run", expected, repr(error), "Say --hosts.")) from error
    return done.stdout.split()


def _plugins() -> set[str]:
    """Process management interfaces that this srun offers."""
    if shutil.which("srun") is None:
        return set()
    try:
        done = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        got = "no answer within 20 s"
        raise RuntimeError(message("run", "srun --mpi=list to answer", got, "Say --mpi PATH of an mpiexec.")) from None
    return set(re.findall(r"[a-z0-9_]+", done.stdout + done.stderr))


def words(command: Sequence[str]) -> list[str]:
    """The command of a program: Python in front of a file that cannot be executed.

    Raises:
        FileNotFoundError: there is no such program.
    """
    name = command[0]
    if Path(name).is_file():
        runs = os.access(name, os.X_OK) and not name.endswith(".py")
        return [str(Path(name).absolute()), *command[1:]] if runs else [sys.executable, *command]
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(message("run", "a program", f"{name!r}, which does not exist", "Check its path."))
    return [found, *command[1:]]


def host_names(options: argparse.Namespace) -> list[str]:
    """The hosts that a run names, of its option or its file."""
    if not options.hostfile:
        return [name for name, _ in options.hosts]
    lines = (line.split("#")[0].split() for line in Path(options.hostfile).read_text().splitlines())
    return [line[0].split(":")[0] for line in lines if line]


def check_hosts(names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Asks every other host for a sign of life, as the launcher will.

    Raises:
        ConnectionError: one does not answer.
    """
    agent = next((environ[name] for name in _AGENTS if environ.get(name)), "ssh").split(":")[0].strip()
    call = shlex.split(agent)
    if Path(call[0]).name == "ssh":
        call += ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_ANSWER_S}"]
    here = {"localhost", "127.0.0.1", os.uname().nodename, os.uname().nodename.split(".")[0]}

    def complaint(name: str) -> str | None:
        try:
            done = subprocess.run(
                [*call, name, "true"],
                capture_output=True,
                text=True,
                timeout=2 * _ANSWER_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return None if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"

    others = [name for name in dict.fromkeys(names) if name not in here]
    with ThreadPoolExecutor(max(1, min(32, len(others)))) as pool:
        for name, wrong in zip(others, pool.map(complaint, others), strict=True):
            if wrong is not None:
                expected = f"host {name} to answer '{agent} {name} true'"
                raise ConnectionError(message("run", expected, repr(wrong), "Mend that, or leave the host out."))
