"""At a function's first call ranks compare what they traced: a difference is an error on all of them, not a hang.

Only calls speak with other ranks. Tracing, lowering and compiling never do, since a rank may trace alone: for an uneven
batch, after ``jax.clear_caches()``, for ``jax.eval_shape`` or ``lower``. So a trace writes down what it found
(:func:`note_program`), and the call that caused it compares that (:func:`compare_notes`): once, when all ranks make the
first call. The whole program is noted, and not each function inside: JAX may know those already, on some ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from pycollective.config import config
from pycollective.errors import message
from pycollective.faults import rank_exit
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.setup import timeout

T = TypeVar("T")

_NOTICE_S = 30.0
"""How long a rank waits for the others' first calls before it says so."""


class Note(NamedTuple):
    """What one rank found when it traced a function over named axes.

    Attributes:
        comm: the ranks of the axes.
        where: for messages.
        name: of the function, for messages. Ranks may call it differently.
        found: what the ranks must have in common, line by line; or the error that ended the trace.
    """

    comm: Communicator
    where: str
    name: str
    found: list[str] | str


_notes: list[list[Note]] = []
"""Of the first calls under way, the innermost last."""


@contextlib.contextmanager
def collect_notes() -> Iterator[list[Note]]:
    """Collects the notes of the traces inside."""
    notes: list[Note] = []
    _notes.append(notes)
    try:
        yield notes
    finally:
        _notes.pop()


def note_errors_of(comm: Communicator, where: str, fun: Callable[..., Any], trace: Callable[[], T]) -> T:
    """``trace()``. Whoever collects gets a note of its error.

    Args:
        comm: the ranks.
        where: for messages.
        fun: the function, whose name stands in messages.
        trace: of the function.

    Raises:
        ValueError: ``comm`` was freed.
    """
    comm.check_live(where)
    try:
        return trace()
    except Exception as error:
        if _notes:
            _notes[-1].append(Note(comm, where, _name(fun), f"{type(error).__name__}: {error}"))
        raise


def note_program(where: str, fun: Callable[..., Any], lines: Callable[[], Mapping[Communicator, list[str]]]) -> None:
    """Notes for whoever collects what the ranks of each communicator must have in common of a program, line by line."""
    if _notes:
        _notes[-1].extend(Note(comm, where, _name(fun), own) for comm, own in lines().items())


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", repr(fun))


def compare_notes(notes: list[Note]) -> None:
    """Compares each note with those of the other ranks of its communicator, which must make this call as well.

    Raises:
        RuntimeError: another rank's trace failed, differs, or does not come within the timeout of ``init``.
    """
    for note in notes:
        if note.comm.size > 1 and config.check != 0:
            others = exchange(note.comm, note.where, note.name, note.found)
            # Whose own trace failed raises that error itself.
            if isinstance(note.found, list):
                _compare(note, note.found, others)


def _compare(note: Note, found: list[str], others: list[Any]) -> None:
    for rank, other in enumerate(others):
        if other != found:
            here, there = _difference(found, other)
            raise RuntimeError(
                message(
                    note.where,
                    f"the same program on every rank, here with {here}",
                    f"{there} on rank {rank}",
                    "All ranks must call the same functions in the same order, with the same shapes and dtypes.",
                    rank=note.comm.rank,
                    size=note.comm.size,
                )
            )


def _difference(mine: list[str], other: list[str] | str) -> tuple[str, str]:
    if isinstance(other, str):
        return "no error", other
    end = "no further collective"
    for i in range(max(len(mine), len(other))):
        here, there = (lines[i] if i < len(lines) else end for lines in (mine, other))
        if here != there:
            return here, there
    raise AssertionError("called for programs that differ")


def exchange(comm: Communicator, where: str, name: str, own: Any) -> list[Any]:
    """``own`` of every rank; all must make this call. Sleeps meanwhile: tracing takes ranks different times."""
    missing = f"the other ranks to call {name} too"
    remedy = "Look for a rank that calls something else, or has ended."
    limit = timeout()
    notice = f"rank {comm.rank} of {comm.size} waits for {missing}. {remedy}"

    def wait(has_come: Callable[[], bool]) -> None:
        for waited in rank_exit.waits(has_come, 0.01, _NOTICE_S, notice):
            if limit is not None and waited > limit:
                got = f"no sign of some for {waited:.0f} s"
                raise RuntimeError(message(where, missing, got, remedy, rank=comm.rank, size=comm.size))

    comm.check_live(where)
    return comm.out_of_band.allgather(own, wait)
