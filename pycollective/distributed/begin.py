"""``pycollective.distributed.initialize``, the counterpart of ``jax.distributed.initialize``.

It sets its time limit before MPI starts: the import of ``distributed.start`` starts MPI.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycollective.transport import mpi_start

if TYPE_CHECKING:
    import jax
    from mpi4py import MPI

    from pycollective.ranks.communicator import Communicator


def initialize(
    comm: MPI.Intracomm | None = None,
    *,
    collectives: str | None = None,
    devices: Sequence[jax.Device] | int | None = None,
    timeout: float | None = None,
    **options: Any,
) -> Communicator:
    """Starts JAX on all ranks as one process group: ``jax.devices()`` then has the devices of all ranks.

    All ranks must make this call. It does what ``jax.distributed.initialize`` and :func:`pycollective.init` do. MPI
    gives the number of this process and of all processes. Rank 0 finds a free port at an address that the other hosts
    reach. On CPUs XLA's own collectives, in programs of global arrays, then use MPI. On GPUs XLA uses NCCL. Call it
    before the first use of JAX's devices, and import pycollective before jax.

    Args:
        comm: an mpi4py communicator with the ranks. The number of a process is its rank. Default None: ``COMM_WORLD``.
        collectives: the implementation of XLA's collectives between CPU devices: "mpi", for one CPU device of each
            rank, or "gloo". Default ``JAX_CPU_COLLECTIVES_IMPLEMENTATION``, else "mpi".
        devices: as for :func:`pycollective.init`.
        timeout: the seconds that a rank may wait for others, as for :func:`pycollective.init`; it also limits this
            call.
        options: options of ``jax.distributed.initialize``: ``local_device_ids``, ``heartbeat_timeout_seconds``, ... If
            all ranks give ``coordinator_address``, JAX's service listens there, and rank 0 does not look for an
            address.

    Returns:
        The world, as :func:`pycollective.init` returns it.

    Raises:
        RuntimeError: JAX or this package has started before; jax was imported before pycollective; a rank has several
            CPU devices, which XLA's MPI collectives do not distinguish; the hosts do not reach each other.
        ValueError: ``collectives`` is not one of the two names.

    Order:
        Outside programs: it starts MPI, and the ranks exchange messages.

    Source:
        ``jax.distributed.initialize``.

    Example:
        >>> import pycollective as pc
        >>> pc.distributed.initialize()  # doctest: +SKIP
        Communicator(world, rank 0 of 1)
    """
    with mpi_start.within(timeout):
        start = importlib.import_module("pycollective.distributed.start")
    world: Communicator = start.initialize(comm, collectives=collectives, devices=devices, timeout=timeout, **options)
    return world
