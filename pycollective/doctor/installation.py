"""What is installed, and whether two ranks can start with it. Nothing here loads MPI into this process."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pycollective import build_id
from pycollective.doctor.findings import OK, WARNING, WRONG, Finding
from pycollective.launch.find_mpi import identify_mpiexec, mpiexec_of
from pycollective.launch.libraries.library import Library

PACKAGES = ("pycollective", "jax", "jaxlib", "mpi4py", "numpy")
_TRIAL_S = 120


def installed(package: str) -> str:
    """The version of an installed package, or "none"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def version_numbers() -> dict[str, str]:
    """The versions of Python and of the packages that take part."""
    return {"Python": platform.python_version(), **{package: installed(package) for package in PACKAGES}}


def versions() -> Finding:
    """Whether all packages are installed."""
    found = version_numbers()
    missing = [package for package, number in found.items() if number == "none" and package != "pycollective"]
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    return Finding("versions", WRONG if missing else OK, text, f"pip install {' '.join(missing)}" if missing else "")


def mpiexec(library: Library) -> Finding:
    """Which mpiexec belongs to the library, and whether the first one on PATH belongs to another library."""
    try:
        belonging = mpiexec_of(library, os.environ)
    except FileNotFoundError as error:
        srun = shutil.which("srun")
        return Finding("launcher", WARNING if srun else WRONG, str(error), "Start with srun." if srun else "")
    for first in filter(None, map(shutil.which, ("mpirun", "mpiexec"))):
        other = identify_mpiexec(first)
        if other is None or not other.can_start(library):
            text = f"{first} comes first on PATH and is of {other.name if other else 'an unknown library'}"
            return Finding("launcher", WARNING, text, f"Start with pycollective run, or {belonging.path}.")
    return Finding("launcher", OK, f"{belonging.path} of {belonging.name}")


def native() -> Finding:
    """Whether the compiled library is there."""
    file = Path(__file__).parents[1] / "_native.so"
    if not file.exists():
        return Finding(
            "native library", WRONG, f"no {file}", "Install the package with pip; it needs a C++17 compiler."
        )
    found = build_id.of_library(file.read_bytes())
    return Finding("native library", OK, f"{file}, build ID {found[:12] or 'none'}")


def trial() -> list[Finding]:
    """What two ranks report about themselves."""
    python = [sys.executable, "-m", "pycollective"]
    command = [*python, "run", "-n", "2", "--oversubscribe", *python, "doctor", "--json"]
    # It has a session of its own, so that all its processes can be killed if it does not end.
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = started.communicate(timeout=_TRIAL_S)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            started.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        remedy = "See where it waits: PYCOLLECTIVE_TIMEOUT=20 pycollective run -n 2 --oversubscribe pycollective doctor"
        return [Finding("two ranks", WRONG, f"no answer within {_TRIAL_S} s", remedy)]
    return answer(out, errors, started.returncode)


def answer(out: str, errors: str, status: int) -> list[Finding]:
    """The findings in what the two ranks wrote, to which MPI may have added lines of its own.

    Args:
        out: their standard output.
        errors: their standard error.
        status: the exit status.
    """
    try:
        items, _ = json.JSONDecoder().raw_decode(out, out.index("[{"))
    except ValueError:
        lines = [line for line in errors.splitlines() if any(map(str.isalpha, line))]
        # A program says at the end of its output what went wrong, a launcher at the beginning.
        got = (lines or [f"exit status {status}"])[-1 if "Traceback" in errors else 0]
        return [Finding("two ranks", WRONG, got, "Try: pycollective run -n 2 --oversubscribe pycollective doctor")]
    return [Finding(**{**item, "name": f"2 ranks: {item['name']}"}) for item in items]
