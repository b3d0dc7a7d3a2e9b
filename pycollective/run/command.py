"""``pycollective run`` starts a program as ranks, through the launcher of the MPI library that mpi4py loads."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pycollective.errors import message
from pycollective.launch import started_by
from pycollective.launch.allocation import batch_system
from pycollective.launch.arguments import not_negative, positive
from pycollective.launch.find_mpi import ELASTIC, identify_mpiexec, loaded_library, mpiexec_of
from pycollective.launch.host_share import physical_cores
from pycollective.launch.hosts import check_hosts, parse_hostfile, parse_hosts
from pycollective.launch.job import Job, spread
from pycollective.launch.launchers.batch_system import BatchSystem
from pycollective.launch.launchers.launcher import BatchLauncher
from pycollective.launch.libraries.library import Library
from pycollective.run import restarts
from pycollective.run.supervise import FaultPatterns

_EXAMPLES = """examples:
  pycollective run -n 4 train.py --epochs 3
  pycollective run -n 4 --hosts alpha,beta --devices-per-rank 2 train.py
  pycollective run -n 2 --dry-run -m pytest tests
  pycollective run -n 2 -c "import pycollective as pc; print(pc.psum(1))"
  pycollective run -n 4 --distributed jax_program.py
  pycollective run -n 4 --hosts alpha,beta --restarts 3 --min-ranks 2 train.py --checkpoints saved

Each rank is bound to its share of its host's cores and sees its share of the host's GPUs. OMP_NUM_THREADS,
OPENBLAS_NUM_THREADS and MKL_NUM_THREADS become its number of cores, unless you set them. What pycollective.init sets by
itself (memory, XLA's threads) works without this command too.
"""

_CARRIED = ("PYCOLLECTIVE_", "JAX_", "XLA_", "MPI4PY_", "OMP_", "NPROC", "PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
"""The beginnings of the names of variables that ranks on other hosts need. Some launchers pass on only named ones."""


class _AsPython(argparse.Action):
    """-c or -m, and all that follows: then Python is the program."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if not values:
            parser.error(f"argument {option}: expected an argument")
        namespace.program, namespace.arguments = sys.executable, [option, *values]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    parser.add_argument("-n", "-np", "--ranks", type=positive, required=True, help="number of ranks")
    parser.add_argument(
        "--devices-per-rank", type=positive, metavar="D", help="number of JAX's local CPU devices in each rank"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--hosts",
        type=parse_hosts,
        default=(),
        metavar="A,B:2",
        help="hosts, with the number of ranks of each where they are not equal",
    )
    where.add_argument("--hostfile", metavar="FILE", help="file of hosts, in the form of the MPI library's mpiexec")
    launchers = [launcher.option for launcher in _batch_launchers()]
    parser.add_argument(
        "--mpi",
        metavar="|".join(["PATH", *launchers]),
        help="launcher (default: the mpiexec of the library that mpi4py loads)",
    )
    parser.add_argument(
        "--bind", choices=("core", "none"), default="core", help="bind each rank to its cores (default core)"
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="run a Python program with MPI where it calls jax.distributed.initialize()",
    )
    parser.add_argument(
        "--restarts",
        type=not_negative,
        default=0,
        metavar="N",
        help="start the job again, at most N times, when it ends with a status other than 0, on the hosts that remain; "
        "PYCOLLECTIVE_RESTART counts the starts from 0 (default 0)",
    )
    parser.add_argument(
        "--min-ranks",
        type=positive,
        metavar="K",
        help="start again with K ranks or more, where hosts have gone away (default all --ranks)",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help=f"when a rank dies, let the others go on without it in pycollective.elastic.run ({ELASTIC} alone)",
    )
    parser.add_argument("--oversubscribe", action="store_true", help="allow more ranks than cores")
    parser.add_argument("--label", action="store_true", help="begin each line of output with its rank")
    parser.add_argument("--dry-run", action="store_true", help="print the command and its environment, start nothing")
    parser.add_argument(
        *("-c", "-m"),
        action=_AsPython,
        nargs=argparse.REMAINDER,
        default=argparse.SUPPRESS,
        metavar="...",
        help="run a Python command or module, as python -c and python -m do; all that follows is theirs",
    )
    program = parser.add_argument("program", help="a Python file, or any program")
    arguments = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's arguments")
    program.required = arguments.required = False  # -c and -m give both


_RANK_ENDS_JOB = "pycollective: .*; ending all ranks"
"""What every report of a fault has, as a regular expression (faults/rank_exit.py, native/monitor/monitor.cc)."""


def main(arguments: Sequence[str]) -> int:
    """Replaces this process by the launcher, which then gets its signals and gives its exit status.

    With ``--restarts`` this process stays, and does both itself. So it does where the launcher, when a host has gone,
    may report success or stay for ever.
    """
    parser = argparse.ArgumentParser(prog="pycollective run", description="Starts a program as ranks.")
    add_options(parser)
    options = parser.parse_args(arguments)
    try:
        start = prepare(options, os.environ)
        command = start.command_line(start.job)
        if not options.dry_run and batch_system(os.environ) is None:
            check_hosts([name for name, _ in _named_hosts(options)], os.environ)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    if (options.restarts or start.fault_patterns) and not options.dry_run:
        return restarts.run(start, options.restarts, options.min_ranks or options.ranks, os.environ)
    if not options.dry_run:
        os.execvpe(command[0], command, {**os.environ, **start.variables})
    settings = "".join(f"{name}={shlex.quote(value)} " for name, value in start.variables.items())
    sys.stdout.write(f"{settings}{shlex.join(command)}\n")
    return 0


def plan(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
    """The command line to start, and the variables to add to its environment. It raises what :func:`prepare` does."""
    start = prepare(options, environ)
    return start.command_line(start.job), start.variables


def prepare(options: argparse.Namespace, environ: Mapping[str, str]) -> restarts.Start:
    """What to start, and how.

    Raises:
        FileNotFoundError: there is no such program, hostfile or launcher.
        RuntimeError: this process is a rank of another run.
        ValueError: the launcher belongs to another MPI library, or there are more ranks than cores or than an
            allocation can take, or fewer than ``--min-ranks``; the launcher cannot do ``--elastic``.
    """
    if (launched := started_by.launched_size(environ)) is not None:
        got = f"one of {launched[1]} ranks of {launched[0].name}"
        raise RuntimeError(
            message("run", "a process that no launcher started", got, "Call pycollective run outside of the ranks.")
        )
    if options.min_ranks is not None and not (options.restarts and options.min_ranks <= options.ranks):
        expected = f"--min-ranks of at most {options.ranks}, and --restarts"
        got = f"--min-ranks {options.min_ranks} and --restarts {options.restarts}"
        raise ValueError(message("run", expected, got, "Say with how few ranks the job may start again."))
    if options.program is None:
        raise ValueError(message("run", "a program, -c COMMAND or -m MODULE", "none", "Name it after the options."))
    program = words([options.program, *options.arguments])
    if options.distributed:
        program = with_global_arrays(program)
    if options.hostfile and not Path(options.hostfile).is_file():
        raise FileNotFoundError(message("run", "a hostfile", f"{options.hostfile!r}", "Check its path."))
    variables = {}
    if options.devices_per_rank is not None:
        variables["JAX_NUM_CPU_DEVICES"] = str(options.devices_per_rank)
    if options.restarts:
        variables[restarts.RESTART] = "0"
    system = batch_system(environ)
    if system is not None:
        system.check(environ, names_hosts=bool(options.hosts))
        variables |= {**system.launcher_variables(environ), **(system.overlap_variables if options.restarts else {})}
    rank = [sys.executable, "-m", "pycollective.run.rank_wrapper", "--bind", options.bind, "--", *program]
    carried = [name for name in {**environ, **variables} if name.startswith(_CARRIED)]
    job = Job(
        options.ranks,
        rank,
        options.hosts,
        options.hostfile,
        options.label,
        options.oversubscribe,
        carried,
        options.elastic,
    )
    if not options.oversubscribe:
        _check_capacity(job, system, environ)
    library = loaded_library()
    launcher = _choose_launcher(options.mpi, library, environ)
    if options.elastic and not (isinstance(launcher, Library) and launcher.can_lose_ranks):
        got = launcher.name if isinstance(launcher, Library) else launcher.option
        remedy = "Leave --elastic out: --restarts starts the job again when a rank has died."
        raise ValueError(message("run", f"the mpiexec of {ELASTIC} for --elastic", got, remedy))
    capacity = replace(job, hosts=_named_hosts(options)).capacity()
    lost_host = launcher.lost_host if isinstance(launcher, Library) else ""
    if not capacity and (options.restarts or lost_host):
        capacity = dict(_allocated_hosts(job, system, environ))
    if isinstance(launcher, Library):
        job = _over_all_hosts(job, library, system, environ)
        if len(capacity) > 1:
            variables |= {name: value for name, value in launcher.keepalive_variables.items() if name not in environ}
            if lost_host:
                patterns = FaultPatterns(lost_host, "|".join((_RANK_ENDS_JOB, *launcher.job_failure)))
                return restarts.Start(job, launcher.command_line, variables, capacity, patterns)
        return restarts.Start(job, launcher.command_line, variables, capacity)
    return restarts.Start(job, lambda job: launcher.command_line(job, library, environ), variables, capacity)


def _check_capacity(job: Job, system: type[BatchSystem] | None, environ: Mapping[str, str]) -> None:
    """Refuses more ranks than --hosts, the allocation or this host can take, where that is known."""
    numbers = [ranks for _, ranks in job.hosts]
    capacity = [] if system is None else system.capacity(environ)
    share = "or say --oversubscribe: ranks that share a core are slow."
    if numbers and None not in numbers:
        limit = sum(filter(None, numbers))
        expected, remedy = f"{limit} ranks on {len(numbers)} hosts", "Start fewer, or give more in --hosts."
    elif system is not None and capacity and not job.hosts:
        limit = sum(capacity)
        expected, remedy = f"{limit} ranks in this allocation", f"Start fewer, {system.how_to_get_more}, {share}"
    elif system is None and not (job.hosts or job.hostfile):
        limit = len(physical_cores(os.sched_getaffinity(0)))
        expected, remedy = f"{limit} ranks for {limit} cores", f"Start fewer, on more --hosts, {share}"
    else:
        return
    if job.ranks > limit:
        raise ValueError(message("run", f"at most {expected}", job.ranks, remedy))


def _batch_launchers() -> list[type[BatchLauncher]]:
    return [launcher for launcher in started_by.LAUNCHERS if issubclass(launcher, BatchLauncher)]


def _choose_launcher(wish: str | None, library: Library, environ: Mapping[str, str]) -> Library | type[BatchLauncher]:
    """The launcher that the user asks for, or the mpiexec of ``library``, or the batch system's launcher."""
    launchers = _batch_launchers()
    for launcher in launchers:
        if wish == launcher.option:
            return launcher
    if wish is not None:
        mpiexec = identify_mpiexec(wish)
        if mpiexec is None or not mpiexec.can_start(library):
            got = f"{wish} of {mpiexec.name}" if mpiexec else f"{wish}, which does not say what it is"
            remedy = f"mpi4py loads {library.path or library.name}: name its mpiexec, or leave --mpi out."
            raise ValueError(message("run", f"an mpiexec of {library.name}", got, remedy))
        return mpiexec
    for launcher in launchers:
        if launcher.must_start(library, environ):
            return launcher
    try:
        return mpiexec_of(library, environ)
    except FileNotFoundError:
        # Some clusters have no mpiexec, and the batch system's launcher instead.
        for launcher in launchers:
            if launcher.can_start(library, environ):
                return launcher
        raise


def _over_all_hosts(job: Job, library: Library, system: type[BatchSystem] | None, environ: Mapping[str, str]) -> Job:
    """Spreads a job over all hosts of the allocation, since an mpiexec would fill the first ones."""
    hosts = [] if job.hosts or job.hostfile else _allocated_hosts(job, system, environ)
    if len({number for _, number in hosts}) > 1 and not library.takes_unequal_hosts:
        return job
    return replace(job, hosts=hosts) if hosts else job


def _allocated_hosts(job: Job, system: type[BatchSystem] | None, environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """The hosts of an allocation of several, with the number of ranks of each.

    Each host gets the tasks that the user has asked for, or where ``--ranks`` is another number as equal a number as
    can be.
    """
    capacity = [] if system is None else system.capacity(environ)
    if system is None or len(capacity) < 2:
        return []
    tasks = system.tasks(environ)
    numbers = tasks if sum(tasks) == job.ranks else spread(job.ranks, capacity)
    return list(zip(system.host_names(environ), numbers, strict=False))


def words(command: Sequence[str]) -> list[str]:
    """The command of a program: with Python before a file that is not executable.

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


_JOINED = re.compile(r"-[bBdEiIOPqsSuvx]*[mc]")
"""-m or -c joined to other options of Python, or to its value."""


def with_global_arrays(program: Sequence[str]) -> list[str]:
    """The command that runs a Python program with :func:`pycollective.distributed.initialize` for JAX's.

    Raises:
        ValueError: it is no Python program, or its options are joined.

    Example:
        >>> with_global_arrays(["/usr/bin/python3", "-u", "train.py"])
        ['/usr/bin/python3', '-u', '-m', 'pycollective.distributed', 'train.py']
    """
    runner = ["-m", "pycollective.distributed"]
    if Path(program[0]).name.startswith("python"):
        first = 1  # the first word that is no option of Python's own
        while first < len(program) and program[first].startswith("-") and program[first] not in ("-m", "-c"):
            if _JOINED.match(program[first]):
                expected = "-m MODULE or -c COMMAND as words of their own after --distributed"
                remedy = "Write python -u -m MODULE for python -um MODULE."
                raise ValueError(message("run", expected, program[first], remedy))
            first += 2 if program[first] in ("-W", "-X") else 1
        return [*program[:first], *runner, *program[first:]]
    with open(program[0], "rb") as file:
        if not re.match(rb"#!.*python", file.readline()):
            remedy = "Leave --distributed out, and let the program call pycollective.distributed.initialize()."
            raise ValueError(message("run", "a Python program after --distributed", program[0], remedy))
    return [sys.executable, *runner, *program]


def _named_hosts(options: argparse.Namespace) -> Sequence[tuple[str, int | None]]:
    """The hosts that ``--hosts`` or ``--hostfile`` lists."""
    return parse_hostfile(Path(options.hostfile).read_text()) if options.hostfile else options.hosts
