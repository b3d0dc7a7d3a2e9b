"""The function ``init``. It sets its time limit before MPI starts: the import of ``ranks.world`` starts MPI."""

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
    """Sets this process up and returns the world. All ranks must make this call. A second call changes nothing.

    The first use of the package calls it, so a program needs it only for its options. It also installs the hook that
    ends all ranks when an exception ends one of them. Call it before the first use of JAX's devices: then XLA computes
    with this rank's share of the host's cores, even if the launcher does not bind ranks to cores. (The variable
    ``NPROC`` sets another number of threads.) If JAX's devices are in use already, XLA has a thread for each core.

    Args:
        comm: an mpi4py communicator, the world. Default None: ``COMM_WORLD``.
        devices: the local devices of this rank, a sequence or a number. All ranks must have the same number. Default
            None: all local devices.
        timeout: the seconds that a call may wait for other ranks. After that a report of all ranks is printed and the
            job ends. Default ``PYCOLLECTIVE_TIMEOUT``, else 600; ``math.inf`` means no limit. If the timeout is given,
            here or by the variable, it is also the time that a rank waits for the others at its end.
        transport: the library for the data of programs. "native", the default: this package's own library. "mpi4jax":
            mpi4jax's functions, on one CPU device of each rank.

    Returns:
        The world: the :class:`Communicator` of all ranks of ``comm``.

    Raises:
        RuntimeError: this process is a child of a rank; MPI is not at ``THREAD_MULTIPLE``; this process sees no other
            rank although its launcher started several; the ranks have different numbers of devices.
        ValueError: ``timeout``, ``devices`` or ``transport`` is not valid, or differs from the first call; the ranks
            have different transports.
        ImportError: ``transport="mpi4jax"``, and mpi4jax is not installed.

    Order:
        Outside programs: it starts MPI, and the ranks compare the numbers of their devices.

    Example:
        >>> import pycollective as pc
        >>> pc.init() is pc.world()
        True
    """
    with mpi_start.within(timeout):
        world = importlib.import_module("pycollective.ranks.world")
    begun: Communicator = world.init(comm, devices, timeout, transport)
    return begun
