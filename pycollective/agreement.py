"""Before ranks run one program they compare what they traced: a difference is an error on all of them, not a hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pycollective import lifecycle
from pycollective.communicator import Communicator
from pycollective.config import config
from pycollective.errors import message

T = TypeVar("T")

_NOTICE_S = 30.0
"""How long a rank waits for the others' traces before it says so."""


def agreed(comm: Communicator, where: str, name: str, trace: Callable[[], tuple[T, Callable[[], list[str]]]]) -> T:
    """``trace()[0]``, if it succeeds on all ranks and its second part says the same there. All must make this call.

    Args:
        comm: the ranks.
        where: for messages.
        name: of the program, for messages.
        trace: returns the program, and a function that says what the ranks must have in common, line by line.

    Raises:
        ValueError: ``comm`` was freed.
        RuntimeError: another rank's trace failed, differs, or does not come within ``PYCOLLECTIVE_TIMEOUT``.
    """
    comm.check_live(where)
    failure: Exception | None = None
    own: str | list[str] = []
    others: list[Any] = []
    compares = comm.size > 1 and config.check != 0
    try:
        program, lines = trace()
        if compares:
            own = [f"program {name}", *lines()]
    except Exception as error:  # raised below, when the others know
        failure = error
        own = f"{type(error).__name__}: {error}"
    if compares:
        others = exchanged(comm, where, name, own)
    if failure is not None:
        raise failure
    for rank, other in enumerate(others):
        if other != others[comm.rank]:
            here, there = _difference(others[comm.rank], other)
            raise RuntimeError(
                message(
                    where,
                    f"the same program on every rank, here with {here}",
                    f"{there} on rank {rank}",
                    "All ranks must call the same functions in the same order, with the same shapes and dtypes.",
                    rank=comm.rank,
                    size=comm.size,
                )
            )
    return program


def _difference(mine: list[str], other: list[str] | str) -> tuple[str, str]:
    if isinstance(other, str):
        return mine[0], other
    end = "no further collective"
    for i in range(max(len(mine), len(other))):
        here, there = (lines[i] if i < len(lines) else end for lines in (mine, other))
        if here != there:
            return here, there
    raise AssertionError("called for programs that differ")


def exchanged(comm: Communicator, where: str, name: str, own: Any) -> list[Any]:
    """``own`` of every rank; all must make this call. Sleeps meanwhile: tracing takes ranks different times."""
    missing = f"the other ranks to call {name} too"
    remedy = "Look for a rank that calls something else, or has ended."
    notice = f"rank {comm.rank} of {comm.size} waits for {missing}. {remedy}"
    for waited in lifecycle.waits(comm.control.Ibarrier(), 0.01, _NOTICE_S, notice):
        if config.timeout is not None and waited > config.timeout:
            got = f"no sign of some for {waited:.0f} s"
            raise RuntimeError(message(where, missing, got, remedy, rank=comm.rank, size=comm.size))
    return comm.control.allgather(own)
