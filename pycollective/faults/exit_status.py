"""The status with which Python ends this process, known before its exit handlers run.

A rank needs it there: after an error it must end the other ranks, else it must wait for them, and mpi4py calls
``MPI_Finalize``, which waits for them, as soon as the exit handlers have run. For an exception Python calls
``sys.excepthook``. For a ``SystemExit`` it calls nothing, and exit handlers see neither the exception nor the status.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import sys
import warnings
from typing import Any, NoReturn

from pycollective.errors import message

__all__ = ["EXIT_TIMEOUT_S", "force_exit_after_timeout", "record", "set_status", "status"]


EXIT_TIMEOUT_S = 5.0
"""How long a rank waits for MPI or another rank to end it, before it ends itself."""


class _State:
    """What Python has shown.

    Attributes:
        is_recording: whether :func:`record` was called.
        status: the exit status; None as long as Python has shown none.
    """

    is_recording = False
    status: int | None = None


def status() -> int | None:
    """The exit status; None if Python has shown neither a ``SystemExit`` nor another exception."""
    return _State.status


def set_status(number: int) -> None:
    """Sets the status of a process that ends with an exception."""
    _State.status = number


def force_exit_after_timeout() -> None:
    """Ends this process after ``EXIT_TIMEOUT_S`` seconds, with status 1, if it has not ended by itself.

    ``MPI_Abort`` may not return when the launcher is stuck. Python starts no thread while it ends, but ``faulthandler``
    can.
    """
    faulthandler.dump_traceback_later(EXIT_TIMEOUT_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))


def record() -> None:
    """Lets a ``SystemExit`` that ends this process set the status. A second call does nothing.

    When Python ends, it reads the attribute ``code`` of the exception while no Python function runs. So a property
    takes the place of that attribute. Python refuses to set an attribute of a class that is written in C, but the
    garbage collector knows the dictionary behind its read-only view.

    Nothing plainer works for a program that plain ``mpirun python train.py`` has started. A runner such as
    ``python -m`` would have to be in every command line. A function in the place of ``sys.exit`` does not see
    ``raise SystemExit``, nor ``exit``, and does not know whether the program catches the exception. C's ``on_exit``
    gets the status, but runs after ``MPI_Finalize``. ``sys.monitoring`` shows the exception that leaves the last frame,
    but Python 3.11 lacks it, and it calls a function for each frame that any exception leaves.
    """
    if _State.is_recording:
        return
    _State.is_recording = True
    attributes: Any = next((part for part in gc.get_referents(SystemExit.__dict__) if isinstance(part, dict)), None)
    if attributes is None:
        expected = "CPython's dictionary of the attributes of SystemExit"
        remedy = "A rank that calls sys.exit(n) is taken for one that ends without an error: it waits for the others."
        warnings.warn(message("init", expected, "none", remedy), RuntimeWarning, stacklevel=2)
        return
    member = attributes["code"]

    def code(self: SystemExit) -> object:
        value = member.__get__(self)
        if sys._getframe().f_back is None:  # Python itself reads the code
            _State.status = _status(value)
        return value

    attributes["code"] = property(code, member.__set__, doc=member.__doc__)
    # Code in C must call this after a change of a type's attributes.
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    if sys.version_info < (3, 12):  # before 3.12 sys.exit makes no exception object, so Python would not read `code`
        original = sys.exit
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is original:
                    setattr(module, name, _exit)


def _exit(status: Any = None, /) -> NoReturn:
    """Exits the interpreter by raising ``SystemExit(status)``, as ``sys.exit`` does."""
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
