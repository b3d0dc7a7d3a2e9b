"""The compiled library as ctypes sees it. It needs neither JAX nor MPI: a program may import JAX after this file."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pycollective.errors import message

BUILD = "Build the library again: install the package with pip, or run python setup.py build_ext --inplace in a clone."
"""What to do about a library that does not fit these files."""


class _State:
    """The library that is bound to MPI; None before that."""

    library: ctypes.CDLL | None = None


_RESULTS = {
    "function_name": ctypes.c_char_p,
    "type_name": ctypes.c_char_p,
    "mpi_op_name": ctypes.c_char_p,
    "op_name": ctypes.c_char_p,
    "dtype_number": ctypes.c_int32,
    "operation_name": ctypes.c_char_p,
    "device_operation_name": ctypes.c_char_p,
    "guard_name": ctypes.c_char_p,
    "runtime_name": ctypes.c_char_p,
    "bind": ctypes.c_char_p,
    "bind_runtime": None,
    "communicator_add": ctypes.c_int64,
    "part_add": ctypes.c_int64,
    "communicator_free": ctypes.c_char_p,
    "board_bytes": ctypes.c_int64,
    "set_hosts": None,
    "board_open": ctypes.c_bool,
    "board_close": None,
    "board_show_memory": None,
    "board_read_bytes": ctypes.c_int64,
    "board_set_read_bytes": None,
    "board_may_read": ctypes.c_bool,
    "board_join": ctypes.c_char_p,
    "board_clear": None,
    "own_comms": ctypes.c_int64,
    "abandon_all": None,
    "exit_now": ctypes.c_void_p,
    "last_failure": ctypes.c_void_p,
    "site_add": None,
    "start_watch_begin": None,
    "start_watch_end": None,
    "wait_begin": ctypes.c_void_p,
    "wait_end": None,
    "wait_name": ctypes.c_char_p,
    "recorder_json": ctypes.c_void_p,
    "text_free": None,
    "trace_start": None,
    "trace_stop": ctypes.c_void_p,
    "record_word": ctypes.c_char_p,
    "record_json": ctypes.c_void_p,
    "group_json": ctypes.c_void_p,
    "monitor_listen": ctypes.c_bool,
    "hmac": None,
    "monitor_start": ctypes.c_char_p,
    "monitor_set_timeout": None,
    "monitor_stop": None,
    "monitor_forget": None,
    "stacks_set_signal": None,
    "stacks_next_ask": ctypes.c_bool,
    "stacks_read": None,
    "stacks_answer": None,
    "stacks_end": None,
    "stacks_take": ctypes.c_void_p,
    "end_begin": ctypes.c_bool,
    "this_process": ctypes.c_int64,
    "set_check": None,
    "set_all_lanes": None,
    "set_max_count": None,
    "tune_malloc": ctypes.c_bool,
    "xla_is_open": ctypes.c_bool,
    "xla_start": None,
    "xla_learn": None,
}
"""The functions of native/binding.cc and xla_mpi.cc without their prefix, and the types of their results."""


def load(path: Path) -> ctypes.CDLL:
    """Loads the compiled library, without binding it to MPI.

    Raises:
        ImportError: there is none, or it was built from other sources than this file.
    """
    if not path.exists():
        raise ImportError(
            message(
                "transport",
                f"the compiled library {path}",
                "no such file",
                "Install the package with pip (it needs a C++17 compiler), not by copying its files.",
            )
        )
    library = ctypes.CDLL(str(path))
    for name, result in _RESULTS.items():
        if not hasattr(library, f"pycollective_{name}"):
            wanted = f"a compiled library of this version, with the function pycollective_{name}"
            raise ImportError(message("transport", wanted, f"{path} without it", BUILD))
        getattr(library, f"pycollective_{name}").restype = result
    return library


def table(name_at: Callable[[ctypes.c_int64], bytes | None]) -> tuple[str, ...]:
    """The names of a table of the library, which ends with null."""
    names: list[str] = []
    while name := name_at(ctypes.c_int64(len(names))):
        names.append(name.decode())
    return tuple(names)


def int64s(values: Sequence[int]) -> Any:
    """An array of C."""
    return (ctypes.c_int64 * len(values))(*values)


def int32s(values: Sequence[int]) -> Any:
    """An array of C."""
    return (ctypes.c_int32 * len(values))(*values)


def set_library(bound: ctypes.CDLL) -> None:
    """Makes a library that is bound to MPI this process's."""
    _State.library = bound


def has_started() -> bool:
    """Whether :func:`start` was called."""
    return _State.library is not None


def library() -> ctypes.CDLL:
    """The bound library.

    Raises:
        RuntimeError: :func:`start` was not called.
    """
    if _State.library is None:
        raise RuntimeError(message("transport", "a started transport", "none", "Call pycollective.init() first."))
    return _State.library
