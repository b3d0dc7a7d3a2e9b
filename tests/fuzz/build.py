"""Builds the fuzzed targets in C++: by clang with libFuzzer, or by any compiler with ``driver.cc``."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.native import build as native_tests
from tests.standin import compile_cpp

FOLDER = Path(__file__).parent
CORPUS = FOLDER / "corpus"
_NATIVE = FOLDER.parents[1] / "native"

_STATUS = [_NATIVE / "monitor" / f"{name}.cc" for name in ("heard", "rank_runs", "status")]

SOURCES = {
    "frames_fuzz": native_tests.SIDE_CHANNEL,
    "serving_fuzz": native_tests.SIDE_CHANNEL,
    "asking_fuzz": native_tests.SIDE_CHANNEL,
    "statuses_fuzz": [*native_tests.SIDE_CHANNEL, *_STATUS, *native_tests.RECORDER],
    "records_fuzz": native_tests.RECORDER,
}
"""The sources of each target, beside its own file. Its corpus lies in the folder of its name in :data:`CORPUS`."""

SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
"""The flags of all targets."""


@functools.cache
def clang() -> str | None:
    """clang++ with libFuzzer, or None if there is none."""
    found = shutil.which("clang++")
    if found is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.cc"
        empty.write_text('extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n')
        command = [found, "-fsanitize=fuzzer,address", str(empty), "-o", f"{folder}/empty"]
        return found if subprocess.run(command, capture_output=True, timeout=120).returncode == 0 else None


def build(target: str, folder: Path, *, libfuzzer: bool = False) -> Path:
    """Compiles a target into ``folder``, and returns its program.

    Args:
        target: a key of :data:`SOURCES`.
        folder: an existing directory; all its programs have the same engine.
        libfuzzer: whether libFuzzer calls it, which needs :func:`clang`; else ``driver.cc`` does.
    """
    objects = folder / "objects"
    objects.mkdir(exist_ok=True)
    sources = [FOLDER / f"{target}.cc", *SOURCES[target]]
    if libfuzzer:
        flags = ("-fsanitize=fuzzer", *SANITIZED)
        return compile_cpp(sources, folder / target, *flags, objects=objects, by=clang())
    return compile_cpp([FOLDER / "driver.cc", *sources], folder / target, *SANITIZED, objects=objects)
