"""The frames of Python's threads for reports, read with the interpreter's lock (``native/monitor/python_stacks.h``).

A thread waits in the compiled library, which costs nothing. It reads the frames when a report is about to name this
rank. A signal, whose handler ``faulthandler`` has installed, reads them where no thread gets the lock.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import signal
import tempfile
import threading
from contextlib import suppress

from pycollective.transport import watch

_MAX_BYTES = 1 << 18
"""The most bytes of the frames of all threads that are shown."""

_JOIN_TIMEOUT_S = 1.0
"""How long the end of Python waits for the thread."""


class _State:
    """The thread that reads; the file into which ``faulthandler`` writes, which must stay open."""

    thread: threading.Thread | None = None
    file: int | None = None


def start() -> None:
    """Starts the thread that reads the frames."""
    watch.set_stack_signal(*_signal(), threading.main_thread().ident or 0)
    _file()
    _State.thread = threading.Thread(target=_serve, name="pycollective-stacks", daemon=True)
    _State.thread.start()


def stop() -> None:
    """Ends that thread before Python ends: a thread that then asks for the interpreter's lock never gets it."""
    if _State.thread is not None:
        watch.end_stacks()
        _State.thread.join(_JOIN_TIMEOUT_S)


def _signal() -> tuple[int, int]:
    """A signal whose handler writes the frames of all threads to a file, and the file's descriptor; (0, 0): none."""
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            with suppress(OSError):  # a sandbox may refuse the file
                _State.file = os.memfd_create("pycollective-stacks")
                # faulthandler restores this disposition when Python ends. By default such a signal ends the process.
                ctypes.pythonapi.PyOS_setsig(number, signal.SIG_IGN)
                faulthandler.register(number, file=_State.file, all_threads=True)
                return number, _State.file
    return 0, 0


def _serve() -> None:
    while watch.next_ask_for_stacks():
        watch.read_stacks()
        try:
            dump, without_main = _dump(), "  no frames: this process has more than a hundred Python threads\n"
        except Exception as error:  # the report says so, and the rank continues
            dump, without_main = b"", f"  no frames, since they could not be read: {type(error).__name__}: {error}\n"
        watch.answer_stacks(dump, without_main)


@functools.cache
def _file() -> int:
    """The descriptor of a file for the frames. It stays open, since the thread may write until the process ends."""
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


_WITH_LOCK = ctypes.PyDLL(None)
"""Functions of C that Python calls while it holds the interpreter's lock."""


def _dump() -> bytes:
    """The frames of all threads, at most a hundred. The interpreter's lock is held, so no thread changes them.

    A walk over frame objects in Python would release the lock between two steps, and other threads would run.

    Example:
        >>> b"in <module>" in _dump()
        True
    """
    number = _file()
    _WITH_LOCK.ftruncate(number, ctypes.c_long(0))
    _WITH_LOCK.lseek(number, ctypes.c_long(0), os.SEEK_SET)
    faulthandler.dump_traceback(number, all_threads=True)
    text = ctypes.create_string_buffer(_MAX_BYTES)
    _WITH_LOCK.pread(number, text, ctypes.c_size_t(_MAX_BYTES - 1), ctypes.c_long(0))
    return text.value
