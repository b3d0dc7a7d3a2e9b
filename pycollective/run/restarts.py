"""Starts a job again when it has ended by a fault, on the hosts that answer."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pycollective.launch.job import Job, spread
from pycollective.run import leftovers
from pycollective.run.supervise import Ended, FaultPatterns, Supervisor, end_children

RESTART = "PYCOLLECTIVE_RESTART"
"""The variable that tells each rank how often the job has been started before."""

_PERMANENT_FAILURES = {
    2: "by status 2 a program says that it was called wrongly",
    126: "by status 126 a rank says that its program may not be run",
    127: "by status 127 a rank says that there is no such program",
}
"""Exit statuses after which another attempt would end alike."""

_PROBE = ["sleep", "1"]
"""What a host is asked to run. Open MPI 5's launcher may wait for ever for a process that ends at once: of 8 that ran
``true`` on a host of a busy machine 3 did, of 16 that slept 0.3 s none."""

_PROBE_TIMEOUT_S = 20
_PROBES_AT_ONCE = 32
"""How long a host may take to start a process, and how many hosts are asked at a time."""


@dataclass(frozen=True)
class Start:
    """How to start a job, on its hosts or on some of them.

    Attributes:
        job: the job.
        command_line: the launcher's command line for a job.
        variables: what the launcher's environment has in addition.
        capacity: the hosts, each with the number of ranks that it can take; empty for this host, or where they are
            unknown.
        fault_patterns: what stands on the launcher's standard error after a fault, if its exit status does not tell
            each fault.
    """

    job: Job
    command_line: Callable[[Job], list[str]]
    variables: Mapping[str, str]
    capacity: Mapping[str, int]
    fault_patterns: FaultPatterns | None = None


def run(start: Start, restarts: int, min_ranks: int, environ: Mapping[str, str]) -> int:
    """Runs a job, and starts it again when it has ended by a fault.

    Args:
        start: how to start it.
        restarts: how often it starts again, at most.
        min_ranks: with how many ranks, at least.
        environ: the variables of the launcher.

    Returns:
        The exit status of the last attempt.
    """
    supervisor = Supervisor()
    environ = {**environ, **start.variables}
    job = start.job
    for attempt in itertools.count():
        before = leftovers.shared_memory_files()
        ended = supervisor.run(start.command_line(job), {**environ, RESTART: str(attempt)}, start.fault_patterns)
        if ended.status == 0:
            return 0
        end_children()
        leftovers.remove_shared_memory_files(before)
        leftovers.remove_session(ended.launcher)
        if ended.stopped or restarts == 0:
            return ended.status
        reason = reason_to_stop(ended.status, attempt, restarts)
        gone = [] if reason else _unreachable_hosts(start, supervisor, environ)
        if supervisor.pending_stop_signal() is not None:
            return ended.status
        if not reason:
            job = fit_to_hosts(start.job, start.capacity, gone)
            if job.ranks < min_ranks:
                reason = f"the hosts that remain can take {_count_of_ranks(job.ranks)}, and --min-ranks is {min_ranks}"
            else:
                reason = _launcher_error(start, job)
        sys.stderr.write(f"pycollective: attempt {attempt + 1} of {restarts + 1} {describe_attempt(ended, gone)}. ")
        if reason:
            sys.stderr.write(f"Not starting again: {reason}.\n")
            return ended.status
        on = f" on {', '.join(name for name, _ in job.shares())}" if gone else ""
        sys.stderr.write(f"Starting again with {_count_of_ranks(job.ranks)}{on}.\n")
        sys.stderr.flush()
    raise AssertionError("the loop ends by a return")


def reason_to_stop(status: int, attempt: int, restarts: int) -> str:
    """Why a job that has ended with this status does not start again, on whichever hosts; empty if it does.

    Args:
        status: that of the attempt.
        attempt: the number of the attempt that has ended, from 0.
        restarts: how often the job starts again, at most.

    Example:
        >>> reason_to_stop(137, 0, 3), reason_to_stop(137, 3, 3)
        ('', '--restarts 3 are used up')
    """
    return _PERMANENT_FAILURES.get(status, f"--restarts {restarts} are used up" if attempt >= restarts else "")


def describe_attempt(ended: Ended, gone: Sequence[str]) -> str:
    """How an attempt ended.

    Example:
        >>> describe_attempt(Ended(137, False, 12.34, 4711), [])
        'ended with status 137 (SIGKILL) after 12.3 s'
        >>> describe_attempt(Ended(1, False, 2.0, 4711), ["alpha", "beta"])
        'ended with status 1 after 2.0 s, and alpha, beta no longer answer'
    """
    name = f" ({signal.Signals(number).name})" if (number := ended.status - 128) in list(signal.Signals) else ""
    lost = f", and {', '.join(gone)} no longer answer{'s' if len(gone) == 1 else ''}" if gone else ""
    return f"ended with status {ended.status}{name} after {ended.seconds:.1f} s{lost}"


def fit_to_hosts(job: Job, capacity: Mapping[str, int], gone: Sequence[str]) -> Job:
    """The job on the hosts that are left: with as many ranks as before, or as many as these hosts can take.

    Example:
        >>> job = Job(4, (), [("a", None), ("b", None)])
        >>> left = fit_to_hosts(job, job.capacity(), ["b"])
        >>> left.ranks, left.hosts
        (2, [('a', 2)])
    """
    if not gone:
        return job
    left = {name: number for name, number in capacity.items() if name not in gone}
    ranks = min(job.ranks, sum(left.values()))
    shares = zip(left, spread(ranks, list(left.values())), strict=True)
    return replace(job, ranks=ranks, hosts=[(name, number) for name, number in shares if number > 0], hostfile=None)


def _unreachable_hosts(start: Start, supervisor: Supervisor, environ: Mapping[str, str]) -> list[str]:
    """Those hosts on which the launcher cannot start a process.

    The launcher itself tries it, twice: it knows how to reach a host, and its part on that host must reach it, too.
    """
    one = replace(start.job, ranks=1, command=_PROBE, hostfile=None, label=False)
    commands = {name: start.command_line(replace(one, hosts=[(name, 1)])) for name in start.capacity}
    silent = list(start.capacity)
    for _ in range(2):
        asked, silent = silent, []
        for first in range(0, len(asked), _PROBES_AT_ONCE):
            some = {name: commands[name] for name in asked[first : first + _PROBES_AT_ONCE]}
            answers = supervisor.run_side_by_side(some, environ, _PROBE_TIMEOUT_S)
            silent += [name for name in some if not answers[name]]
    return silent


def _launcher_error(start: Start, job: Job) -> str:
    """Why the launcher cannot start a job; empty if it can."""
    try:
        start.command_line(job)
    except ValueError as error:
        return str(error)
    return ""


def _count_of_ranks(number: int) -> str:
    """A number of ranks in words."""
    return f"{number} rank{'s' * (number != 1)}"
