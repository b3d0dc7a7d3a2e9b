"""Which process is a rank, and which is a child of a rank, such as a worker of a data loader.

A rank sets a variable in its environment, which its children inherit. MPI belongs to the rank: a child that started MPI
again would be another rank 0 of 1, or would speak to the launcher in the rank's name.
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
from typing import NamedTuple

from pycollective.errors import message
from pycollective.launch.started_by import is_rank, rank_variables

_VARIABLE = "PYCOLLECTIVE_RANK"

READ_TIMEOUT_S = 2.0
"""How long a process waits until its launcher has read what it wrote."""

FORWARDING_S = 0.1
"""How long it waits afterwards, until the launcher's part on this host has forwarded this to the launcher."""


class Parent(NamedTuple):
    """The rank whose child this process is.

    Attributes:
        pid: the rank's process number.
        name: "rank r of n", or "a rank" before the rank has started MPI.
    """

    pid: int
    name: str


class _State:
    """What this process knows about itself.

    Attributes:
        forked: whether it was forked from a rank.
        marked: the process that called mark_rank: this one, or the one from which this one was forked.
    """

    forked = False
    marked: int | None = None


def mark_rank(rank: int, size: int) -> None:
    """Tells the children of this process that it is a rank."""
    if _State.marked is None:
        os.register_at_fork(after_in_child=_mark_forked)
    _State.marked = os.getpid()
    mark = {"pid": os.getpid(), "name": f"rank {rank} of {size}", "launched_as": rank_variables(os.environ)}
    os.environ[_VARIABLE] = json.dumps(mark)


def _mark_forked() -> None:
    _State.forked = True


def is_forked() -> bool:
    """Whether this process was forked from a rank. MPI has started in it, but belongs to the rank."""
    return _State.forked


def parent_rank(environ: Mapping[str, str] = os.environ) -> Parent | None:
    """The rank whose child this process is; None for a process that may be a rank.

    A program that a rank starts is the rank's child if it has the rank's own variables of the launcher. Without a
    launcher, or when another launcher has started the program, it is no child.

    Example:
        >>> parent_rank({}) is None
        True
        >>> mark = '{"pid": 1, "name": "rank 0 of 2", "launched_as": {"PMI_RANK": "0"}}'
        >>> parent_rank({"PYCOLLECTIVE_RANK": mark, "PMI_RANK": "0"})
        Parent(pid=1, name='rank 0 of 2')
        >>> parent_rank({"PYCOLLECTIVE_RANK": mark, "PMI_RANK": "1"}) is None
        True
    """
    is_worker = _is_of_multiprocessing() or _is_importing_main()
    if _VARIABLE not in environ:
        return Parent(os.getppid(), "a rank") if is_worker and is_rank(environ) else None
    mark = json.loads(environ[_VARIABLE])
    if mark["pid"] == os.getpid():
        return None
    has_its_variables = mark["launched_as"] and mark["launched_as"] == rank_variables(environ)
    if is_worker or mark["pid"] == _State.marked or has_its_variables:
        return Parent(mark["pid"], mark["name"])
    return None


def refuse_child(where: str) -> None:
    """Raises an error of the function ``where`` if this process is a child of a rank.

    When a worker ends while it imports the program's main module, :class:`multiprocessing.pool.Pool` starts the next
    worker, for ever. So such a worker also ends the rank that started it; the launcher then ends the other ranks.

    Raises:
        RuntimeError: this process is a child of a rank.
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
        with suppress(ProcessLookupError):  # another worker has ended it already
            os.kill(parent.pid, signal.SIGTERM)
    raise RuntimeError(error)


def _is_of_multiprocessing() -> bool:
    """Whether multiprocessing has started this process. Then it is imported; a rank need not read its files."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def _is_importing_main() -> bool:
    """Whether multiprocessing is importing the main module, which it calls ``__mp_main__``, into a spawned process."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            return True
        frame = frame.f_back
    return False


def wait_until_read() -> None:
    """Waits until the launcher has read what this process wrote. It may throw away what it has not read.

    ``WaitUntilRead`` (``native/monitor/process.h``) does the same, with the same times, for the monitor's threads,
    which must not need the interpreter. This function is for processes that may not have loaded the native library: a
    rank before ``init``, a worker that a rank has started.
    """
    deadline = time.monotonic() + READ_TIMEOUT_S
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # no stream, a closed one, or one without a file
            stream.flush()
            while int.from_bytes(fcntl.ioctl(stream.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder) > 0:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
    time.sleep(FORWARDING_S)
