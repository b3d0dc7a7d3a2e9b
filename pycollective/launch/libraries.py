"""Which MPI library mpi4py loads, and the mpiexec that belongs to it. MPI does not start here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pycollective.errors import FROM_A_CLONE, message


class Library(NamedTuple):
    """An MPI library, or the launcher of one.

    Attributes:
        family: "MPICH" (and what descends from it), "Open MPI" or "Intel MPI".
        version: its number.
        path: its file.
    """

    family: str
    version: str
    path: str

    @property
    def name(self) -> str:
        return f"{self.family} {self.version}"

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])


# What libraries and launchers call themselves. Intel MPI and MVAPICH name MPICH as well, so they come first.
_NAMES = (
    ("Intel MPI", r"Intel\(R\) MPI Library(?: for Linux\* OS, Version)? (\d[\w.]*)"),
    ("Open MPI", r"(?:Open MPI v|\(Open(?:RTE| MPI)\) |PRRTE[^\d]*)(\d[\w.]*)"),
    ("MPICH", r"MVAPICH2?(?: Version)?[\s:]*(\d[\w.]*)"),
    ("MPICH", r"(?:MPICH [Vv]ersion|HYDRA build details:\s*Version)[\s:]*(\d[\w.]*)"),
)

_MPIEXECS = (
    "mpiexec",
    "mpirun",
    "mpiexec.hydra",
    "mpiexec.mpich",
    "mpiexec.openmpi",
    "mpirun.openmpi",
    "orterun",
)


def identify(text: str) -> tuple[str, str] | None:
    r"""Family and version from what a library or a launcher says of itself.

    Example:
        >>> identify("Open MPI v5.0.11, package: ...")
        ('Open MPI', '5.0.11')
        >>> identify("HYDRA build details:\n    Version:                                 5.0.2")
        ('MPICH', '5.0.2')
    """
    for family, pattern in _NAMES:
        if match := re.search(pattern, text):
            return family, match[1]
    return None


# In a process of its own: what cannot be loaded may end it, and MPI must not start in this one.
_PROBE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    files = [line.split(maxsplit=5)[5].strip() for line in maps if "/libmpi" in line]
print(files[0] if files else "")
print(MPI.Get_library_version().strip(" \\0\\n"))
"""


def loaded() -> Library:
    """The MPI library that mpi4py loads in this environment.

    Raises:
        ImportError: none can be loaded.
        RuntimeError: it is of no family known here, or its loading does not end.
    """
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        remedy = "Try: python -c 'from mpi4py import MPI'."
        raise RuntimeError(message("run", "mpi4py to load its MPI library", "no end within 60 s", remedy)) from None
    if done.returncode != 0:
        got = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        remedy = f"Load your cluster's MPI module, or install one: {FROM_A_CLONE}."
        raise ImportError(message("run", "an MPI library that mpi4py can load", got, remedy))
    path, _, text = done.stdout.partition("\n")
    known = identify(text)
    if known is None:
        raise RuntimeError(
            message("run", "MPICH, Open MPI or Intel MPI", text.splitlines()[0], "Start programs with its own mpiexec.")
        )
    return Library(*known, path)


def mpiexec_of(library: Library, environ: Mapping[str, str]) -> Library:
    """The launcher that belongs to ``library``: beside this Python, beside the library, or on PATH.

    Raises:
        FileNotFoundError: there is none; the message names those of other libraries.
    """
    others = []
    for path in _candidates(library, environ):
        known = identify_mpiexec(path)
        if known is not None and belongs(known, library):
            return known
        others.append(f"{path} of {known.name if known else 'an unknown library'}")
    got = ", ".join(dict.fromkeys(others)) or "none"
    remedy = "Put its bin directory first on PATH, or say --mpi PATH."
    raise FileNotFoundError(message("run", f"an mpiexec of {library.name} ({library.path})", got, remedy))


def belongs(mpiexec: Library, library: Library) -> bool:
    """Whether ``mpiexec`` can start programs of ``library``.

    Example:
        >>> belongs(Library("Open MPI", "4.1.4", "/usr/bin/mpiexec"), Library("Open MPI", "5.0.11", "libmpi.so.40"))
        False
    """
    same = mpiexec.family == library.family
    return same and (library.family != "Open MPI" or mpiexec.major == library.major)


def identify_mpiexec(path: str) -> Library | None:
    """What ``path --version`` says of itself; None if that is nothing known."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    known = identify(done.stdout + done.stderr)
    return None if known is None else Library(*known, path)


def _candidates(library: Library, environ: Mapping[str, str]) -> Iterator[str]:
    beside = [Path(sys.executable).parent]
    if library.path:
        beside += [parent / "bin" for parent in Path(library.path).parents[1:3]]
    seen = set()
    for folder in (*map(str, beside), *environ.get("PATH", os.defpath).split(os.pathsep)):
        for name in _MPIEXECS:
            found = shutil.which(name, path=folder)
            if found is not None and (file := Path(found).resolve()) not in seen:  # which often has several names
                seen.add(file)
                yield found
