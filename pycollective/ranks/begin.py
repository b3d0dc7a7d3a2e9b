"""The function ``init``, which knows its limit before MPI starts: the import of what it needs starts MPI."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pycollective.transport import mpi_start

if TYPE_CHECKING:
    import jax
    from mpi4py import MPI

    from pycollective.ranks.communicator import Communicator


def init(
    comm: MPI.Intracomm | Communicator | None = None,
    *,
    devices: Sequence[jax.Device] | int | None = None,
    timeout: float | None = None,
    transport: str | None = None,
) -> Communicator:
    """Sets this process up and returns the world. All ranks must make this call; a second call changes nothing.

    The first use of the package calls it, so you need it only for its options. It also installs the hook that ends all
    ranks when an exception ends one of them. Call it before the first use of JAX's devices: then XLA computes with this
    rank's share of the host's cores, even if the launcher did not bind ranks to cores (the variable ``NPROC`` sets
    another number of threads). After that XLA has a thread for each core.

    Args:
        comm: the world, an mpi4py communicator; default ``COMM_WORLD``.
        devices: the local devices that this rank drives, a sequence or a number; default all. All ranks must have the
            same number.
        timeout: the seconds that a call may wait for other ranks before a report of all ranks ends the job; default
            ``PYCOLLECTIVE_TIMEOUT``, else 600; ``math.inf`` for no limit. If it is given here or there, it is also how
            long a rank that has ended waits for the others.
        transport: what carries the data of programs: "native", the default, is this package's own library; "mpi4jax" is
            mpi4jax's functions, on one CPU device of each rank.

    Raises:
        RuntimeError: this process is a child of a rank; MPI is not at ``THREAD_MULTIPLE``; this process sees no other
            rank although its launcher started several; the ranks have different numbers of devices.
        ValueError: ``timeout``, ``devices`` or ``transport`` is not valid, or differs from the first call; the ranks
            have different transports.
        ImportError: ``transport="mpi4jax"`` without mpi4jax.

    Example:
        >>> import pycollective as pc
        >>> pc.init() is pc.world()
        True
    """
    with mpi_start.within(timeout):
        world = importlib.import_module("pycollective.ranks.world")
    begun: Communicator = world.init(comm, devices, timeout, transport)
    return begun
