"""The monitor of a rank: native threads that watch its waits, and exchange messages with the other ranks without MPI.

This module gives them what they need at the start: the addresses of all processes, and a secret of the job.
``native/monitor/monitor.h`` describes their work.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from pycollective.config import DEFAULT_TIMEOUT_S, config
from pycollective.errors import message
from pycollective.faults import stacks
from pycollective.launch.addresses import LOOPBACK, addresses_of_this_host
from pycollective.launch.started_by import names_lost_ranks
from pycollective.transport import failures, watch
from pycollective.transport.mpi import MPI

_WARNING_S = 60.0
"""How long a call lasts before a report of all ranks is printed."""

_SECRET_BYTES = 64


def start(mpi: MPI.Intracomm, limit: float | None) -> None:
    """Starts the monitor if there are several ranks. All ranks of ``mpi`` must make this call.

    Args:
        mpi: the ranks.
        limit: the seconds that a call may last; None for the default, infinity for no limit.
    """
    if mpi.size == 1:
        return
    identity = _host_identity()
    host = hashlib.sha256(repr(identity).encode()).digest()[:16]
    hosts = mpi.allgather(host)
    hosts_of_job = len(set(hosts))
    sockets, addresses = _listen(hosts_of_job)
    own = watch.Process(addresses, os.getpid(), _start_time_of_this_process(), hosts.index(host), identity[0])
    of_all_ranks = mpi.allgather((MPI.COMM_WORLD.rank, own))
    processes = [watch.NO_PROCESS] * MPI.COMM_WORLD.size
    for rank, process in of_all_ranks:
        processes[rank] = process._replace(addresses=_addresses_for(process, own.host))
    may_lose_ranks = (
        not failures.describe_missing_support()
    )  # then a program may continue, and it names the lost ranks itself
    secret = mpi.bcast(secrets.token_bytes(_SECRET_BYTES) if mpi.rank == 0 else None)
    folder = mpi.bcast(_records_folder() if mpi.rank == 0 else None)
    warn_s, timeout_s = _warning_and_timeout(limit)
    monitoring = watch.Monitoring(
        MPI.COMM_WORLD.rank,
        processes,
        sockets,
        secret,
        warn_s,
        timeout_s,
        folder,
        may_lose_ranks=may_lose_ranks,
        says_deaths=not may_lose_ranks and not names_lost_ranks(os.environ, hosts_of_job),
    )
    try:
        stacks.start()
        watch.start_monitor(monitoring)
    except RuntimeError as error:
        wanted, remedy = "threads that watch this rank's waits", "Raise the limits of this host (ulimit -u, ulimit -v)."
        raise RuntimeError(message("init", wanted, str(error), remedy, rank=mpi.rank, size=mpi.size)) from error


def set_limit(limit: float | None) -> None:
    """Changes the limit of :func:`start`."""
    watch.set_monitor_timeout(*_warning_and_timeout(limit))


def _listen(hosts_of_job: int) -> tuple[list[int], list[tuple[str, int]]]:
    """The sockets on which this process listens, and their addresses.

    The ranks of its own host reach it by a Unix socket, which tells it their user; those of other hosts by TCP.
    """
    of_host = watch.listen_on(name := f"@pycollective-{secrets.token_hex(16)}")
    found = [] if of_host is None else [(name, of_host)]
    loopback = [] if found else [LOOPBACK]  # a sandbox may have no Unix sockets
    others = addresses_of_this_host() if hosts_of_job > 1 else loopback
    found += [(address, at) for address in others if (at := watch.listen_on(address)) is not None]
    return [socket for _, (socket, _) in found], [(address, port) for address, (_, port) in found]


def _addresses_for(process: watch.Process, host: int) -> list[tuple[str, int]]:
    """The addresses by which a rank on a host reaches a process.

    Example:
        >>> process = watch.Process([("@name", 0), ("10.0.0.1", 4000)], pid=1, started=1, host=0, host_name="alpha")
        >>> _addresses_for(process, 0), _addresses_for(process, 1)
        ([('@name', 0)], [('10.0.0.1', 4000)])
    """
    of_host = [(name, port) for name, port in process.addresses if name.startswith("@")]
    return of_host if of_host and process.host == host else [at for at in process.addresses if at not in of_host]


def _warning_and_timeout(limit: float | None) -> tuple[float, float]:
    """The seconds of waiting after which the monitor prints a report, and after which it ends the job; 0 for never.

    Example:
        >>> _warning_and_timeout(None), _warning_and_timeout(10.0), _warning_and_timeout(math.inf)
        ((60.0, 600.0), (0.0, 10.0), (60.0, 0.0))
    """
    limit = DEFAULT_TIMEOUT_S if limit is None else limit
    return _WARNING_S if limit > _WARNING_S else 0.0, 0.0 if math.isinf(limit) else limit


def _host_identity() -> tuple[str, ...]:
    """The host's name, and what distinguishes the containers and network namespaces of one machine."""
    facts = [socket.gethostname()]
    for fact in (
        Path("/proc/sys/kernel/random/boot_id").read_text,
        Path("/proc/self/ns/net").readlink,
        Path("/proc/self/ns/pid").readlink,
    ):
        with suppress(OSError):  # some sandboxes hide these files
            facts.append(str(fact()))
    return tuple(facts)


def _start_time_of_this_process() -> int:
    """Field 22 of ``/proc/self/stat``; the name in field 2 may hold anything."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[22 - 3])


def _records_folder() -> str:
    """Where the ranks write their records."""
    if not config.records:
        return ""
    job = os.environ.get("SLURM_JOB_ID")
    return str(Path(config.records).absolute()) + (f"-{job}" if job else "")


def stop() -> None:
    """Ends the monitor, before this process ends. A second call does nothing."""
    watch.stop_monitor()
    stacks.stop()
