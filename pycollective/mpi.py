"""mpi4py's ``MPI`` module, with a useful error where no MPI library can be loaded.

Importing it starts MPI by mpi4py's own rules (``mpi4py.rc``), which ask for ``THREAD_MULTIPLE``; but not in a
child of a rank, whose main module may import this package.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from pycollective.errors import FROM_A_CLONE, message
from pycollective.processes import parent_rank

# Bytes. glibc keeps freed blocks of up to 1,032 B apart by their size, in steps of 16.
_HOLES = (1 << 16, 1 << 12, *range(1032, 16, -16))


@contextmanager
def _fresh_memory_under_srun() -> Iterator[None]:
    """Lets MPICH start reliably under ``srun --mpi=pmi2``: MPI gets memory that nobody has used before.

    Over UCX it publishes 4 KiB from the place where its address lies, of about 300 B, so what happens to lie behind
    that as well; runs of zeros are said in short. Slurm reads lines of 1 KiB. What a long import leaves on the heap may
    make a line longer ("value not properly terminated in client request": 11 of 90 starts, MPICH 5.0.2, Slurm 22.05).
    So blocks fill the holes of the heap, of each size until one comes from beyond its end.
    """
    libc = ctypes.CDLL(None)
    blocks: list[int] = []
    if "PMI_FD" in os.environ and "SLURM_STEP_ID" in os.environ and hasattr(libc, "sbrk"):
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
        libc.free.argtypes = [ctypes.c_void_p]
        end = libc.sbrk(0)
        for size in _HOLES:
            while len(blocks) < 1 << 16 and (block := libc.malloc(size)):
                blocks.append(block)
                if block >= end:
                    break
    try:
        yield
    finally:
        for block in blocks:
            libc.free(block)


try:
    import mpi4py

    if parent_rank() is not None:
        mpi4py.rc.initialize = False
    with _fresh_memory_under_srun():
        from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise ImportError(
        message(
            "mpi",
            "an MPI library that mpi4py can load",
            f"{type(error).__name__}: {error}",
            f"Load your cluster's MPI module, or install one: {FROM_A_CLONE}.",
        )
    ) from error

__all__ = ["MPI", "host_of"]


@contextmanager
def host_of(comm: MPI.Intracomm) -> Iterator[MPI.Intracomm]:
    """The ranks of ``comm`` on this rank's host, in their order. All ranks must make this call."""
    neighbours = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert isinstance(neighbours, MPI.Intracomm)
    yield neighbours
    neighbours.Free()  # not after an error, which may be this rank's alone
