"""Compiles the tests in C++."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.standin import compile_cpp, compile_objects

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
_BOARD.append(_NATIVE / "base" / "futex.cc")
_MONITOR = [
    *_room("monitor"),
    _NATIVE / "base" / "exports.cc",
    _NATIVE / "mpi" / "collectives.cc",
    *RECORDER,
]
_LIBRARY = [*_room("mpi"), *_room("records"), *_room("shared_memory"), _NATIVE / "base" / "futex.cc"]

EXPLORED = {
    "explore_test": [
        *sorted((FOLDER / "explored").glob("*.cc")),
        *(_NATIVE / "shared_memory" / f"{name}.cc" for name in ("board", "combine", "combining_tree", "exchange")),
        *(_NATIVE / "shared_memory" / f"{name}.cc" for name in ("host_collectives", "piggyback", "shared_arrays")),
        _NATIVE / "mpi" / "reduction.cc",
    ]
}
"""The sources of a program that run under the explorer (``explore.h``). The flags of sanitizers are not for them."""

_EXPLORED_FLAGS = (
    "-fsanitize=thread",  # a call for each access to memory; the program has functions of its own for these calls
    *("-Wno-tsan", "-Wno-unknown-warning-option"),  # the library of GCC's sanitizer has no fences; explore.h has
    "-fno-builtin",  # memcpy is a call
    "-Dthread_local=",  # ranks are fibers of one thread
)
_EXPLORER_FLAGS = (
    "-no-pie",  # the addresses of code are those of the file
    *(f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset", "strlen", "sched_yield")),
    "-Wl,--wrap=_ZNSt6chrono3_V212steady_clock3nowEv",
)

SOURCES = {
    "async_calls_test": [_NATIVE / "xla" / "async_calls.cc", *RECORDER],
    "device_test": [_NATIVE / "devices" / "device.cc", *_LIBRARY],
    "team_test": [_NATIVE / "devices" / "team.cc"],
    "board_test": [*_BOARD, _NATIVE / "mpi" / "reduction.cc", *RECORDER],
    "comparison_test": [_NATIVE / "calls" / "comparison.cc", *_LIBRARY],
    "exchange_test": _LIBRARY,
    "levels_test": _LIBRARY,
    "explore_test": [_NATIVE / "mpi" / "collectives.cc", *RECORDER],
    "monitor_test": _MONITOR,
    "inquiry_test": _MONITOR,
    "status_test": _MONITOR,
    "side_channel_test": SIDE_CHANNEL,
    "wait_test": [_NATIVE / "base" / "futex.cc"],
    "recorder_cost": RECORDER,
    "dispatch_cost": [_NATIVE / "devices" / "device.cc", *_LIBRARY],
}
"""The sources of each program, beside its own file, those in ``EXPLORED``, and CUDA's runtime or its stand-in."""

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
    if program in EXPLORED:
        explored = folder / "explored"
        explored.mkdir(exist_ok=True)
        sources += compile_objects(EXPLORED[program], explored, *_EXPLORED_FLAGS)
        flags = (*_EXPLORER_FLAGS, *flags)
    if cudart is None:
        standin = _ROOT / "tests" / "standin" / "cudart.cc"
        return compile_cpp([*sources, standin], folder / program, *flags, objects=objects)
    on_cudart = folder / "on_cudart"  # the program's own file is another one there; what it tests is the same
    on_cudart.mkdir(exist_ok=True)
    own, *others = sources
    others += compile_objects([own], on_cudart, "-DPYCOLLECTIVE_CUDART", *flags)
    rpath = f"-Wl,-rpath,{cudart.parent}"
    return compile_cpp([*others, cudart], on_cudart / program, rpath, *flags, objects=objects)
