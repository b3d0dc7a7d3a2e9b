"""Warnings of messages of programs that no rank has received."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from pycollective.config import config
from pycollective.errors import message
from pycollective.transport import native
from pycollective.transport.chosen import transport
from pycollective.transport.handlers import Native
from pycollective.transport.mpi import HeaderReader


def _some(senders: Sequence[str]) -> str:
    """A few of the messages, each once: without a header a message may be several of MPI's.

    Example:
        >>> _some(["from rank 0 with tag 1", "from rank 0 with tag 1"])
        'from rank 0 with tag 1'
    """
    return "; ".join(list(dict.fromkeys(senders))[:4])


def header_reader() -> HeaderReader | None:
    """The function that reads the headers of messages of programs; None if messages have no headers."""
    return native.message_header if config.check.when >= 2 and isinstance(transport(), Native) else None


def warn(comm: Any, senders: Sequence[str]) -> None:
    """Warns that a communicator that is released had unreceived messages."""
    got = f"some that nobody received: {_some(senders)}"
    remedy = "Receive them before: what is left would reach another communicator, so it is thrown away."
    text = message("Communicator.free", "no messages under way", got, remedy, rank=comm.rank, size=comm.size)
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def tell_at_end(left: Iterable[tuple[Any, Sequence[str]]]) -> None:
    """Writes which messages this rank has not received, when all ranks have ended. ``left``: by communicator."""
    for comm, senders in sorted(left, key=lambda item: str(item[0].name)):
        if senders:
            got = f"some of communicator {comm.name} that it has not: {_some(senders)}"
            remedy = "A send lacks its recv; a later recv with that tag has taken an older array."
            text = message("exit", "a rank that has received its messages", got, remedy, rank=comm.rank, size=comm.size)
            sys.stderr.write(f"{text}\n")
