"""Failed ranks, where MPI outlives them. Its name for that is ULFM, User-Level Failure Mitigation.

A rank that waits for another one must not wait on when a third has failed, and has made that other one give up. So each
communicator of this package is known here from its making on, and :func:`revoke_all` ends the calls on all of them.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

from pycollective.transport import compiled
from pycollective.transport.mpi import MPI, known

_FT_OF_OPEN_MPI = 12
"""Open MPI's ``MPI_FT``, the attribute of MPI_COMM_WORLD that says whether ranks may fail. mpi4py does not name it."""

_ROOM = 1 << 12
"""How many communicators calls may have made."""


def why_not() -> str:
    """The MPI, if it ends the job when a rank fails; empty if it does not.

    Open MPI before 5 has no ULFM. MPICH's functions of that name do not do it: its launcher ends the job.
    """
    name, version = MPI.get_vendor()
    library = f"{name} {'.'.join(map(str, version))}"
    if name != "Open MPI" or version < (5, 0, 0):
        return library
    value = MPI.COMM_WORLD.Get_attr(_FT_OF_OPEN_MPI)
    is_on = isinstance(value, int) and ctypes.c_int.from_address(value).value
    return "" if is_on else f"{library} without mpiexec's option --with-ft ulfm"


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
    handles = (ctypes.c_int64 * _ROOM)()
    number = compiled.library().pycollective_own_comms(handles, ctypes.c_int64(_ROOM))
    made_by_calls = [MPI.Intracomm.fromhandle(handle) for handle in handles[: min(number, _ROOM)]]
    for comm in [*known.values(), *made_by_calls]:
        with suppress(MPI.Exception):  # another thread has just freed it
            comm.Revoke()


def abandon_all() -> None:
    """Gives up all communicators of this package, without a call of MPI: not all their ranks can make it any more."""
    compiled.library().pycollective_abandon_all()
    known.clear()


def agree(comm: MPI.Intracomm, fine: bool) -> bool:
    """Whether ``fine`` on all ranks of ``comm``, and none has failed; the same on all. All living ranks must call it.

    It works on a revoked communicator, too.
    """
    try:
        return bool(comm.Agree(int(fine)))
    except MPI.Exception:  # on all ranks: one has failed that they have not agreed on before
        return False
