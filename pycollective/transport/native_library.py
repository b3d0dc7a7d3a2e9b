"""The compiled library as ctypes sees it. It needs neither JAX nor MPI: a program may import JAX after this file."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pycollective.errors import message
from pycollective.launch import child_processes

BUILD = "Build the library again: install the package with pip, or run python setup.py build_ext --inplace in a clone."
"""What to do about a library that does not fit these files."""


class _State:
    """The library that is bound to MPI; None before that."""

    library: ctypes.CDLL | None = None


_TYPES: dict[str, Any] = {
    "v": None,
    "b": ctypes.c_bool,
    "i": ctypes.c_int32,
    "l": ctypes.c_int64,
    "d": ctypes.c_double,
    "s": ctypes.c_char_p,
    "p": ctypes.c_void_p,
    "I": ctypes.POINTER(ctypes.c_int32),
    "U": ctypes.POINTER(ctypes.c_uint32),
    "L": ctypes.POINTER(ctypes.c_int64),
}
"""The types of results and arguments, by the letters of native/base/exports.h."""


class _Library(ctypes.CDLL):
    """The compiled library. A function that it lacks was to come from other sources than this file."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not name.startswith("pycollective_"):
                raise
            wanted = f"a compiled library of this version, with the function {name}"
            raise ImportError(message("transport", wanted, f"{self._name} without it", BUILD)) from None


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
    library = _Library(str(path))
    library.pycollective_functions.restype = ctypes.c_char_p
    for entry in table(library.pycollective_functions):
        name, letters = entry.split()
        function = getattr(library, f"pycollective_{name}")
        function.restype, *function.argtypes = (_TYPES[letter] for letter in letters)
    library.pycollective_set_read_times(child_processes.READ_TIMEOUT_S, child_processes.FORWARDING_S)
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
