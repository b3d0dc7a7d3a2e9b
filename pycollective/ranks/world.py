"""The world: the communicator that :func:`init` makes, and that functions use if the caller names none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from pycollective.errors import fail, message, name_ranks
from pycollective.faults import rank_exit
from pycollective.launch.child_processes import is_forked, refuse_child
from pycollective.ranks import setup
from pycollective.ranks.communicator import Communicator, lose_all, made_for
from pycollective.ranks.ranks_by_value import of_rank, ranks_in, together
from pycollective.transport import board
from pycollective.transport.mpi import MPI, host_of, register_communicator


class _State:
    world: Communicator | None = None


def init(
    comm: MPI.Intracomm | Communicator | None = None,
    devices: Sequence[jax.Device] | int | None = None,
    timeout: float | None = None,
    transport: str | None = None,
    *,
    warns: bool = True,
) -> Communicator:
    """See :func:`pycollective.init`. ``warns``: whether to warn if threads of XLA have started before."""
    refuse_child("init")
    if MPI.Is_finalized():
        remedy = "Use it before MPI.Finalize(); without that call, mpi4py ends MPI with the process."
        raise RuntimeError(message("init", "MPI that runs", "MPI after MPI.Finalize()", remedy))
    given = comm.mpi if isinstance(comm, Communicator) else comm
    mpi = MPI.COMM_WORLD if given is None else given
    if not isinstance(mpi, MPI.Intracomm):
        raise TypeError(message("init", "an mpi4py intracommunicator", repr(comm), "Pass mpi4py.MPI.COMM_WORLD, say."))
    setup.start(mpi, devices, timeout, transport, warns=warns)
    if (first := world_if_known()) is not None:
        if given is not None and given != first.mpi:
            raise ValueError(
                message("init", f"the world of the first call, {first!r}", repr(comm), "Call init only once.")
            )
        return first
    counts = mpi.allreduce(of_rank(mpi.rank, len(setup.devices_of_this_rank())), op=together)
    if len(counts) > 1:
        raise RuntimeError(
            message(
                "init",
                "the same number of local devices on every rank",
                ", ".join(f"{n} on {name_ranks(ranks_in(counts[n]))}" for n in sorted(counts)),
                "Pass devices=, or set JAX_NUM_CPU_DEVICES alike.",
                rank=mpi.rank,
                size=mpi.size,
            )
        )
    name = "world" if mpi == MPI.COMM_WORLD else mpi.Get_name() or "unnamed"
    return _begin(mpi, name)


def _begin(mpi: MPI.Intracomm, name: str) -> Communicator:
    world = made_for(mpi) or Communicator._make(mpi, name, owned=False)
    rank_exit.wait_for_all_at_exit(mpi)
    _State.world = world
    return world


def rebuild_world_after_failure(mpi: MPI.Intracomm, losses: int) -> Communicator:
    """Makes the world of the remaining ranks. All older communicators are unusable from then on.

    All remaining ranks must make this call.

    Args:
        mpi: the remaining ranks.
        losses: the number of such calls so far, including this one; the same on all ranks.
    """
    old = _State.world
    assert old is not None
    lose_all(losses)
    register_communicator(mpi)
    with host_of(mpi) as neighbours:
        if neighbours.rank == 0:
            board.clear()  # before any rank can take a slot
        mpi.Barrier()
    return _begin(mpi, old.name)


def world_if_known() -> Communicator | None:
    """The communicator of :func:`init`; None if it was not called, or if the communicator was freed."""
    return None if _State.world is None or _State.world._is_freed else _State.world


def world() -> Communicator:
    """Returns the communicator of all ranks. The first call of it calls :func:`init`, if the program has not done so.

    Returns:
        The :class:`Communicator` that :func:`init` returns. Each call returns the same object, until
        :func:`pycollective.elastic.run` continues with fewer ranks.

    Raises:
        RuntimeError: this process is a child of a rank; or for the reasons of :func:`init`.

    Order:
        No communication, except in :func:`init`.

    Source:
        MPI_COMM_WORLD (MPI standard, 7.2.4).

    Example:
        >>> import pycollective as pc
        >>> pc.world().size >= 1
        True
    """
    if is_forked():
        refuse_child("world")
    return world_if_known() or init()


def given_or_world(where: str, given: Any) -> Communicator:
    """The communicator ``given``, or the world for None; ``where`` names the operation in errors."""
    if is_forked():
        refuse_child(where)
    comm = world() if given is None else given
    if not isinstance(comm, Communicator):
        remedy = "Pass pycollective.world(), a split of it, or pycollective.Communicator(mpi4py communicator)."
        if isinstance(comm, (str, tuple, list)):
            remedy = "This operation has no form over axis names. " + remedy
        fail(TypeError, where, None, "a Communicator", repr(given), remedy)
    comm._check_live(where)
    return comm


def when_needed(where: str, comm: Any) -> Callable[[], Communicator]:
    """A function that returns the communicator ``comm``, or the world for None.

    A decorator uses it, since a decorator must not start MPI: one rank alone may import a module with decorated
    functions.
    """
    if comm is not None:
        given_or_world(where, comm)
    return partial(given_or_world, where, comm)
