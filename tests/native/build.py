"""Compiles the tests in C++."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.standin import compile_cpp

FOLDER = Path(__file__).parent
_ROOT = FOLDER.parents[1]
_NATIVE = _ROOT / "native"


def _room(name: str) -> list[Path]:
    return sorted((_NATIVE / name).glob("*.cc"))


RECORDER = [*_room("records"), _NATIVE / "mpi" / "dtypes.cc"]
"""What the recorder is made of."""

SIDE_CHANNEL = [_NATIVE / "monitor" / f"{name}.cc" for name in ("hmac", "side_channel", "side_connection")]
SIDE_CHANNEL.append(_NATIVE / "base" / "exports.cc")
"""What the side channel is made of."""

_BOARD = [_NATIVE / "shared_memory" / name for name in ("board.cc", "piggyback.cc", "combine.cc")]
_MONITOR = [
    *_room("monitor"),
    _NATIVE / "base" / "exports.cc",
    _NATIVE / "mpi" / "collectives.cc",
    *RECORDER,
]
_LIBRARY = [*_room("mpi"), *_room("records"), *_room("shared_memory")]

SOURCES = {
    "async_calls_test": [_NATIVE / "xla" / "async_calls.cc", *RECORDER],
    "device_test": [_NATIVE / "devices" / "device.cc", *_LIBRARY],
    "team_test": [_NATIVE / "devices" / "team.cc"],
    "board_test": [*_BOARD, _NATIVE / "mpi" / "reduction.cc", *RECORDER],
    "exchange_test": _LIBRARY,
    "monitor_test": _MONITOR,
    "inquiry_test": _MONITOR,
    "status_test": _MONITOR,
    "side_channel_test": SIDE_CHANNEL,
    "recorder_cost": RECORDER,
}
"""The sources of each program, beside its own file and CUDA's runtime or the stand-in for it."""

NAMES = {
    program: re.findall(r'\{"(\w+)", Test\w+\}', (FOLDER / f"{program}.cc").read_text())
    for program in SOURCES
    if program.endswith("_test")
}
"""The names of the tests of each program, which runs the test that its argument names."""


def build(program: str, folder: Path, cudart: Path | None = None, flags: Sequence[str] = ()) -> Path:
    """Compiles a program into ``folder``, and returns its file.

    Args:
        program: a key of :data:`SOURCES`.
        folder: an existing directory; all its programs have the same flags.
        cudart: the file of CUDA's runtime library; None: the stand-in is used.
        flags: of the compiler, besides.
    """
    sources = [FOLDER / f"{program}.cc", *SOURCES[program]]
    objects = folder / "objects"  # most sources belong to several programs
    objects.mkdir(exist_ok=True)
    if cudart is None:
        standin = _ROOT / "tests" / "standin" / "cudart.cc"
        return compile_cpp([*sources, standin], folder / program, *flags, objects=objects)
    of_cuda = ("-DPYCOLLECTIVE_CUDART", f"-Wl,-rpath,{cudart.parent}")
    return compile_cpp([*sources, cudart], folder / program, *of_cuda, *flags, objects=objects)
