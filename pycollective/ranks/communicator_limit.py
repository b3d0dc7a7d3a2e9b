"""The error where MPI can make no more communicators."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from pycollective.errors import message
from pycollective.transport.mpi import MPI


@contextlib.contextmanager
def explain_exhaustion(names: Callable[[], list[str]]) -> Iterator[None]:
    """Raises an error that lists the existing communicators, if MPI cannot make the communicator that is made inside.

    Args:
        names: returns the names of the existing communicators.

    Raises:
        RuntimeError: MPI cannot make it.
    """
    try:
        yield
    except MPI.Exception as error:
        alive = Counter(names())
        kinds = ", ".join(f"{count} x {name}" for name, count in alive.most_common(4))
        got = f'"{error}" with {sum(alive.values())} communicators alive ({kinds})'
        remedy = "Call free() on those that are not needed any more."
        world = MPI.COMM_WORLD
        text = message("Communicator", "MPI to make one more", got, remedy, rank=world.rank, size=world.size)
        raise RuntimeError(text) from error
