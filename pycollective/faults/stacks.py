"""The frames of Python's threads for reports, read with the interpreter's lock (``native/python_stacks.h``).

A thread waits in the compiled library, which costs nothing. It reads the frames when a report is about to name this
rank. A signal, whose handler ``faulthandler`` has installed, reads them where no thread gets the lock.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

from pycollective.transport import watch

_MOST_FRAMES = 100
"""How many frames of a thread are read, the innermost ones; ``faulthandler`` reads as many."""

_CALLBACKS = "/jax/_src/callback.py"
"""A file in the stack of each thread in which XLA calls a function of the user's."""

_LAST_S = 1.0
"""How long the end of Python waits for the thread."""


class _State:
    """The thread that reads; the file into which ``faulthandler`` writes, which must stay open."""

    thread: threading.Thread | None = None
    file: int | None = None


def start() -> None:
    """Starts the thread that reads the frames."""
    watch.set_stack_signal(*_signal(), threading.main_thread().ident or 0)
    _State.thread = threading.Thread(target=_serve, name="pycollective-stacks", daemon=True)
    _State.thread.start()


def stop() -> None:
    """Ends that thread. Python ends soon, and a thread that asked for the lock then would never get it."""
    if _State.thread is not None:
        watch.end_stacks()
        _State.thread.join(_LAST_S)


def _signal() -> tuple[int, int]:
    """A signal whose handler writes the frames of all threads to a file, and the file. (0, 0): there is none."""
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            with suppress(OSError):  # a sandbox may refuse the file
                _State.file = os.memfd_create("pycollective-stacks")
                # What faulthandler goes back to when Python ends: by default such a signal ends the process.
                ctypes.pythonapi.PyOS_setsig(number, signal.SIG_IGN)
                faulthandler.register(number, file=_State.file, all_threads=True)
                return number, _State.file
    return 0, 0


def _serve() -> None:
    while watch.next_ask_for_stacks():
        watch.read_stacks()
        try:
            main, callbacks = _stacks()
        except Exception as error:  # the report says it, and the rank goes on
            main, callbacks = f"  no frames, since they could not be read: {type(error).__name__}: {error}\n", ""
        watch.answer_stacks(main, callbacks)


def _stacks() -> tuple[str, str]:
    """The frames of the main thread, and those of the callbacks of programs."""
    frames = sys._current_frames()
    main = _text(frames.pop(threading.main_thread().ident or 0, None))
    callbacks = [text for frame in frames.values() if _CALLBACKS in (text := _text(frame))]
    return main, "".join(callbacks)


def _text(frame: FrameType | None) -> str:
    """A thread's frames as ``faulthandler`` writes them, a line for each, the innermost first.

    Example:
        >>> _text(sys._getframe()).splitlines()[0].partition(", ")[2]
        'line 1 in <module>'
    """
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST_FRAMES:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n')
        frame = frame.f_back
    return "".join(lines)
