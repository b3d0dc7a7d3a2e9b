"""Before ranks run one program they compare what they traced: a difference is an error on all of them, not a hang."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pycollective.communicator import Communicator
from pycollective.config import config
from pycollective.errors import message

T = TypeVar("T")

_NOTICE_S = 30.0
"""How long a rank waits for the others' traces before it says so."""


def agreed(comm: Communicator, where: str, name: str, trace: Callable[[], tuple[T, Sequence[str]]]) -> T:
    """``trace()[0]``, if it succeeds on all ranks and its second part is the same there. All must make this call.

    Args:
        comm: the ranks.
        where: for messages.
        name: of the program, for messages.
        trace: returns the program, and what the ranks must have in common, a line for each step of it.

    Raises:
        ValueError: ``comm`` was freed.
        RuntimeError: another rank's trace failed, differs, or does not come within ``PYCOLLECTIVE_TIMEOUT``.
    """
    comm.check_live(where)
    failure: Exception | None = None
    program, lines = None, None
    try:
        program, lines = trace()
    except Exception as error:  # raised below, when the others know
        failure = error
    if comm.size == 1 or config.check == 0:
        others: list[Any] = []
    else:
        own = f"{type(failure).__name__}: {failure}" if failure else [f"program {name}", *(lines or ())]
        others = _exchanged(comm, where, name, own)
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
    return program  # type: ignore[return-value]


def _difference(mine: list[str], other: list[str] | str) -> tuple[str, str]:
    if isinstance(other, str):
        return mine[0], other
    end = "no further collective"
    for i in range(max(len(mine), len(other))):
        here, there = (lines[i] if i < len(lines) else end for lines in (mine, other))
        if here != there:
            return here, there
    raise AssertionError("called for programs that differ")


def _exchanged(comm: Communicator, where: str, name: str, own: Any) -> list[Any]:
    """``own`` of every rank. Sleeps meanwhile: tracing takes ranks different times."""
    request = comm.control.Ibarrier()
    started = time.monotonic()
    told = False
    while not request.Test():
        waited = time.monotonic() - started
        text = f"the other ranks to call {name} too, got no sign of some for {waited:.0f} s"
        remedy = "Look for a rank that calls something else, or has ended."
        if config.timeout is not None and waited > config.timeout:
            raise RuntimeError(message(where, text[4:], "silence", remedy, rank=comm.rank, size=comm.size))
        if waited > _NOTICE_S and not told:
            told = True
            sys.stderr.write(f"pycollective: rank {comm.rank} of {comm.size} waits for {text}. {remedy}\n")
            sys.stderr.flush()
        time.sleep(min(0.01, waited / 10))
    return comm.control.allgather(own)
