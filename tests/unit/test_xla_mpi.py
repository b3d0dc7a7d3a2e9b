"""The names that XLA looks up in our library."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import jaxlib

from pycollective.environment import NATIVE_LIBRARY

XLA = Path(jaxlib.__file__).parent / "libjax_common.so"


def names_in_xla() -> set[str]:
    """The names of MPItrampoline's ABI that the installed XLA contains as strings."""
    with XLA.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        return {name.decode() for name in re.findall(rb"MPIX?ABI_\w+", memory)}


def test_every_name_that_xla_looks_up_is_there() -> None:
    library = ctypes.CDLL(str(NATIVE_LIBRARY))
    names = names_in_xla()
    assert len(names) > 600
    assert [name for name in names if not hasattr(library, name)] == []


def test_constants_with_a_meaning() -> None:
    library = ctypes.CDLL(str(NATIVE_LIBRARY))

    def value(name: str) -> int:
        return ctypes.c_int.in_dll(library, f"MPIABI_{name}").value

    levels = [value(f"THREAD_{level}") for level in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")]
    assert levels == sorted(set(levels))
    assert value("SUCCESS") == 0
    types = [ctypes.c_size_t.in_dll(library, f"MPIABI_{name}").value for name in ("FLOAT", "DOUBLE", "INT32_T", "BYTE")]
    assert len(set(types)) == len(types)
