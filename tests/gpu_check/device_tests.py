"""Compiles ``tests/native/device_test.cc`` against CUDA's runtime and runs each of its tests.

    python -m tests.gpu_check.device_tests FOLDER LIBRARY

``LIBRARY`` is the file of libcudart, or "standin" for the stand-in for it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.native.build import build
from tests.standin import compile_cpp

_SECONDS = 20


def results(folder: Path, library: str, seconds: float) -> Iterator[tuple[str, str]]:
    """Yields the name of each test and "ok", or why it has failed.

    Args:
        folder: where the program is compiled.
        library: the file of libcudart, or "standin".
        seconds: the limit of each test.
    """
    if library == "standin":
        sources = [Path(__file__).parents[1] / "standin" / "cudart.cc"]
        library = str(compile_cpp(sources, folder / "libcudart.so.13", "-shared"))
    program = build("device_test", folder, Path(library))
    listed = subprocess.run([program], capture_output=True, text=True, check=True, timeout=seconds)
    for name in listed.stdout.split():  # some tests are for the stand-in alone
        try:
            run = subprocess.run([program, name], capture_output=True, text=True, timeout=seconds)
            yield name, "ok" if run.returncode == 0 else f"FAILED ({run.returncode}): {run.stderr.strip()}"
        except subprocess.TimeoutExpired:
            yield name, f"FAILED: it did not end within {seconds} s"


def main() -> int:
    """Prints a line for each test; returns 1 if one failed."""
    names, failed = [], []
    for name, result in results(Path(sys.argv[1]), sys.argv[2], _SECONDS):
        names.append(name)
        sys.stdout.write(f"{name}: {result}\n")
        if result != "ok":
            failed.append(name)
    sys.stdout.write(f"device tests: {len(names) - len(failed)} of {len(names)} passed\n")
    if failed:
        sys.stdout.write(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
