"""``pycollective.distributed.initialize``, the counterpart of ``jax.distributed.initialize``.

It knows its limit before MPI starts: the import of what it needs starts MPI.
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
    """Starts JAX on all ranks as one: ``jax.devices()`` are then the devices of all of them. All ranks must call it.

    It is ``jax.distributed.initialize`` and :func:`pycollective.init` in one. MPI says which process this is, of how
    many; rank 0 finds an address that the other hosts reach, and a free port. On CPUs XLA's own collectives, in
    programs of global arrays, then go through MPI. On GPUs XLA has NCCL. Call it before the first use of JAX's devices,
    and import pycollective before jax.

    Args:
        comm: the ranks, an mpi4py communicator; default ``COMM_WORLD``. The number of a process is its rank.
        collectives: what carries XLA's collectives between CPU devices: "mpi", for one CPU device of each rank, or
            "gloo"; default ``JAX_CPU_COLLECTIVES_IMPLEMENTATION``, else "mpi".
        devices: as for :func:`pycollective.init`.
        timeout: the seconds that a rank may wait for others, as for :func:`pycollective.init`; also here.
        options: for ``jax.distributed.initialize``: ``local_device_ids``, ``heartbeat_timeout_seconds``, ...; if all
            ranks give ``coordinator_address``, JAX's service listens there, and nobody looks for an address.

    Returns:
        The world, as :func:`pycollective.init` returns it.

    Raises:
        RuntimeError: JAX or this package has started before; jax was imported before pycollective; a rank has several
            CPU devices, which MPI cannot tell apart; the hosts do not reach each other.
        ValueError: ``collectives`` is no name of an implementation.

    Source: jax.distributed.initialize.

    Example:
        >>> import pycollective as pc
        >>> pc.distributed.initialize()  # doctest: +SKIP
        Communicator(world, rank 0 of 1)
    """
    with mpi_start.within(timeout):
        start = importlib.import_module("pycollective.distributed.start")
    world: Communicator = start.initialize(comm, collectives=collectives, devices=devices, timeout=timeout, **options)
    return world
