"""The end of a rank: an error on one rank ends all; a clean end flushes pending work and waits for the others.

What Python lets a process see of its end, and what a rank does then:

- an exception that nothing catches, in the main thread or another: it ends all ranks;
- an exit with a code other than 0 (``sys.exit(3)``, ``raise SystemExit``): it ends all ranks with that code, unless
  they end by themselves within :data:`_PATIENCE_S`;
- a normal end: it finishes its work, and waits for the other ranks;
- an exception in a cell of IPython, or of a notebook: it says which rank that was; the session goes on;
- an exception that Python ignores, in a finalizer, ``__del__`` or an exit handler: it says which rank goes on, as a
  program of one process does.

All of it belongs to the process that has started MPI. In a forked child the hooks do nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from pycollective.errors import message
from pycollective.launch.child_processes import is_forked, wait_until_read
from pycollective.transport.mpi import MPI

_HEAD_START_S, _STEP_S = 0.5, 0.05
"""How much earlier rank 0 speaks than rank 1, and rank r than rank r + 1, when all of them raise: Abort then silences
the others."""


_PATIENCE_S = 5.0
"""How long a rank that exits with a code waits for the others to end by themselves, as when tests fail on all ranks."""


_NOTICE_S = 10.0
"""How long a rank that has ended waits for the others before it says so."""


GRACE_S = 2.0
"""Between a rank's report of a wait and the end of the job, so that the other waiting ranks can report too."""


class _Own:
    """What this process knows of its end."""

    sees_errors = False
    status: int | None = None  # that it will have, as far as Python has told
    stale: object = None  # the last exception that was shown before there were hooks
    meeting: MPI.Intracomm | None = None  # of the ranks that wait for each other


# Errors -----------------------------------------------------------------------------------------------------


def end_all_on_error() -> None:
    """Installs the hooks that see this process fail; once."""
    if _Own.sees_errors:
        return
    _Own.sees_errors = True
    previous, previous_in_thread, previous_ignored = sys.excepthook, threading.excepthook, sys.unraisablehook
    _Own.stale = getattr(sys, "last_value", None)

    def raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _Own.status = 1
        _end_all(functools.partial(previous, kind, error, trace), "raised")

    def raised_in_thread(args: threading.ExceptHookArgs) -> None:
        if issubclass(args.exc_type, SystemExit):  # which ends that thread alone
            previous_in_thread(args)
        else:
            name = "one that is gone" if args.thread is None else repr(args.thread.name)
            _end_all(functools.partial(previous_in_thread, args), f"raised in a thread, {name}")

    def ignored(unraisable: sys.UnraisableHookArgs) -> None:
        if _is_one_of_several():
            sys.stderr.write(f"pycollective: {_place()} goes on after this exception, which Python ignores:\n")
        previous_ignored(unraisable)

    sys.excepthook, threading.excepthook, sys.unraisablehook = raised, raised_in_thread, ignored
    _see_exit_codes()
    _see_cells()


def _is_one_of_several() -> bool:
    return not is_forked() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1


def _place() -> str:
    return f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}"


def _end_all(show: Callable[[], object], what: str) -> None:
    """Shows an error of this process; then ends all ranks if this is one of several."""
    if not _is_one_of_several():
        show()
        return
    rank = MPI.COMM_WORLD.rank
    if rank > 0:
        time.sleep(_HEAD_START_S + _STEP_S * min(rank, 20))
    sys.stdout.flush()
    sys.stderr.write(f"pycollective: {_place()} {what}; ending all ranks.\n")
    show()
    abort()


def _see_cells() -> None:
    """Lets a session of IPython, or a notebook, say on which rank a cell raised. The session shows it on no other."""
    ipython = sys.modules.get("IPython")
    if ipython is None or (shell := ipython.get_ipython()) is None:
        return

    def ran(result: Any) -> None:
        if not result.success and _is_one_of_several():
            sys.stderr.write(f"pycollective: {_place()}: a cell has raised; ranks that wait for this one wait on.\n")

    shell.events.register("post_run_cell", ran)


def _see_exit_codes() -> None:
    """Lets :class:`_Own` know the code of a ``SystemExit`` that ends this process.

    Python calls no hook for one, and forgets it before exit handlers run. But it asks the exception for its ``code``,
    while no Python function runs. So a property stands in the place of that attribute.
    """
    attributes: Any = next(part for part in gc.get_referents(SystemExit.__dict__) if isinstance(part, dict))
    member = attributes["code"]

    def code(self: SystemExit) -> object:
        value = member.__get__(self)
        if sys._getframe().f_back is None:
            _Own.status = _status(value)
        return value

    attributes["code"] = property(code, member.__set__, doc=member.__doc__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))  # what C calls after a change of attributes
    if sys.version_info < (3, 12):  # there sys.exit makes no exception but a pair of type and code, until one is needed
        original = sys.exit
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is original:
                    setattr(module, name, _exit)


def _exit(status: Any = None, /) -> NoReturn:
    """Exits the interpreter by raising ``SystemExit(status)``: what ``sys.exit`` says of itself."""
    raise SystemExit(status)


def _status(code: object) -> int:
    """The exit status for an exit code.

    Example:
        >>> [_status(code) for code in (None, 0, 3, -1, "a message")]
        [0, 0, 3, 255, 1]
    """
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def abort(status: int = 1) -> NoReturn:
    """Ends all ranks, once the launcher has read what this one wrote."""
    wait_until_read()
    if MPI.COMM_WORLD.size > 1:
        MPI.COMM_WORLD.Abort(status)
    os._exit(status)  # MPICH's Abort returns when the launcher is slow to end this process


# The end ----------------------------------------------------------------------------------------------------


def end_in_order(flush: Callable[[], None], limit_s: float | None) -> None:
    """Installs an exit handler, behind JAX's and mpi4py's own: these run in the opposite order.

    Args:
        flush: waits until the dispatched programs have run, and raises their errors.
        limit_s: how long a rank that has ended waits for the others; None for ever.
    """
    atexit.register(_end, flush, limit_s)


def meet_at_exit(world: MPI.Intracomm) -> None:
    """Lets this rank wait at exit until all have come there. All ranks must make this call."""
    if _Own.meeting is None:
        _Own.meeting = world.Dup()


def _end(flush: Callable[[], None], limit_s: float | None) -> None:
    """Ends this rank in order.

    MPI_Finalize would wait for the others as well, but in silence and at full speed: a rank that left early while
    others still wait for it in a collective would look like any hang.
    """
    status = _Own.status
    if status is None:  # no SystemExit; a hook that somebody put in the place of ours may have shown an exception
        shown = getattr(sys, "last_value", None)
        status = int(shown is not _Own.stale and not hasattr(sys, "ps1"))
    if is_forked():
        _leave(status)
    if MPI.Is_finalized():
        return
    if status != 0:
        _give_time(status)
    try:
        flush()
    except Exception:
        sys.stderr.write(f"pycollective: {_place()} ends with an error in a program; ending all ranks.\n")
        traceback.print_exc()
        abort(status or 1)
    if status == 0:
        _meet(limit_s)


def _leave(status: int) -> NoReturn:
    """Ends a forked child. The exit handlers that are left belong to its rank.

    JAX's would wait for threads that only the rank has. mpi4py's would finalize the rank's MPI: under MPICH that ends
    the job, under Open MPI it does not return.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, closed, or nobody reads it
            stream.flush()
    os._exit(status)


def _give_time(status: int) -> None:
    """Ends all ranks with this one's status, unless all end within a short time."""
    if MPI.COMM_WORLD.size == 1:
        return
    if _Own.meeting is None:
        time.sleep(_PATIENCE_S)
    else:
        for waited in waits(_Own.meeting.Ibarrier().Test, 0.05):
            if waited > _PATIENCE_S:
                break
        else:
            return
    sys.stderr.write(f"pycollective: {_place()} exited with code {status}, others did not; ending all ranks.\n")
    abort(status)


def _meet(limit_s: float | None) -> None:
    """Waits until every rank is here, and says so when that takes long."""
    if _Own.meeting is None:
        return
    missing, remedy = "the other ranks to end", "Look for a collective that this rank did not reach."
    notice = f"{_place()} has ended and waits for {missing}. If they do not, {remedy[0].lower()}{remedy[1:]}"
    for waited in waits(_Own.meeting.Ibarrier().Test, 0.05, _NOTICE_S, notice):
        if limit_s is not None and waited > limit_s:
            expected, got = f"{missing} within {limit_s:g} s", f"no end of some for {waited:.1f} s"
            rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
            sys.stderr.write(message("exit", expected, got, f"Ending all ranks. {remedy}\n", rank=rank, size=size))
            sys.stderr.flush()
            time.sleep(GRACE_S)
            abort()


def waits(
    is_over: Callable[[], bool], longest_s: float, notice_s: float | None = None, notice: str = ""
) -> Iterator[float]:
    """Sleeps until ``is_over()``, ``longest_s`` at a time at most, and yields the seconds waited so far.

    After ``notice_s`` it says ``notice`` once.
    """
    started = time.monotonic()
    told = notice_s is None
    while not is_over():
        waited = time.monotonic() - started
        if not told and notice_s is not None and waited > notice_s:
            told = True
            sys.stderr.write(f"pycollective: {notice}\n")
            sys.stderr.flush()
        yield waited
        time.sleep(min(longest_s, waited / 10))
