"""The resources of a communicator: its private duplicates and its number in the transport.

They outlive the Python objects of the communicator, and are released when no rank uses them any more. The messages that
no rank has received then are named, and so are the communicators that exist when MPI can make no more.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
import weakref
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pycollective.config import config
from pycollective.errors import message
from pycollective.faults import rank_exit
from pycollective.ordering import dispatch, eager
from pycollective.transport import failures, native
from pycollective.transport.chosen import transport
from pycollective.transport.handlers import Native
from pycollective.transport.mpi import (
    MPI,
    HeaderReader,
    discard_messages,
    receive_what_is_left,
    register_communicator,
    unregister_communicator,
)
from pycollective.transport.watch import waiting

_SPLITS = 64
"""After so many splits of a communicator its ranks agree which of the splits are unused. If more splits are in use, the
next agreement comes after as many further splits, so that many used splits cost little."""


class CommunicatorResources:
    """The resources of one MPI communicator.

    Args:
        mpi: the communicator, the program's object.
        owned: whether ``mpi`` is freed with the resources.
        calls: the duplicate for collectives.
        rest: the duplicate for everything else.
        facts: the attributes of each ``Communicator`` of it.

    Attributes:
        mpi: the communicator, in an object that the program does not have.
        end: why the communicator is unusable; "": it is usable.
    """

    def __init__(
        self, mpi: MPI.Intracomm, calls: MPI.Intracomm, rest: MPI.Intracomm, facts: dict[str, Any], *, owned: bool
    ) -> None:
        self.mpi = register_communicator(MPI.Intracomm(mpi))
        self.calls, self.rest, self.facts, self._owned = calls, rest, facts, owned
        self.end = ""
        self._objects: list[weakref.ref[Any]] = []
        self._splits: dict[int, CommunicatorResources | None] = {}  # None: this rank has no part in it
        self._made = 0
        self._next_agreement = _SPLITS
        in_use[self.identity] = self

    def register_objects(self, *objects: Any) -> None:
        """Remembers objects of the program that refer to the communicator."""
        self._objects = [known for known in self._objects if known() is not None] + [*map(weakref.ref, objects)]

    def object(self, kind: type) -> Any:
        """The program's object of this type that refers to the communicator; None if the program has none."""
        return next((known for ref in self._objects if isinstance(known := ref(), kind)), None)

    @property
    def identity(self) -> int:
        """The number that all its ranks have for it, and for no other communicator."""
        return int(self.facts["_identity"])

    def split(self) -> int:
        """Begins a split, and returns its number, which is the same on all ranks. All ranks must make this call."""
        if self._made >= self._next_agreement:
            before = len(self._splits)
            self._release_unused_splits(self.mpi)
            if len(self._splits) > before / 2:  # the same on all ranks
                gc.collect()  # an object in a cycle is not used
                self._release_unused_splits(self.mpi)
            self._next_agreement = self._made + max(_SPLITS, len(self._splits))
        self._made += 1
        self._splits[self._made] = None
        return self._made

    def add_split(self, number: int, made: CommunicatorResources) -> None:
        """Keeps this rank's part of a split."""
        self._splits[number] = made

    def release(self, *, mpi: MPI.Intracomm | None, mpi_is_freed: bool = False) -> None:
        """Releases all resources. All ranks must make this call, when no rank has a program that uses the communicator.

        Args:
            mpi: the program's object; None: it has none.
            mpi_is_freed: whether the call is a part of the program's ``mpi.Free()``.
        """
        with waiting("free", self.identity):
            self._release_unused_splits(self.calls)
            transport().free(self.facts["_program_key"][0])
            self.end = "freed"
            eager.forget(self._keys())
            in_use.pop(self.identity)
            lost = discard_messages(self.calls, _header_reader())
            unregister_communicator(self.mpi)
            if not mpi_is_freed:
                self.mpi.Delete_attr(keyval())
            for own in (self.calls, self.rest, *([mpi or self.mpi] if self._owned and not mpi_is_freed else ())):
                discard_messages(own)
                unregister_communicator(own)
                own.Free()
        if lost:
            _warn_of_unreceived(self, lost)

    def _release_unused_splits(self, comm: MPI.Intracomm) -> None:
        """Releases the splits that no rank uses. All ranks must make this call.

        Args:
            comm: a communicator of these ranks.
        """
        if not self._splits:  # the same on all ranks
            return
        mine = array("B", [split is not None and split._is_used() for split in self._splits.values()])
        anywhere = array("B", mine)
        comm.Allreduce(mine, anywhere, op=MPI.MAX)
        unused = [number for number, used in zip(self._splits, anywhere, strict=True) if not used]
        for split in [self._splits.pop(number) for number in unused]:
            if split is not None and not split.end:
                split.release(mpi=None)

    def _is_used(self) -> bool:
        """Whether this rank uses the communicator: by an object of it or of a split of it, a program, or a call."""
        if self.end:
            return False
        if any(known() is not None for known in self._objects):
            return True
        if any(split is not None and split._is_used() for split in self._splits.values()):
            return True
        eager.forget(self._keys())  # only a line that has an object runs them
        return native.is_held(self.facts["_program_key"][0])

    def _keys(self) -> Iterator[tuple[int, int]]:
        """The names of it, its parts and groups in programs."""
        yield self.facts["_program_key"]
        yield from self.facts["_keys"].values()

    @property
    def rank(self) -> int:
        """See ``Communicator``."""
        return int(self.facts["rank"])

    @property
    def size(self) -> int:
        """See ``Communicator``."""
        return int(self.facts["size"])

    @property
    def name(self) -> str:
        """See ``Communicator``."""
        return str(self.facts["_name"])


in_use: dict[int, CommunicatorResources] = {}
"""The resources of the usable communicators of this process, by the identity of the communicator."""


@contextlib.contextmanager
def explain_exhaustion() -> Iterator[None]:
    """Raises an error that lists the existing communicators, if MPI cannot make the communicator that is made inside.

    Raises:
        RuntimeError: MPI cannot make it.
    """
    try:
        yield
    except MPI.Exception as error:
        alive = Counter(resources.name for resources in in_use.values())
        kinds = ", ".join(f"{count} x {name}" for name, count in alive.most_common(4))
        got = f'"{error}" with {sum(alive.values())} communicators alive ({kinds})'
        remedy = "Call free() on those that are not needed any more."
        world = MPI.COMM_WORLD
        text = message("Communicator", "MPI to make one more", got, remedy, rank=world.rank, size=world.size)
        raise RuntimeError(text) from error


_keyvals: list[int] = []


def keyval() -> int:
    """The key of the attribute of an MPI communicator that holds its resources."""
    if not _keyvals:
        _keyvals.append(MPI.Comm.Create_keyval(delete_fn=_mpi_is_freed))
    return _keyvals[0]


def _mpi_is_freed(mpi: MPI.Comm, _: int, resources: CommunicatorResources) -> None:
    """Releases the resources of an MPI communicator that the program frees. All its ranks are in that call.

    MPI_Finalize deletes the attributes of COMM_WORLD and COMM_SELF as well. Nothing is released then.
    """
    if not resources.end and mpi not in (MPI.COMM_WORLD, MPI.COMM_SELF):
        dispatch.flush()
        resources.release(mpi=None, mpi_is_freed=True)


def abandon_all(end: str) -> None:
    """Makes all communicators unusable, without a call of MPI. ``end``: why."""
    failures.abandon_all()
    if end == "finalized":
        end_messages()
    for resources in in_use.values():
        resources.end = end
    in_use.clear()


# Messages of programs that no rank has received ----------------------------------------------------------------


def _header_reader() -> HeaderReader | None:
    """The function that reads the headers of messages of programs; None if messages have no headers."""
    return native.message_header if config.check.when >= 2 and isinstance(transport(), Native) else None


def _some(senders: Sequence[str]) -> str:
    """A few of the messages, each once: without a header a message may be several of MPI's.

    Example:
        >>> _some(["from rank 0 with tag 1", "from rank 0 with tag 1"])
        'from rank 0 with tag 1'
    """
    return "; ".join(list(dict.fromkeys(senders))[:4])


def _warn_of_unreceived(comm: CommunicatorResources, senders: Sequence[str]) -> None:
    """Warns that a communicator that is released had unreceived messages."""
    got = f"some that nobody received: {_some(senders)}"
    remedy = "Receive them before: what is left would reach another communicator, so it is thrown away."
    text = message("Communicator.free", "no messages under way", got, remedy, rank=comm.rank, size=comm.size)
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def _tell_unreceived() -> None:
    """Writes which messages this rank has not received, when all ranks have ended."""
    for comm in sorted(in_use.values(), key=lambda resources: resources.name):
        senders = receive_what_is_left(comm.calls, _header_reader())
        receive_what_is_left(comm.rest)  # the data of these messages, lest their senders wait
        if senders:
            got = f"some of communicator {comm.name} that it has not: {_some(senders)}"
            remedy = "A send lacks its recv; a later recv with that tag has taken an older array."
            text = message("exit", "a rank that has received its messages", got, remedy, rank=comm.rank, size=comm.size)
            sys.stderr.write(f"{text}\n")


def end_messages() -> None:
    """Ends the messages that no program has waited for, and writes which they are."""
    if left := native.abandon_messages():
        mpi = MPI.COMM_WORLD
        what = "; ".join(left[:4]) + (f"; ... ({len(left)} in all)" if len(left) > 4 else "")
        remedy = "Call pycollective.wait for each request: what is received without it is lost."
        text = message("exit", "a wait for each request", f"none for {what}", remedy, rank=mpi.rank, size=mpi.size)
        sys.stderr.write(f"{text}\n")


rank_exit.check_at_clean_end(end_messages)
rank_exit.check_at_clean_end(_tell_unreceived)
