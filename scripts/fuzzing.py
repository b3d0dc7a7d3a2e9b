"""Looks for inputs that a parser takes badly, for as long as somebody wants.

Targets in C++ (tests/fuzz/*_fuzz.cc) run under the sanitizers for addresses and undefined behaviour: by libFuzzer where
there is clang, else by tests/fuzz/driver.cc, which does not see what an input reaches. Parsers in Python are the tests
of tests/fuzz/test_parsers.py, with other examples each time. The end names what has failed: put such an input into the
corpus (tests/fuzz/corpus), or make an @example of it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.fuzz.build import CORPUS, FOLDER, SOURCES, build, clang  # noqa: E402

PARSERS = re.findall(r"^def test_(\w+)", (FOLDER / "test_parsers.py").read_text(), re.MULTILINE)
EXAMPLES = 500  # of a call of pytest, of which each begins with the same ones


def in_cpp(target: str, seconds: float, folder: Path) -> bool:
    """Runs a target in C++; libFuzzer keeps the inputs that reach something new in a folder of its own."""
    libfuzzer = clang() is not None
    engine = folder / ("libfuzzer" if libfuzzer else "driver")
    engine.mkdir(parents=True, exist_ok=True)
    program = build(target, engine, libfuzzer=libfuzzer)
    if libfuzzer:
        found = folder / "found" / target
        found.mkdir(parents=True, exist_ok=True)
        limits = [f"-max_total_time={max(1, round(seconds))}", "-timeout=20", "-max_len=4096", "-rss_limit_mb=4096"]
        command = [program, *limits, f"-artifact_prefix={folder}/{target}-", found, CORPUS / target]
    else:
        command = [program, CORPUS / target, str(seconds), str(random.randrange(1, 1 << 32))]
    return subprocess.run(command, cwd=folder).returncode == 0


def in_python(parser: str, seconds: float) -> bool:
    """Runs a test of a parser again and again."""
    until = time.monotonic() + seconds
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYCOLLECTIVE_TEST_FUZZ_EXAMPLES": str(EXAMPLES)}
    command = [sys.executable, "-m", "pytest", "-q", f"tests/fuzz/test_parsers.py::test_{parser}"]
    while time.monotonic() < until:
        if subprocess.run(command, cwd=ROOT, env=env).returncode != 0:
            return False
    return True


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__, formatter_class=formatter)
    parser.add_argument("seconds", type=float, help="for each parser")
    names = [*SOURCES, *PARSERS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which; default all: {', '.join(names)}")
    options = parser.parse_args()
    if unknown := {*options.names} - {*names}:
        parser.error(f"expected names of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    folder = ROOT / "build" / "fuzz"
    bad = []
    for name in options.names or names:
        print(f"=== {name}", flush=True)
        good = in_cpp(name, options.seconds, folder) if name in SOURCES else in_python(name, options.seconds)
        bad += [] if good else [name]
    print(f"failed: {', '.join(bad)}; inputs of C++ lie in {folder}" if bad else "ok")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
