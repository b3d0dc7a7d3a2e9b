"""mpi4py's ``MPI`` module, with an error that tells what to do if no MPI library can be loaded.

The import starts MPI by mpi4py's rules (``mpi4py.rc``), which ask for ``THREAD_MULTIPLE``. In a child of a rank it does
not start MPI: the child may import this package only because its main module does.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from pycollective.config import config
from pycollective.environment import variable
from pycollective.errors import message
from pycollective.launch.child_processes import parent_rank
from pycollective.launch.find_mpi import LIBRARIES, identify, remedy_without_library
from pycollective.launch.libraries import standard_abi
from pycollective.launch.libraries.library import Library
from pycollective.transport.message_constants import MessageConstant

_M_ARENA_MAX = -8
"""glibc's number of the option (malloc.h)."""


def _share_one_arena() -> None:
    """Lets all threads that start from now on allocate from one arena; other C libraries have no such function.

    The threads of an MPI library would have an arena of their own, which glibc then gives to some of XLA's threads as
    well. A large array from there is always new memory, whose pages fault one by one: an allreduce of 64 MiB took three
    times as long. The other settings are in native/base/malloc.cc (``pycollective_tune_malloc``).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if config.malloc and mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


_share_one_arena()

try:
    import mpi4py

    if parent_rank() is not None:
        mpi4py.rc.initialize = False
    with ExitStack() as while_it_starts:
        for each in LIBRARIES:  # which of them mpi4py loads is not known yet
            for name, value in each.variables_to_start(os.environ).items():
                while_it_starts.enter_context(variable(name, value))
        from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise ImportError(
        message(
            "mpi",
            "an MPI library that mpi4py can load",
            f"{type(error).__name__}: {error}",
            remedy_without_library(str(error)),
        )
    ) from error

HeaderReader = Callable[[bytes], str]
"""Reads the first message of a message of a program: what that is."""

__all__ = [
    "MPI",
    "HeaderReader",
    "about_itself",
    "discard_messages",
    "host_of",
    "mpi_library",
    "number_in_mpi",
    "own_communicators",
    "register_communicator",
    "unregister_communicator",
]


@functools.cache
def mpi_library() -> Library | None:
    """The MPI library of this process; None if it is not known here."""
    return identify(about_itself(), abi=standard_abi.version(MPI.Get_abi_version()))


def about_itself() -> str:
    """What the MPI library of this process says about itself."""
    return MPI.Get_library_version().strip(" \x00\n")


own_communicators: dict[int, MPI.Intracomm] = {}
"""The communicators of this package that are in use, by their handles."""


def register_communicator(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Returns the communicator, which is in use from now on."""
    own_communicators[MPI._handleof(comm)] = comm
    return comm


def unregister_communicator(comm: MPI.Intracomm) -> None:
    """Comes before the communicator is freed."""
    own_communicators.pop(MPI._handleof(comm), None)


def number_in_mpi(value: int | MessageConstant) -> int:
    """A rank or a tag as this MPI library writes it: the constants have other numbers in each."""
    return int(getattr(MPI, value.name)) if isinstance(value, MessageConstant) else value


def discard_messages(comm: MPI.Intracomm, read_header: HeaderReader | None = None) -> list[str]:
    """Receives the messages that this rank has not received, and says of each what it is, its sender and its tag.

    All ranks must make this call, before the communicator is freed: MPI may give the next communicator the same
    context, which would receive them. A message is found if it has arrived when all ranks have come.

    Args:
        comm: the communicator.
        read_header: see :func:`receive_what_is_left`.
    """
    comm.Barrier()
    return receive_what_is_left(comm, read_header)


def receive_what_is_left(comm: MPI.Intracomm, read_header: HeaderReader | None = None) -> list[str]:
    """Receives the messages that have arrived and that nobody has received; what each is, its sender and its tag.

    Args:
        comm: the communicator.
        read_header: reads the header with which each message begins; None: messages have none.
    """
    found: list[str] = []
    status = MPI.Status()
    while (late := comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
        data = bytearray(status.Get_count(MPI.BYTE))
        late.Recv(data)
        what = "" if read_header is None else read_header(bytes(data))
        found.append(f"{what} from rank {status.source} with tag {status.tag}".lstrip())
    return found


@contextmanager
def host_of(comm: MPI.Intracomm) -> Iterator[MPI.Intracomm]:
    """The ranks of ``comm`` on this rank's host, in their order. All ranks must make this call."""
    neighbours = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert isinstance(neighbours, MPI.Intracomm)
    register_communicator(neighbours)
    yield neighbours
    unregister_communicator(neighbours)
    neighbours.Free()  # skipped after an error: it needs all ranks, and the error may be on this rank only
