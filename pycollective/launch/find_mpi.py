"""Finds the MPI library that mpi4py loads, and the mpiexec that belongs to it, without starting MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pycollective.errors import FROM_A_CLONE, message
from pycollective.launch.libraries import standard_abi
from pycollective.launch.libraries.intel_mpi import IntelMpi
from pycollective.launch.libraries.library import Library
from pycollective.launch.libraries.mpich import Mpich
from pycollective.launch.libraries.openmpi import OpenMpi

# Intel MPI comes before MPICH because it may name MPICH as well.
LIBRARIES: tuple[type[Library], ...] = (IntelMpi, Mpich, OpenMpi)

_ELASTIC = [(f"{library.family} {library.ulfm.major}", library.ulfm) for library in LIBRARIES if library.ulfm]
ELASTIC = " or ".join(name for name, _ in _ELASTIC)
"""The libraries under which ranks can live on when one has died, for messages."""
ELASTIC_LAUNCH = " or ".join(f"{name} under mpiexec {' '.join(ulfm.options)}" for name, ulfm in _ELASTIC)
"""The same, with the options of their launchers."""

_FAMILIES = {pmi: [each.family for each in LIBRARIES if each.pmi == pmi] for pmi in sorted({x.pmi for x in LIBRARIES})}
SRUN_COMMANDS = " or ".join(f"'srun --mpi={pmi}' ({', '.join(families)})" for pmi, families in _FAMILIES.items())
"""How srun starts ranks of each library, for messages."""

_LOAD_TIMEOUT_S = 60
_VERSION_TIMEOUT_S = 20


def identify(text: str, path: str = "", abi: str = "") -> Library | None:
    r"""The library that says ``text`` about itself, or whose mpiexec says it; None if it is not known here.

    Example:
        >>> identify("Open MPI v5.0.11, package: ...")
        OpenMpi(version='5.0.11', path='', abi='')
        >>> identify("HYDRA build details:\n    Version:                                 5.0.2").name
        'MPICH 5.0.2'
    """
    for library in LIBRARIES:
        if (version := library.version_in(text)) is not None:
            return library(version, path, abi)
    return None


# This runs in another process: MPI must not start in this one, and a library that cannot be loaded may end its process.
_PROBE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    files = [line.split(maxsplit=5)[5].strip() for line in maps if "/libmpi" in line]
print(files[0] if files else "")
print(*MPI.Get_abi_version())
print(MPI.Get_library_version().strip(" \\0\\n"))
"""


def loaded_library() -> Library:
    """The MPI library that mpi4py loads in this environment.

    Raises:
        ImportError: mpi4py can load none.
        RuntimeError: the library is not known here, or loading it does not end.
    """
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        got, remedy = f"no end within {_LOAD_TIMEOUT_S} s", "Try: python -c 'from mpi4py import MPI'."
        raise RuntimeError(message("run", "mpi4py to load its MPI library", got, remedy)) from None
    if done.returncode != 0:
        got = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        remedy = remedy_without_library(got)
        raise ImportError(message("run", "an MPI library that mpi4py can load", got, remedy))
    path, numbers, text = done.stdout.split("\n", 2)
    major, minor = map(int, numbers.split())
    library = identify(text, path, standard_abi.version((major, minor)))
    if library is None:
        expected = f"one of {', '.join(known.family for known in LIBRARIES)}"
        raise RuntimeError(message("run", expected, text.splitlines()[0], "Start programs with its own mpiexec."))
    return library


def remedy_without_library(error: str) -> str:
    """What to do when mpi4py can load no MPI library, and says ``error``."""
    return standard_abi.remedy(error, f"Load your cluster's MPI module, or install one: {FROM_A_CLONE}.")


def mpiexec_of(library: Library, environ: Mapping[str, str]) -> Library:
    """The mpiexec that belongs to ``library``: beside this Python, beside the library, or on PATH.

    Raises:
        FileNotFoundError: there is none; the message names those of other libraries.
    """
    others = []
    for path in _candidates(library, environ):
        mpiexec = identify_mpiexec(path)
        if mpiexec is not None and mpiexec.can_start(library):
            return mpiexec
        others.append(f"{path} of {mpiexec.name if mpiexec else 'an unknown library'}")
    got = ", ".join(dict.fromkeys(others)) or "none"
    remedy = "Put its bin directory first on PATH, or say --mpi PATH."
    raise FileNotFoundError(message("run", f"an mpiexec of {library.name} ({library.path})", got, remedy))


def identify_mpiexec(path: str) -> Library | None:
    """The library whose mpiexec ``path`` is, by what ``path --version`` says; None if it is not known here."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return identify(done.stdout + done.stderr, path)


def _candidates(library: Library, environ: Mapping[str, str]) -> Iterator[str]:
    """The files that may be its mpiexec."""
    folders = [str(Path(sys.executable).parent)]
    if library.path:
        folders += [str(parent / "bin") for parent in Path(library.path).parents[1:3]]
    folders += environ.get("PATH", os.defpath).split(os.pathsep)
    names = list(dict.fromkeys(name for known in LIBRARIES for name in known.mpiexec_names))
    seen = set()
    for folder in folders:
        for name in names:
            found = shutil.which(name, path=folder)
            if found is not None and (file := Path(found).resolve()) not in seen:  # one file often has several names
                seen.add(file)
                yield found
