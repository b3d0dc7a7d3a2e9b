"""Failed ranks, where MPI outlives them. Its name for that is ULFM, User-Level Failure Mitigation.

A rank that waits for another one must not wait on when a third has failed, and has made that other one give up. So each
communicator of this package is known here from its making on, and :func:`revoke_all` ends the calls on all of them.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

from pycollective.transport import native_library
from pycollective.transport.mpi import MPI, mpi_library, own_communicators

_MAX_COMMUNICATORS = 1 << 12
"""How many communicators calls may have made."""


def describe_missing_support() -> str:
    """The MPI, if it ends the job when a rank fails; empty if it does not.

    That a library has the functions of ULFM is not enough: its launcher may end the job.
    """
    own = mpi_library()
    if own is None or own.ulfm is None or not own.can_lose_ranks:
        name, version = MPI.get_vendor()
        return own.description if own else f"{name} {'.'.join(map(str, version))}"
    value = MPI.COMM_WORLD.Get_attr(own.ulfm.attribute)
    is_on = isinstance(value, int) and ctypes.c_int.from_address(value).value
    return "" if is_on else f"{own.name} without mpiexec's option {' '.join(own.ulfm.options)}"


def has_failed(comm: MPI.Intracomm) -> bool:
    """Whether a rank of ``comm`` has failed, or a rank has revoked it, as far as this rank knows."""
    if comm.Is_revoked():
        return True
    failed = comm.Get_failed()
    number = failed.size
    failed.Free()
    return number > 0


def revoke_all() -> None:
    """Ends all calls on the communicators of this package, on all their ranks, now and later, with an error."""
    handles = (ctypes.c_int64 * _MAX_COMMUNICATORS)()
    number = native_library.library().pycollective_own_comms(handles, ctypes.c_int64(_MAX_COMMUNICATORS))
    made_by_calls = [MPI.Intracomm.fromhandle(handle) for handle in handles[: min(number, _MAX_COMMUNICATORS)]]
    for comm in [*own_communicators.values(), *made_by_calls]:
        with suppress(MPI.Exception):  # another thread has just freed it
            comm.Revoke()


def abandon_all() -> None:
    """Gives up all communicators of this package, without a call of MPI: not all their ranks can make it any more."""
    native_library.library().pycollective_abandon_all()
    own_communicators.clear()


def agree(comm: MPI.Intracomm, fine: bool) -> bool:
    """Whether ``fine`` on all ranks of ``comm``, and none has failed; the same on all. All living ranks must call it.

    It works on a revoked communicator, too.
    """
    try:
        return bool(comm.Agree(int(fine)))
    except MPI.Exception:  # on all ranks: one has failed that they have not agreed on before
        return False
