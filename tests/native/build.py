"""Compiles the tests in C++."""

from __future__ import annotations

import re
from pathlib import Path

from tests.standin import compile_cpp

FOLDER = Path(__file__).parent
_ROOT = FOLDER.parents[1]
_NATIVE = _ROOT / "native"

SOURCES = {
    "device_test": [_NATIVE / name for name in ("device.cc", "collectives.cc", "own_reductions.cc")],
    "team_test": [_NATIVE / "team.cc"],
}
"""What each program is compiled with, besides its own file and CUDA's runtime or the stand-in for it."""

NAMES = {program: re.findall(r'\{"(\w+)", Test\w+\}', (FOLDER / f"{program}.cc").read_text()) for program in SOURCES}
"""The tests of each program; a name is the program's argument."""


def build(program: str, folder: Path, cudart: Path | None = None) -> Path:
    """Returns the program, compiled into ``folder``.

    Args:
        program: a key of :data:`SOURCES`.
        folder: a directory that exists.
        cudart: the file of CUDA's runtime library; None: the stand-in takes its place.
    """
    sources = [FOLDER / f"{program}.cc", *SOURCES[program]]
    if cudart is None:
        return compile_cpp([*sources, _ROOT / "tests" / "standin" / "cudart.cc"], folder / program)
    flags = ("-DPYCOLLECTIVE_CUDART", f"-Wl,-rpath,{cudart.parent}")
    return compile_cpp([*sources, cudart], folder / program, *flags)
