"""The form of every error message: what was expected, what was found, on which rank, and what to do."""

from __future__ import annotations

import operator
from collections.abc import Collection
from itertools import groupby
from typing import Any, NoReturn, Protocol

FROM_A_CLONE = "pip install '.[mpich]' in a clone of the repository"
"""The command that installs an MPI library together with this package, which is on no package index."""


def message(
    where: str, expected: Any, got: Any, remedy: str, *, rank: int | None = None, size: int | None = None
) -> str:
    """Formats ``pycollective.<where>: expected <expected>, got <got> (rank r of n). <remedy>``.

    Example:
        >>> message("psum", "a Communicator", "3", "Pass pycollective.world().", rank=0, size=2)
        'pycollective.psum: expected a Communicator, got 3 (rank 0 of 2). Pass pycollective.world().'
    """
    place = f" (rank {rank} of {size})" if rank is not None else ""
    return f"pycollective.{where}: expected {expected}, got {got}{place}. {remedy}"


class CollectiveMismatch(RuntimeError):  # noqa: N818 (the word is what users look for in logs)
    """An error: the ranks do not make the same calls in the same order.

    The operation, shape, dtype, line or order of a call differs between ranks. The error is raised on all ranks when
    they compare a traced function, at its first call, before any rank calls MPI. A difference that appears while a
    program runs is an error of that program, as JAX raises it: a :class:`jax.errors.JaxRuntimeError` or a ValueError
    whose text has the word ``CollectiveMismatch``.

    Example:
        >>> import pycollective as pc
        >>> issubclass(pc.CollectiveMismatch, RuntimeError)
        True
    """


class Place(Protocol):
    """An object with a rank and a size: a communicator, or a part of one."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""


def fail(kind: type[Exception], where: str, place: Place | None, expected: Any, got: Any, remedy: str) -> NoReturn:
    """Raises ``kind`` with a message, which names the rank if ``place`` is given."""
    rank, size = (place.rank, place.size) if place is not None else (None, None)
    raise kind(message(where, expected, got, remedy, rank=rank, size=size))


def integer(where: str, place: Place | None, name: str, value: Any) -> int:
    """Returns ``value`` as a Python integer; raises TypeError if it is none, or not known while tracing."""
    try:
        return operator.index(value)
    except TypeError:
        fail(
            TypeError,
            where,
            place,
            f"{name} to be an integer",
            repr(value),
            "Pass a Python integer; it is fixed when the program is traced.",
        )


def sequence(where: str, place: Place | None, name: str, values: Any) -> tuple[Any, ...]:
    """Returns ``values`` as a tuple; raises TypeError if it is no sequence of items."""
    try:
        return tuple(values)
    except TypeError:
        fail(
            TypeError,
            where,
            place,
            f"{name} to be a sequence",
            repr(values),
            "Pass a tuple with an item for each axis.",
        )


def name_ranks(ranks: Collection[int]) -> str:
    """Names ranks in a few words.

    Example:
        >>> name_ranks([1]), name_ranks([1, 3]), name_ranks({0, 1, 2, 3, 5, 6})
        ('rank 1', 'ranks 1, 3', 'ranks 0-3, 5, 6')
        >>> name_ranks(range(0, 100, 2))
        'ranks 0, 2, 4, 6, 8, 10, ... (50 in all)'
    """
    runs: list[str] = []
    for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        runs += [f"{members[0]}-{members[-1]}"] if len(members) > 2 else map(str, members)
    if len(runs) > 8:
        runs = [*runs[:6], f"... ({len(ranks)} in all)"]
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(runs)}"
