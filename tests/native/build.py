"""Compiles ``device_test.cc``."""

from __future__ import annotations

import re
from pathlib import Path

from tests.standin import compile_cpp

_ROOT = Path(__file__).parents[2]
_SOURCE = Path(__file__).parent / "device_test.cc"
NAMES = tuple(re.findall(r'\{"(\w+)", Test\w+\}', _SOURCE.read_text()))
"""The tests, each an argument of the program."""


def build(folder: Path, cudart: Path | None = None) -> Path:
    """The program, in ``folder``.

    Args:
        folder: that exists.
        cudart: CUDA's runtime library; None: the stand-in for it.
    """
    sources = [_ROOT / "native" / name for name in ("device.cc", "collectives.cc", "team.cc")]
    if cudart is None:
        sources.append(_ROOT / "tests" / "standin" / "cudart.cc")
        return compile_cpp([*sources, _SOURCE], folder / "device_test")
    flags = ("-DPYCOLLECTIVE_CUDART", f"-Wl,-rpath,{cudart.parent}")
    return compile_cpp([*sources, _SOURCE, cudart], folder / "device_test", *flags)
