"""Starts programs under the mpiexec of this Python's environment, as a user would."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_MPIEXEC = str(Path(sys.executable).parent / "mpiexec")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_KILL_AFTER_S = 5  # a launcher may ignore SIGTERM while its ranks hang


@functools.cache
def is_open_mpi() -> bool:
    version = subprocess.run([_MPIEXEC, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    return any(name in version for name in ("Open MPI", "OpenRTE", "PRRTE", "prte"))


def mpirun(
    ranks: int, *args: str, timeout: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs ``mpiexec -n ranks python *args`` and returns its output and exit code.

    Args:
        ranks: how many; more than there are cores is allowed.
        args: of the Python interpreter.
        timeout: seconds; then everything is killed and the exit code is 124 or 137.
        env: further variables.
        cwd: where to run; default here.
    """
    options = ["--oversubscribe"] if is_open_mpi() else []
    # A rank writes its lines whole; unbuffered, the launcher would mix the pieces of two ranks.
    buffered = {"PYTHONUNBUFFERED": ""}
    return subprocess.run(
        [
            "timeout",
            "-k",
            str(_KILL_AFTER_S),
            str(timeout),
            _MPIEXEC,
            *options,
            "-n",
            str(ranks),
            sys.executable,
            *args,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, **AS_ROOT, **buffered, **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
    )
