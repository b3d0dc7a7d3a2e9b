"""The memory that the ranks of a host share.

In it are the board, on which they post what they are about to call (native/shared_memory/board.h), the trees in which
they combine what they compare with other hosts (native/shared_memory/combining_tree.h), and the buffers through which
they exchange arrays (native/shared_memory/exchange.h). Ranks with accelerators share the page-locked buffers of these
as well (native/shared_memory/shared_arrays.h).

Each of the two is a file without a name, which the ranks of the host open through the first of them. Nothing is left of
it when they end, whatever ends them.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import warnings
from contextlib import suppress

from pycollective.errors import message
from pycollective.transport.mpi import MPI
from pycollective.transport.native_library import int32s, library


def open_board(neighbours: MPI.Intracomm, may_read: bool = True) -> bool:
    """Opens the board. All ranks of this host must make this call.

    Args:
        neighbours: the ranks of this host.
        may_read: a rank may read the arrays of another one where they are, if the kernel lets all ranks of this host.

    Returns:
        Whether there is a board; the same on all of them. There is none for a rank alone, or if ranks of other users or
        containers may not open the file.
    """
    if neighbours.size == 1:
        return False
    file = _open_file(neighbours, "pycollective-board", library().pycollective_board_bytes(neighbours.size))
    is_open = neighbours.allreduce(file is not None, op=MPI.LAND)
    cores = frozenset().union(*neighbours.allgather(os.sched_getaffinity(0)))
    if is_open:
        crowded = neighbours.size > len(cores)
        is_open = bool(library().pycollective_board_open(file, neighbours.size, crowded))
    if is_open and may_read:
        library().pycollective_board_show_memory(neighbours.rank)
    is_open = neighbours.allreduce(is_open, op=MPI.LAND)  # so the first rank does not close its file before
    if not is_open:
        library().pycollective_board_close()
    elif may_read:
        read_bytes = neighbours.allreduce(library().pycollective_board_read_bytes(), op=MPI.MIN)
        library().pycollective_board_set_read_bytes(ctypes.c_int64(read_bytes))
    if file is not None:
        os.close(file)
    return is_open


def open_arrays(neighbours: MPI.Intracomm, nbytes: int) -> bool:
    """Opens memory in which each rank of this host has room for arrays, which the others read there.

    All ranks of this host must make this call, after :func:`open_board` and before programs run. If one has no room,
    all of them keep their arrays in memory of their own, and are warned.

    Args:
        neighbours: the ranks of this host.
        nbytes: the room that this rank needs, in whole pages.

    Returns:
        Whether there is such memory; the same on all of them. There is none without a board.
    """
    if neighbours.size == 1:
        return False
    parts = neighbours.allgather(nbytes)
    begin, size = sum(parts[: neighbours.rank]), sum(parts)
    file = _open_file(neighbours, "pycollective-arrays", size)
    why = ""
    is_open = False
    if file is not None:
        try:
            os.posix_fallocate(file, begin, nbytes)  # near the cores of this rank; later a page may be lacking
            is_open = bool(library().pycollective_arrays_open(file, size, begin, nbytes))
        except OSError as error:
            why = str(error.strerror)
    reasons = [reason for reason in neighbours.allgather(why) if reason]
    is_open = neighbours.allreduce(is_open, op=MPI.LAND)  # so the first rank does not close its file before
    if not is_open:
        library().pycollective_arrays_close()
    if file is not None:
        os.close(file)
    if reasons:
        wanted = f"{size} B of memory that the ranks of this host share, for page-locked buffers"
        remedy = "Each rank has its own, which takes longer. Set a smaller PYCOLLECTIVE_STAGE_BYTES on all ranks."
        warnings.warn(message("init", wanted, reasons[0], remedy), RuntimeWarning, stacklevel=2)
    return is_open


def tell_hosts(ranks: MPI.Intracomm, neighbours: MPI.Intracomm) -> None:
    """Tells the native library which ranks are on which host. All of ``ranks`` must make this call.

    Args:
        ranks: the ranks of the job.
        neighbours: those of this host.
    """
    number = MPI.COMM_WORLD.rank
    host = neighbours.allreduce(number, op=MPI.MIN)
    hosts = [-1] * MPI.COMM_WORLD.size
    for rank, host_of_rank in ranks.allgather((number, host)):
        hosts[rank] = host_of_rank
    library().pycollective_set_hosts(int32s(hosts), len(hosts), host)


def clear() -> None:
    """Makes the whole board free. One rank of this host calls it, when none may post or read any more."""
    library().pycollective_board_clear()


def _open_file(neighbours: MPI.Intracomm, name: str, size: int) -> int | None:
    """A file of ``size`` bytes that the ranks of this host have opened; None on a rank that could not open it.

    The first rank may close it when all have opened it.
    """
    first = neighbours.rank == 0
    mark = secrets.token_bytes(16)
    file = None
    if first:
        with suppress(OSError):
            file = os.memfd_create(name)
            os.ftruncate(file, size)
            os.pwrite(file, mark, size)
    pid, number, mark = neighbours.bcast((os.getpid(), file, mark) if first else None)
    if first or number is None:
        return file
    with suppress(OSError):
        found = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        if _has(mark, found, size):
            return found
        os.close(found)  # the numbers belong to something else in this rank's container
    return None


def _has(mark: bytes, file: int, where: int) -> bool:
    try:
        return os.pread(file, len(mark), where) == mark
    except OSError:  # a pipe, say
        return False
