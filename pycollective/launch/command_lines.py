"""How each launcher wants to be asked."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from pycollective.errors import message
from pycollective.launch.libraries import Library


@dataclass(frozen=True)
class Job:
    """What to start, whoever starts it.

    Attributes:
        ranks: how many.
        command: of each.
        hosts: names, each with its number of ranks or None; empty: this one, or those of the allocation.
        hostfile: a file of hosts instead, in the launcher's own form.
        label: each line of output says its rank.
        oversubscribe: more ranks than cores are meant.
        carried: names of variables that the ranks on all hosts need.
    """

    ranks: int
    command: Sequence[str]
    hosts: Sequence[tuple[str, int | None]] = ()
    hostfile: str | None = None
    label: bool = False
    oversubscribe: bool = False
    carried: Sequence[str] = ()


def shares(job: Job) -> list[tuple[str, int]]:
    """The hosts of a job, each with its ranks: what it says, or as equal as can be.

    Example:
        >>> shares(Job(5, (), [("a", None), ("b", None)]))
        [('a', 3), ('b', 2)]
    """
    unsaid = sum(slots is None for _, slots in job.hosts)
    left = max(job.ranks - sum(slots or 0 for _, slots in job.hosts), 0)
    rest = iter(spread(left, [left] * unsaid))
    parts = [(name, next(rest) if slots is None else slots) for name, slots in job.hosts]
    return [(name, share) for name, share in parts if share > 0]


def spread(ranks: int, room: Sequence[int]) -> list[int]:
    """As equal a number on each host as its room allows; beyond all room, as equal as can be.

    Example:
        >>> spread(5, [4, 1, 1]), spread(3, [4, 4]), spread(5, [1, 1])
        ([3, 1, 1], [2, 1], [3, 2])
    """
    hosts = [(has <= 0, 0, i) for i, has in enumerate(room)]  # full ones last, then those with the fewest ranks first
    heapq.heapify(hosts)
    for _ in range(ranks if hosts else 0):
        _, number, i = hosts[0]
        heapq.heapreplace(hosts, (number + 1 >= room[i], number + 1, i))
    return [number for _, number, _ in sorted(hosts, key=lambda host: host[2])]


def each_host(job: Job) -> int:
    """The ranks of each host, for launchers that know one number alone.

    Raises:
        ValueError: they differ.
    """
    numbers = {number for _, number in shares(job)}
    if len(numbers) > 1:
        got = ", ".join(f"{number} on {name}" for name, number in shares(job))
        remedy = "Choose other --ranks or --hosts, or another launcher with --mpi."
        raise ValueError(message("run", "as many ranks on each host for this launcher", got, remedy))
    return numbers.pop()


def mpiexec(launcher: Library, job: Job) -> list[str]:
    """The command line for an mpiexec. Ranks bind themselves (``rank.py``), alike under all of them."""
    line = [launcher.path, "-n", str(job.ranks)]
    where = ",".join(f"{name}:{slots}" for name, slots in shares(job))
    if launcher.family == "Open MPI":
        line += ["--bind-to", "none"]
        line += ["--host", where] if where else ["--hostfile", job.hostfile] if job.hostfile else []
        if job.label:
            line += ["--output", "tag"] if launcher.major >= 5 else ["--tag-output"]
        if job.oversubscribe:
            line += ["--oversubscribe"]
        for name in job.carried:  # others stay on this host
            line += ["-x", name]
    else:
        line += ["-genv", "I_MPI_PIN", "off"] if launcher.family == "Intel MPI" else ["-bind-to", "none"]
        if launcher.family == "Intel MPI" and where:
            line += ["-hosts", ",".join(name for name, _ in shares(job)), "-ppn", str(each_host(job))]
        elif where:
            line += ["-hosts", where]
        line += ["-f", job.hostfile] if job.hostfile else []
        line += ["-prepend-rank"] if job.label else []
    return [*line, *job.command]


def srun(pmi: str, job: Job, *, nodes: int = 0) -> list[str]:
    """The command line for srun inside an allocation of ``nodes``, with the process management interface ``pmi``."""
    line = ["srun", f"--mpi={pmi}", "-n", str(job.ranks), "--cpu-bind=none", "--kill-on-bad-exit=1"]
    line += ["--distribution=block"]  # else what a shell of srun's has inherited
    if job.hosts:
        names = [name for name, _ in shares(job)]
        line += ["-w", ",".join(names), "-N", str(len(names)), f"--ntasks-per-node={each_host(job)}"]
    elif nodes > 1 and job.ranks % nodes == 0:  # else Slurm fills the first nodes
        line += ["-N", str(nodes), f"--ntasks-per-node={job.ranks // nodes}"]
    line += ["--label"] if job.label else []
    line += ["--oversubscribe", "--overcommit"] if job.oversubscribe else []
    return [*line, *job.command]
