"""mpi4py's ``MPI`` module, with a useful error where no MPI library can be loaded.

Importing it starts MPI by mpi4py's own rules (``mpi4py.rc``), which ask for ``THREAD_MULTIPLE``; but not in a
child of a rank, whose main module may import this package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version

from pycollective.environment import variable
from pycollective.errors import FROM_A_CLONE, message
from pycollective.launch.child_processes import parent_rank

_NETWORK = "MPIR_CVAR_CH4_NETMOD"


def _network() -> AbstractContextManager[None]:
    """Lets MPICH's wheel start reliably under ``srun --mpi=pmi2``: its ranks find each other by libfabric, not by UCX.

    Over UCX it publishes 4 KiB of its heap from the place where an address of about 300 B lies. Slurm reads lines of 1
    KiB, and what happens to lie behind the address may make a line longer: "value not properly terminated in client
    request" (8 of 8 starts of 2 ranks on 2 hosts, none of 8 by libfabric; MPICH 5.0.2, Slurm 22.05).
    """
    if not {"PMI_FD", "SLURM_STEP_ID"} <= os.environ.keys() or _NETWORK in os.environ:
        return nullcontext()
    try:
        version("mpich")
    except PackageNotFoundError:
        return nullcontext()
    return variable(_NETWORK, "ofi")


try:
    import mpi4py

    if parent_rank() is not None:
        mpi4py.rc.initialize = False
    with _network():
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
