"""Compiles the tests in C++: each file ``*_test.cc`` is a program."""

from __future__ import annotations

import re
from pathlib import Path

from tests.standin import compile_cpp

_HERE = Path(__file__).parent
_NATIVE = _HERE.parents[1] / "native"
_STANDIN = _HERE.parent / "standin" / "cudart.cc"

SOURCES = {
    "device_test": [_NATIVE / name for name in ("device.cc", "collectives.cc", "own_reductions.cc")],
    "team_test": [_NATIVE / "team.cc"],
}
"""What each program is compiled with, besides its own file and a runtime."""

NAMES = {program: re.findall(r'\{"(\w+)", Test\w+\}', (_HERE / f"{program}.cc").read_text()) for program in SOURCES}
"""The tests of each program, which are its arguments."""


def build(program: str, folder: Path, cudart: Path | None = None) -> Path:
    """Compiles a program into ``folder``.

    Args:
        program: a key of :data:`SOURCES`.
        folder: that exists.
        cudart: CUDA's runtime library; None: the stand-in for it.
    """
    sources = [_HERE / f"{program}.cc", *SOURCES[program]]
    if cudart is None:
        return compile_cpp([*sources, _STANDIN], folder / program)
    return compile_cpp([*sources, cudart], folder / program, "-DPYCOLLECTIVE_CUDART", f"-Wl,-rpath,{cudart.parent}")


def build_standin(folder: Path) -> Path:
    """Compiles the stand-in as a library that can take the place of CUDA's."""
    return compile_cpp([_STANDIN], folder / "libcudart.so.13", "-shared")
