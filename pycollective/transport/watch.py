"""What the compiled library records of this process's calls, and the monitor that watches them.

The monitor is that of native/monitor/monitor.h.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from pycollective.transport.native_library import has_started, int32s, library, table

END = "the end of the other ranks"
"""The wait of a rank that has ended, as native/records/recorder.h names it.

Others may be at work, so it has no limit there.
"""


def add_site(site: int, text: str) -> None:
    """Names the line of the user's code that programs call ``site``, as ``"train.py:12 (step)"``."""
    library().pycollective_site_add(ctypes.c_int64(site), text.encode(errors="backslashreplace"))


@functools.cache
def _waits() -> tuple[str, ...]:
    return table(library().pycollective_wait_name)


@contextmanager
def waiting(what: str, group: int = 0) -> Iterator[None]:
    """Records that this rank waits for others outside programs, as long as the context lasts.

    Args:
        what: one of the waits of native/records/recorder.h.
        group: the identity of the ranks; 0 for all.
    """
    begun = library().pycollective_wait_begin(ctypes.c_int64(_waits().index(what)), ctypes.c_int64(group))
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        library().pycollective_wait_end(ctypes.c_void_p(begun), int(succeeded))


def _text(address: int) -> str:
    """A text that the library has allocated."""
    try:
        return ctypes.string_at(address).decode(errors="replace")
    finally:
        library().pycollective_text_free(ctypes.c_void_p(address))


def recorder_json(rank: int, size: int, reason: str) -> str:
    """The records of the last calls, and of those under way, as JSON."""
    return _text(library().pycollective_recorder_json(rank, size, reason.encode()))


def start_trace(most: int) -> None:
    """Lets the recorder keep each call that ends, up to so many of them, until :func:`stop_trace`."""
    library().pycollective_trace_start(ctypes.c_int64(most))


@functools.cache
def record_words() -> tuple[str, ...]:
    """The names of the words of a record, each an int64. Times are those of CLOCK_MONOTONIC in nanoseconds."""
    return table(library().pycollective_record_word)


def stop_trace() -> tuple[bytes, int]:
    """Returns the words of the records since :func:`start_trace`, record after record, and how many were dropped."""
    count, dropped = ctypes.c_int64(), ctypes.c_int64()
    address = library().pycollective_trace_stop(ctypes.byref(count), ctypes.byref(dropped))
    try:
        return ctypes.string_at(address, count.value * len(record_words()) * 8), dropped.value
    finally:
        library().pycollective_text_free(ctypes.c_void_p(address))


def record_json(words: bytes) -> str:
    """A record as JSON, as :func:`recorder_json` has it among its entries."""
    return _text(library().pycollective_record_json(words))


def group_json(identity: int) -> str:
    """A group of ranks as JSON, as :func:`recorder_json` has it; "null" if nobody knows it."""
    return _text(library().pycollective_group_json(ctypes.c_int64(identity)))


class Process(NamedTuple):
    """A process of the job, as the monitors of the others know it.

    Attributes:
        addresses: where it listens: addresses in digits, and ports; or names of its host that begin with "@".
        pid: its number on its host.
        started: when it started, field 22 of ``/proc/PID/stat``.
        host: a number of its host.
        host_name: the name of its host.
    """

    addresses: Sequence[tuple[str, int]]
    pid: int
    started: int
    host: int
    host_name: str

    def packed(self) -> bytes:
        """As ``Writer`` of native/monitor/side_channel.h packs it."""

        def number(value: int) -> bytes:
            return value.to_bytes(8, "little", signed=True)

        def text(value: str) -> bytes:
            return number(len(value.encode())) + value.encode()

        where = b"".join(text(host) + number(port) for host, port in self.addresses)
        of_process = number(self.pid) + number(self.started) + number(self.host) + text(self.host_name)
        return number(len(self.addresses)) + where + of_process


NO_PROCESS = Process((), 0, 0, 0, "")
"""In the place of a process that is not of the job."""


def listen_on(host: str) -> tuple[int, int] | None:
    """The socket that listens on an address and its port, 0 for a name; None if there is none to be had."""
    socket, port = ctypes.c_int32(), ctypes.c_int32()
    found = library().pycollective_monitor_listen(host.encode(), ctypes.byref(socket), ctypes.byref(port))
    return (socket.value, port.value) if found else None


class Monitoring(NamedTuple):
    """What the monitor needs (native/monitor/monitor.h).

    Attributes:
        rank: this process's place in MPI_COMM_WORLD.
        processes: those of MPI_COMM_WORLD.
        sockets: on which this process listens.
        secret: the job's, which other programs do not know.
        warn_s: the seconds of a wait after which it prints a report; 0: never.
        timeout_s: the seconds of a wait after which it ends the job; 0: never.
        folder: where it writes the records when the job fails; "": nowhere.
        may_lose_ranks: whether MPI ends the waits for a rank that has died, and the others may go on.
        says_deaths: whether it says that a rank of its host has died: the launcher may not.
    """

    rank: int
    processes: Sequence[Process]
    sockets: Sequence[int]
    secret: bytes
    warn_s: float
    timeout_s: float
    folder: str
    may_lose_ranks: bool
    says_deaths: bool


def start_monitor(monitoring: Monitoring) -> None:
    """Starts the threads that watch this process's waits and answer other ranks. The sockets are theirs from now on.

    Raises:
        RuntimeError: the system gives no thread.
    """
    packed = b"".join(process.packed() for process in monitoring.processes)
    error = library().pycollective_monitor_start(
        monitoring.rank,
        len(monitoring.processes),
        packed,
        ctypes.c_int64(len(packed)),
        int32s(monitoring.sockets),
        len(monitoring.sockets),
        monitoring.secret,
        len(monitoring.secret),
        ctypes.c_double(monitoring.warn_s),
        ctypes.c_double(monitoring.timeout_s),
        monitoring.folder.encode(),
        monitoring.may_lose_ranks,
        monitoring.says_deaths,
    )
    if error is not None:
        raise RuntimeError(error.decode())


def set_monitor_timeout(warn_s: float, timeout_s: float) -> None:
    """Changes two settings of the monitor."""
    library().pycollective_monitor_set_timeout(ctypes.c_double(warn_s), ctypes.c_double(timeout_s))


def stop_monitor() -> None:
    """Ends the monitor's threads."""
    library().pycollective_monitor_stop()


def set_stack_signal(number: int, file: int, main_thread: int) -> None:
    """Sets how the monitor reads Python's frames where no thread gets the interpreter's lock.

    Args:
        number: a signal whose handler writes the frames of all threads to ``file``; 0: none.
        file: the number of an open file.
        main_thread: the main thread's ``ident``.
    """
    library().pycollective_stacks_set_signal(number, file, main_thread)


def next_ask_for_stacks() -> bool:
    """Waits, without the interpreter's lock, until a report needs Python's frames. False: none will."""
    return bool(library().pycollective_stacks_next_ask())


def read_stacks() -> None:
    """Tells the monitor that this thread reads the frames. It has the interpreter's lock, and keeps it in this call."""
    ctypes.PyDLL(None, handle=library()._handle).pycollective_stacks_read()


def answer_stacks(dump: bytes, without_main: str) -> None:
    """Gives the monitor the frames of all threads.

    Args:
        dump: what ``faulthandler`` has written.
        without_main: what a report shows where the main thread is not in the dump.
    """
    library().pycollective_stacks_answer(dump, without_main.encode(errors="replace"))


def end_stacks() -> None:
    """Ends :func:`next_ask_for_stacks`."""
    library().pycollective_stacks_end()


def take_stacks(times: int) -> tuple[int, int, str]:
    """For tests: asks for Python's frames so many times, as a report does.

    Returns:
        How often they came; how many of these were read by the signal; the main thread's last ones.
    """
    came, by_signal = ctypes.c_int64(), ctypes.c_int64()
    take = library().pycollective_stacks_take
    text = _text(take(ctypes.c_int64(times), ctypes.byref(came), ctypes.byref(by_signal)))
    return came.value, by_signal.value, text


def last_failure() -> str:
    """The message of the error in which this process's last call in a program has ended; "" if it has succeeded."""
    return _text(library().pycollective_last_failure()) if has_started() else ""


def announce_exit() -> None:
    """Tells the rank that guards this one that this process ends, in order."""
    if has_started():
        library().pycollective_monitor_leave()


def announce_end(status: int, cause: str) -> bool:
    """Tells all ranks that the job ends with this status. False if it ends already, for another cause."""
    return not has_started() or bool(library().pycollective_end_begin(status, cause.encode()))


def forget_rank(rank: int) -> None:
    """Leaves a rank of MPI_COMM_WORLD out of all reports: it has failed, and the others go on."""
    library().pycollective_monitor_forget(rank)


def exit_instead_of_finalizing(status: int) -> None:
    """Lets this process end with a status when Python has done all it does at its end, but before MPI_Finalize.

    mpi4py finalizes in a function of ``Py_AtExit``. Of these the last one comes first.
    """
    exit_now = library().pycollective_exit_now(status)
    ctypes.pythonapi.Py_AtExit(ctypes.c_void_p(exit_now))
