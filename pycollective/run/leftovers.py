"""What a job leaves on this host when it is killed.

MPI libraries keep files in /dev/shm while a job runs. When its ranks are killed MPICH leaves them there, and they take
memory until the machine starts anew. Open MPI's launcher has a directory of temporary files, which it names by its
process number alone. When the launcher is killed the directory stays, and a later launcher that happens to get the
number cannot start: "The PMIx server's listener thread failed to start".
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from pycollective.launch.find_mpi import LIBRARIES

SHARED_MEMORY = Path("/dev/shm")


def shared_memory_files(folder: Path = SHARED_MEMORY) -> set[Path]:
    """The files of MPI libraries, of all jobs on this host."""
    begins = tuple(begin for library in LIBRARIES for begin in library.shared_file_prefixes)
    return {path for path in folder.glob("*") if path.name.startswith(begins)}


def remove_shared_memory_files(
    before: set[Path], folder: Path = SHARED_MEMORY, proc: Path = Path("/proc")
) -> list[Path]:
    """Removes what a job has left.

    The names do not tell whose a file is. So a file is removed only if it was not there ``before`` the job, belongs to
    this user, and is neither open nor in the memory of any process. Another job of this user keeps its files: the
    process that makes such a file has it open, and then in its memory, until the job ends.

    Returns:
        The removed files.
    """
    left = []
    for path in sorted(shared_memory_files(folder) - before):
        with suppress(FileNotFoundError):  # its job has ended
            if path.stat().st_uid == os.getuid():
                left.append(path)
    if not left:
        return []
    used = _files_in_use(proc)
    left = [path for path in left if used is not None and str(path) not in used]
    for path in left:
        path.unlink(missing_ok=True)
    return left


def remove_session(launcher: int, folder: Path | None = None) -> None:
    """Removes the directory of a launcher that has ended, if there is one, of whichever MPI library.

    Args:
        launcher: its process number.
        folder: where launchers keep their directories; default the folder for temporary files.
    """
    for library in LIBRARIES:
        if name := library.session_folder(launcher):
            shutil.rmtree((folder or Path(tempfile.gettempdir())) / name, ignore_errors=True)


def _files_in_use(proc: Path) -> set[str] | None:
    """The files that processes have open or in their memory; None if a process of this user does not show its own."""
    used: set[str] = set()
    for process in proc.glob("[0-9]*"):
        try:
            # In this order: a process opens a file, takes it into its memory, then closes it.
            for link in (process / "fd").iterdir():
                with suppress(FileNotFoundError):
                    used.add(str(link.readlink()))
            parts = (line.split(maxsplit=5) for line in (process / "maps").read_text().splitlines())
            used.update(part[5] for part in parts if len(part) == 6)
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        except PermissionError:
            with suppress(FileNotFoundError):
                if process.stat().st_uid == os.getuid() and process.name != "1":  # the first process is no rank
                    return None
    return used
