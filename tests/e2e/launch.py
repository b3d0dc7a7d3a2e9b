"""Starts programs under the mpiexec of this Python's environment, as a user would."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycollective.launch.find_mpi import identify_mpiexec
from pycollective.launch.libraries.openmpi import OpenMpi
from tests import unoptimised

EXAMPLES = Path(__file__).parents[2] / "examples"

_MPIEXEC = str(Path(sys.executable).parent / "mpiexec")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
HOSTS = os.environ.get("PYCOLLECTIVE_TEST_HOSTS", "")
"""The hosts on which :func:`mpirun` starts ranks, as ``pycollective run --hosts`` takes them; "": this one."""

_KILL_AFTER_S = 5  # a launcher may ignore SIGTERM while its ranks hang

# Ranks write their lines whole. Unbuffered, print() writes a line in two pieces, and two ranks mix theirs.
os.environ.pop("PYTHONUNBUFFERED", None)


@functools.cache
def is_open_mpi() -> bool:
    library = identify_mpiexec(_MPIEXEC)
    assert library is not None, f"{_MPIEXEC} --version names no library that is known"
    return isinstance(library, OpenMpi)


def sentences(stderr: str) -> list[str]:
    """The lines that this package begins, but for its note that ranks start slowly: the limits of tests are short."""
    return re.findall(r"^pycollective(?!.* to start MPI\. ).*$", stderr, re.MULTILINE)


def limited(command: Sequence[str], seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command and returns its output and exit code, which is 124 or 137 if it took longer and was killed."""
    start = ["timeout", "-k", str(_KILL_AFTER_S), str(seconds)]
    done = subprocess.run([*start, *command], capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)
    if done.returncode == -signal.SIGKILL:  # timeout(1) kills its process group, and so itself
        done.returncode = 128 + signal.SIGKILL
    return done


def mpirun(
    ranks: int,
    *args: str,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    options: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Runs ``mpiexec -n ranks python *args`` and returns its output and exit code.

    Args:
        ranks: how many; more than there are cores is allowed.
        args: of the Python interpreter.
        timeout: seconds; then everything is killed and the exit code is 124 or 137.
        env: further variables.
        cwd: where to run; default here.
        options: of mpiexec.
    """
    if HOSTS:
        assert not options, f"not on several hosts: mpiexec with {options}"
        where = ["--hosts", HOSTS, "--bind", "none"]
        command = [sys.executable, "-m", "pycollective", "run", "-n", str(ranks), *where, sys.executable, *args]
    else:
        options = [*options, *(["--oversubscribe"] if is_open_mpi() else [])]
        command = [_MPIEXEC, *options, "-n", str(ranks), sys.executable, *args]
    return limited(command, timeout, env={**os.environ, **AS_ROOT, **(env or {})}, cwd=cwd)


def of_processes(printed: str) -> list[dict[str, Any]]:
    """What the processes of ``unmodified.py`` have printed, in the order of the processes."""
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["process"])


def check_same_numbers(by_mpi: list[dict[str, Any]], by_gloo: list[dict[str, Any]]) -> None:
    """Compares what the processes of ``unmodified.py`` have printed, up to the order in which sums are added."""
    for mine, theirs in zip(by_mpi, by_gloo, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name


def losses(
    where: Path,
    ranks: int,
    example: str,
    *options: str,
    devices: int = 1,
    start: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> np.ndarray:
    """The losses of an example that runs in the directory ``where``, compiled fast.

    Args:
        where: its directory.
        ranks: how many.
        example: a file in ``examples``.
        options: of the example.
        devices: of each rank.
        start: arguments of Python before the example's file: what runs it.
        env: further variables.
    """
    file = where / "losses.json"
    fast = {"JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": unoptimised.flags()}
    arguments = (*start, str(EXAMPLES / example), "--losses", str(file), *options)
    done = mpirun(ranks, *arguments, timeout=240, cwd=where, env={**fast, **(env or {})})
    assert done.returncode == 0, done.stdout + done.stderr
    return np.array(json.loads(file.read_text()))


def wait_until_gone(program: str, seconds: float = 10) -> None:
    """Returns when no process of this machine has ``program`` in its command line."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in Path("/proc").glob("[0-9]*") if _runs(pid, program)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.1)


def _runs(pid: Path, program: str) -> bool:
    try:
        return program.encode() in (pid / "cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return False
