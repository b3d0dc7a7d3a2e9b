"""Which process is a rank, and which a child of one: a worker of a data loader, say.

A rank leaves a variable in its environment, and its children inherit it. MPI belongs to the rank: a child that started
it again would be another rank 0 of 1, or would speak to the launcher in the rank's name.
"""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import signal
import sys
import termios
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import parent_process
from typing import NamedTuple

from pycollective.errors import message
from pycollective.launch.launchers import is_rank

_VARIABLE = "PYCOLLECTIVE_RANK"

# They differ between two ranks, of one job or of two.
_NAMES_OF_A_RANK = (
    "PMI_RANK",
    "PMI_FD",
    "PMI_PORT",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "FLUX_JOB_ID",
    "FLUX_TASK_RANK",
)

_LONGEST_READ_S = 2.0
"""How long a process waits for its launcher to read what it wrote."""

_PASSING_ON_S = 0.1
"""And for the launcher's part on this host to pass it on."""


class Parent(NamedTuple):
    """The rank that made this process.

    Attributes:
        pid: its process.
        name: "rank r of n", or "a rank" before it has started MPI.
    """

    pid: int
    name: str


class _Own:
    forked = False  # from a rank
    rank: int | None = None  # the process that called mark_rank, this one or the one that it was forked from


def _launched_as(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in _NAMES_OF_A_RANK if name in environ}


def mark_rank(rank: int, size: int) -> None:
    """Makes this process known as a rank to its children."""
    if _Own.rank is None:
        os.register_at_fork(after_in_child=_mark_forked)
    _Own.rank = os.getpid()
    mark = {"pid": os.getpid(), "name": f"rank {rank} of {size}", "launched_as": _launched_as(os.environ)}
    os.environ[_VARIABLE] = json.dumps(mark)


def _mark_forked() -> None:
    _Own.forked = True


def is_forked() -> bool:
    """Whether this process was forked from a rank: MPI has started here, and is another's."""
    return _Own.forked


def parent_rank(environ: Mapping[str, str] = os.environ) -> Parent | None:
    """The rank whose child this process is; None for a process that may be a rank.

    A program that a rank starts is its child if it has the rank's place at the launcher. Without a launcher, or under
    one of its own, it is none.

    Example:
        >>> parent_rank({}) is None
        True
        >>> mark = '{"pid": 1, "name": "rank 0 of 2", "launched_as": {"PMI_RANK": "0"}}'
        >>> parent_rank({"PYCOLLECTIVE_RANK": mark, "PMI_RANK": "0"})
        Parent(pid=1, name='rank 0 of 2')
        >>> parent_rank({"PYCOLLECTIVE_RANK": mark, "PMI_RANK": "1"}) is None
        True
    """
    is_worker = parent_process() is not None or _is_importing_main()
    if _VARIABLE not in environ:
        return Parent(os.getppid(), "a rank") if is_worker and is_rank(environ) else None
    mark = json.loads(environ[_VARIABLE])
    if mark["pid"] == os.getpid():
        return None
    is_same_place = mark["launched_as"] and mark["launched_as"] == _launched_as(environ)
    if is_worker or mark["pid"] == _Own.rank or is_same_place:
        return Parent(mark["pid"], mark["name"])
    return None


def refuse_child(where: str) -> None:
    """Raises, speaking for ``where``, if this process is a child of a rank.

    A worker that ends while it imports the program's main module is replaced by the next one, for ever
    (:class:`multiprocessing.pool.Pool`). So it ends the rank that made it too, whose launcher ends the others.

    Raises:
        RuntimeError: it is.
    """
    parent = parent_rank()
    if parent is None:
        return
    error = message(
        where,
        "a rank",
        f"process {os.getpid()}, a child of {parent.name}",
        "Leave collectives to the rank, and put what starts them under 'if __name__ == \"__main__\":': a worker of "
        f"multiprocessing imports the main module again. A job of its own needs {_VARIABLE} unset.",
    )
    if _is_importing_main():
        sys.stderr.write(f"{error} Ending {parent.name}.\n")
        wait_until_read()
        with suppress(ProcessLookupError):  # another worker was first
            os.kill(parent.pid, signal.SIGTERM)
    raise RuntimeError(error)


def _is_importing_main() -> bool:
    """Whether multiprocessing runs the main module in a process that it spawned: it has this name there."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            return True
        frame = frame.f_back
    return False


def wait_until_read() -> None:
    """Returns when the launcher has read what this process wrote: it may throw away what it has not."""
    deadline = time.monotonic() + _LONGEST_READ_S
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, closed, or nothing that can be asked
            stream.flush()
            while int.from_bytes(fcntl.ioctl(stream.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder) > 0:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
    time.sleep(_PASSING_ON_S)
