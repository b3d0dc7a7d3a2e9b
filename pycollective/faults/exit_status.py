"""The status with which Python ends this process, known before its exit handlers run."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import sys
from typing import Any, NoReturn

__all__ = ["LAST_S", "end_after_timeout", "record", "set_status", "status"]


LAST_S = 5.0
"""How long a rank waits for MPI or another rank to end it, before it ends itself."""


class _State:
    """What Python has shown.

    Attributes:
        records: whether :func:`record` was called.
        status: the exit status; None as long as Python has shown none.
    """

    records = False
    status: int | None = None


def status() -> int | None:
    """The exit status; None if Python has shown neither a ``SystemExit`` nor another exception."""
    return _State.status


def set_status(number: int) -> None:
    """Sets the status of a process that ends with an exception."""
    _State.status = number


def end_after_timeout() -> None:
    """Ends this process after ``LAST_S`` seconds, with status 1, if it has not ended by itself.

    ``MPI_Abort`` may not return when the launcher is stuck. Python starts no thread while it ends, but ``faulthandler``
    can.
    """
    faulthandler.dump_traceback_later(LAST_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))


def record() -> None:
    """Lets a ``SystemExit`` that ends this process set the status. A second call does nothing.

    Python calls no hook for a ``SystemExit``, and forgets it before exit handlers run. But Python reads its attribute
    ``code`` while no Python function runs. So a property takes the place of that attribute.
    """
    if _State.records:
        return
    _State.records = True
    attributes: Any = next(part for part in gc.get_referents(SystemExit.__dict__) if isinstance(part, dict))
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
