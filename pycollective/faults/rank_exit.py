"""The end of a rank: an error on one rank ends all ranks; a rank without an error finishes its work and waits for all.

What a rank does at each kind of end that Python shows to a process:

- an exception that nothing catches, in any thread: the rank ends all ranks;
- an exit with a code other than 0 (``sys.exit(3)``, ``raise SystemExit``): the rank ends all ranks with that code,
  unless they end by themselves within :data:`_OTHERS_EXIT_TIMEOUT_S`;
- a normal end: the rank finishes its work, and waits for the other ranks. If the last calls of ranks have failed, the
  first of these ranks prints its error, since the program may not have shown it;
- an interrupt (Ctrl-C, SIGINT) in a call that does not end: the rank ends all ranks (:mod:`interrupts`);
- an end at once, by ``os._exit``: the rank ends all ranks, since the launcher may take that for success;
- an exception in a cell of IPython or of a notebook: the rank prints its number, and the session goes on;
- an exception that Python ignores, in a finalizer, ``__del__`` or an exit handler: the rank prints its number and goes
  on, as a program of one process does.

The rank that ends the others first tells them the cause (``native/monitor/monitor.h``). They write their records, and
do not print the errors that follow from that cause, so the user reads one cause.

This concerns the process that has started MPI. In a forked child the hooks do nothing.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar, NoReturn

from pycollective.errors import message
from pycollective.faults import before_init, exit_status, monitor
from pycollective.launch.child_processes import is_forked, wait_until_read
from pycollective.transport import native_library, watch
from pycollective.transport.mpi import MPI, register_communicator

_OTHERS_EXIT_TIMEOUT_S = 5.0
"""How long a rank that exits with a code waits for the others to end by themselves, as when tests fail on all ranks."""


NOTICE_S = 10.0
"""How long a rank that has ended waits for the others before it prints a notice."""


_NO_RANK = 2**31 - 1
"""A number that is larger than any rank and fits a C int."""

GRACE_S = 2.0
"""How much later than its limit a rank ends the others, so that a rank that knows the cause can end them first."""


class _State:
    """What this process knows of its end.

    Attributes:
        has_hooks: whether the hooks that see errors are installed.
        earlier_error: the exception that Python showed last before the hooks were installed.
        exit_comm: the communicator on which ranks wait for each other at exit.
        lost: the ranks of MPI_COMM_WORLD that have failed and without which this rank has continued.
        clean_end_checks: functions to call when all ranks have ended without an error.
        end_functions: functions to call when all ranks have ended.
        is_ending: whether this rank ends the job.
    """

    has_hooks = False
    is_ending = False
    earlier_error: object = None
    exit_comm: MPI.Intracomm | None = None
    lost: ClassVar[set[int]] = set()
    clean_end_checks: ClassVar[list[Callable[[], object]]] = []
    end_functions: ClassVar[list[Callable[[], object]]] = []


# Errors -----------------------------------------------------------------------------------------------------


def end_all_on_error() -> None:
    """Installs the hooks that see an error of this process. A second call does nothing."""
    if _State.has_hooks:
        return
    _State.has_hooks = True
    before_init.disable()
    previous, previous_in_thread, previous_ignored = sys.excepthook, threading.excepthook, sys.unraisablehook
    _State.earlier_error = getattr(sys, "last_value", None)

    def raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        exit_status.set_status(1)
        _end_all(functools.partial(previous, kind, error, trace), "raised", error)

    def raised_in_thread(args: threading.ExceptHookArgs) -> None:
        if issubclass(args.exc_type, SystemExit):  # it ends only that thread
            previous_in_thread(args)
        else:
            name = "which has ended" if args.thread is None else repr(args.thread.name)
            _end_all(functools.partial(previous_in_thread, args), f"raised in a thread, {name}", args.exc_value)

    def ignored(unraisable: sys.UnraisableHookArgs) -> None:
        if _is_one_of_several():
            sys.stderr.write(f"pycollective: {describe_rank()} goes on after this exception, which Python ignores:\n")
        previous_ignored(unraisable)

    sys.excepthook, threading.excepthook, sys.unraisablehook = raised, raised_in_thread, ignored
    atexit.register(setattr, sys, "unraisablehook", previous_ignored)  # while Python ends, this module has no functions
    os._exit = _exit_at_once
    exit_status.record()
    _report_errors_of_cells()


def _is_one_of_several() -> bool:
    return not is_forked() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1


def describe_rank() -> str:
    """The rank of this process, for messages."""
    return f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}"


def _end_all(show: Callable[[], object], what: str, error: BaseException | None) -> None:
    """Shows an error of this process by ``show``. If there are several ranks, it then ends all of them."""
    if not _is_one_of_several():
        show()
        return
    before_init.wait_for_lower_ranks(MPI.COMM_WORLD.rank)
    _announce_end_or_exit(1, f"{describe_rank()} {what}: {type(error).__name__}: {error}")
    try:
        sys.stdout.flush()
    except Exception as flushing:  # the cause comes first, and the other ranks wait
        unread = f"Its standard output could not be flushed: {type(flushing).__name__}: {flushing}\n"
    else:
        unread = ""
    sys.stderr.write(f"pycollective: {describe_rank()} {what}; ending all ranks.\n")
    show()
    sys.stderr.write(unread)
    abort()


def end_all_interrupted(call: str, stack: str) -> NoReturn:
    """Ends all ranks, since this rank got an interrupt (SIGINT) in a call that does not end.

    Args:
        call: the call in which this rank waits.
        stack: the stack of its program.
    """
    before_init.wait_for_lower_ranks(MPI.COMM_WORLD.rank)
    what = f"{describe_rank()} was interrupted while it waited in {call}"
    _announce_end_or_exit(128 + signal.SIGINT, what)
    sys.stderr.write(f"pycollective: {what}; ending all ranks.\n{stack}")
    abort(128 + signal.SIGINT)


def _report_errors_of_cells() -> None:
    """Lets a session of IPython or a notebook print which rank raised in a cell. The other ranks print nothing."""
    ipython = sys.modules.get("IPython")
    if ipython is None or (shell := ipython.get_ipython()) is None:
        return

    def ran(result: Any) -> None:
        if not result.success and _is_one_of_several():
            text = f"{describe_rank()}: a cell has raised; ranks that wait for this one wait on."
            sys.stderr.write(f"pycollective: {text}\n")

    shell.events.register("post_run_cell", ran)


_os_exit = os._exit


def _exit_at_once(status: int) -> NoReturn:
    """``os._exit`` of a rank whose MPI runs. It ends all ranks: MPICH would report success for a status of 0."""
    if _is_one_of_several() and not _State.is_ending:
        what = f"{describe_rank()} called os._exit({status})"
        _announce_end_or_exit(status or 1, what)
        sys.stderr.write(f"pycollective: {what} before the job's end; ending all ranks.\n")
        abort(status or 1)
    watch.announce_exit()
    _os_exit(status)


def _announce_end_or_exit(status: int, cause: str) -> None:
    """Announces to all ranks that the job ends; exits instead if another rank has announced another cause before."""
    if not watch.announce_end(status, cause) and not _State.is_ending:
        time.sleep(exit_status.EXIT_TIMEOUT_S)
        _os_exit(status)
    _State.is_ending = True


def abort(status: int = 1) -> NoReturn:
    """Ends all ranks after the launcher has read what this rank wrote."""
    _State.is_ending = True
    wait_until_read()
    # If the last remaining rank aborts, the status of Open MPI's mpiexec is 0.
    if MPI.COMM_WORLD.size - len(_State.lost) > 1:
        exit_status.force_exit_after_timeout()
        MPI.COMM_WORLD.Abort(status)
    _os_exit(status)  # MPICH's Abort returns when the launcher is slow to end this process


# The end ----------------------------------------------------------------------------------------------------


def register_exit_handler(flush: Callable[[], None], limit_s: float | None) -> None:
    """Installs an exit handler after JAX's and mpi4py's, so that it runs before them.

    Args:
        flush: waits until the dispatched programs have run, and raises their errors.
        limit_s: the seconds that a rank that has ended waits for the others; None for no limit.
    """
    atexit.register(_end, flush, limit_s)


def wait_for_all_at_exit(world: MPI.Intracomm) -> None:
    """Lets this rank wait at its exit until all ranks of ``world`` exit. All ranks must make this call."""
    if _State.exit_comm is None:
        _State.exit_comm = register_communicator(world.Dup())


def exclude_failed_ranks(ranks: Collection[int]) -> None:
    """Excludes failed ranks of MPI_COMM_WORLD from the end of this process, which will not wait for them.

    After a failure MPI_Finalize of Open MPI may wait for ever (it did in one of five jobs). So this process never calls
    it.
    """
    for rank in ranks:
        watch.forget_rank(rank)
    _State.lost.update(ranks)
    _State.exit_comm = None


def call_at_end(function: Callable[[], object]) -> None:
    """Registers a function to call when all ranks have ended, before other exit handlers; the last one comes first."""
    _State.end_functions.append(function)


def check_at_clean_end(function: Callable[[], object]) -> None:
    """Registers a function to call when all ranks have reached their ends, if no rank's last call has failed.

    The function is called after the wait for the others. So it may read messages that they have sent, but must not wait
    for the other ranks.
    """
    _State.clean_end_checks.append(function)


def _end(flush: Callable[[], None], limit_s: float | None) -> None:
    """Ends this rank in order: flushes programs, and waits for the other ranks.

    MPI_Finalize would wait for the others as well, but it polls at full speed and prints nothing. The user would not
    see that one rank has ended while the others wait for it in a collective.
    """
    status = exit_status.status()
    if status is None:  # no SystemExit; but a hook that has replaced ours may have shown an exception
        shown = getattr(sys, "last_value", None)
        status = int(shown is not _State.earlier_error and not hasattr(sys, "ps1"))
    if is_forked():
        _end_forked_child(status)
    if MPI.Is_finalized():
        _stop_monitor()
        return
    if status != 0:
        _end_all_unless_they_end(status, limit_s)
    try:
        flush()
    except Exception as error:
        what, cause = f"{describe_rank()} ends with an error in a program", f"{type(error).__name__}: {error}"
        before_init.wait_for_lower_ranks(MPI.COMM_WORLD.rank)
        _announce_end_or_exit(status or 1, f"{what}: {cause}")
        sys.stderr.write(f"pycollective: {what}; ending all ranks.\n{cause}\n")
        abort(status or 1)
    if status == 0:
        failure = watch.last_failure()
        try:
            first = _wait_for_all(limit_s, has_failed=bool(failure))
            if failure and first == MPI.COMM_WORLD.rank:
                sys.stderr.write(
                    f"pycollective: {describe_rank()} has ended; its last call had failed. "
                    f"If the program has not caught that error, nobody has seen it: {failure}\n"
                )
            if first == _NO_RANK and _State.exit_comm is not None:
                for check in _State.clean_end_checks:
                    check()
        except MPI.Exception as error:  # of an MPI that outlives a failed rank
            _announce_end_or_exit(1, f"{describe_rank()} has ended, and a rank has failed since: {error}")
            sys.stderr.write(f"pycollective: {describe_rank()} has ended, and another one has failed since: {error}.\n")
            abort()
    for function in reversed(_State.end_functions):
        function()
    _stop_monitor()
    if _State.lost:
        watch.exit_instead_of_finalizing(status)


def _stop_monitor() -> None:
    """Ends the monitor's threads, and what they use of Python, before Python ends."""
    if native_library.has_started():
        monitor.stop()


def _end_forked_child(status: int) -> NoReturn:
    """Ends a forked child without the other exit handlers, which are those of its rank.

    JAX's handler would wait for threads that only the rank has. mpi4py's would finalize the rank's MPI: under MPICH
    that ends the job, under Open MPI it does not return.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is no stream, it is closed, or nobody reads it
            stream.flush()
    _os_exit(status)


def _end_all_unless_they_end(status: int, limit_s: float | None) -> None:
    """Ends all ranks with this rank's status, unless all end by themselves within :data:`_OTHERS_EXIT_TIMEOUT_S`."""
    if MPI.COMM_WORLD.size == 1:
        return
    # Half of the limit: then this rank ends the others before they report their wait.
    timeout_s = _OTHERS_EXIT_TIMEOUT_S if limit_s is None else min(_OTHERS_EXIT_TIMEOUT_S, limit_s / 2)
    if _State.exit_comm is None:
        time.sleep(timeout_s)
    else:
        have_ended, _ = _begin_exit_allreduce(_State.exit_comm, _NO_RANK)
        for waited in poll_until(have_ended, 0.05):
            if waited > timeout_s:
                break
        else:
            return
    _announce_end_or_exit(status, f"{describe_rank()} exited with code {status}")
    sys.stderr.write(f"pycollective: {describe_rank()} exited with code {status}, others did not; ending all ranks.\n")
    abort(status)


def _begin_exit_allreduce(comm: MPI.Intracomm, own: int) -> tuple[Callable[[], bool], array[int]]:
    """Begins an allreduce of all ranks at their ends.

    Args:
        comm: the ranks; each of them makes this call once.
        own: this rank's number.

    Returns:
        A function that returns whether all ranks have made this call, and the array in which the minimum of their
        numbers is then.
    """
    mine, least = array("i", [own]), array("i", [_NO_RANK])
    request = comm.Iallreduce(mine, least, op=MPI.MIN)

    def have_come(_: object = mine) -> bool:  # the default value keeps the memory that MPI reads until then
        return request.Test()

    return have_come, least


def _wait_for_all(limit_s: float | None, *, has_failed: bool) -> int:
    """Waits until every rank has ended. Prints a notice if that takes long, and ends all ranks after ``limit_s``.

    Args:
        limit_s: seconds; None for no limit.
        has_failed: whether the last call of this rank has failed.

    Returns:
        The first rank of MPI_COMM_WORLD whose last call has failed; a larger number than any rank if there is none.
    """
    own = MPI.COMM_WORLD.rank if has_failed else _NO_RANK
    if _State.exit_comm is None:
        return own
    remedy = "look for a collective that this rank did not reach."
    notice = f"{describe_rank()} has ended and waits for the other ranks to end. If they do not, {remedy}"
    with watch.waiting(watch.END):
        have_ended, least = _begin_exit_allreduce(_State.exit_comm, own)
        for waited in poll_until(have_ended, 0.05, NOTICE_S, notice):
            # If a rank waits in a call, its report comes first: the report names the cause.
            if limit_s is not None and waited > limit_s + GRACE_S:
                end_all_after_timeout(
                    "exit",
                    f"the other ranks to end within {limit_s:g} s",
                    f"some that have not ended after {waited:.1f} s",
                    remedy.capitalize(),
                )
    return least[0]


def end_all_after_timeout(where: str, expected: str, got: str, remedy: str) -> NoReturn:
    """Ends all ranks since some ranks do not reach a point at which this rank waits for them.

    Args:
        where: the operation.
        expected: the time limit, for the message.
        got: the missing ranks, for the message.
        remedy: the advice to the user.
    """
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    text = message(where, expected, got, f"Ending all ranks. {remedy}\n", rank=rank, size=size)
    _announce_end_or_exit(1, text)
    sys.stderr.write(text)
    abort()


def poll_until(
    is_over: Callable[[], bool], longest_s: float, notice_s: float | None = None, notice: str = ""
) -> Iterator[float]:
    """Calls ``is_over`` until it returns True, sleeps in between, and yields the seconds waited so far.

    Args:
        is_over: whether the wait is over.
        longest_s: the longest sleep, in seconds.
        notice_s: the seconds after which it prints ``notice`` once; None for never.
        notice: a sentence.
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
