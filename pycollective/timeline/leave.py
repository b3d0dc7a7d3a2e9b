"""The messages by which ranks leave a trace, over the binomial tree of :mod:`pycollective.ranks.out_of_band`.

Each rank first hears whether all ranks of its subtree have left the block without an error, and tells its parent. Rank
0's answer comes down. Then the parts of the ranks go up, and rank 0's result comes down. So a rank has messages with at
most ceil(log2(ranks)) + 1 others.

A rank that has raised waits for nobody: it tells its parent and its children at once, and receives nothing. So a
message may stay unreceived, and a rank that hears of an error does not wait until its own messages have been received.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycollective.ranks.out_of_band import children_of, parent_of
from pycollective.timeline.calls import Part
from pycollective.transport.mpi import MPI

_LEFT, _NEXT, _PARTS, _DONE = range(4)  # tags; timeline/clocks.py has those behind

_MOST_TOLD = 8
"""How many errors travel to rank 0, which warns of them."""

BATCH_BYTES = 1 << 24
"""A rank hands parts of other ranks on when it has so many bytes of calls, so it keeps few of them in its memory."""

Wait = Callable[[Callable[[], bool]], None]

_unreceived: list[MPI.Request] = []
"""Messages that no rank may have received: MPI may still read their memory."""


def tell_error(mpi: MPI.Intracomm, why: str) -> None:
    """Tells the ranks that would wait for this rank that it has raised. The communicator is then never freed."""
    _unreceived.extend(mpi.isend([why], child, _NEXT) for child in children_of(mpi.rank, mpi.size))
    if mpi.rank != 0:
        _unreceived.append(mpi.isend([why], parent_of(mpi.rank), _LEFT))


def errors(mpi: MPI.Intracomm, wait: Wait) -> list[str]:
    """Waits until all ranks have left the block. All ranks that have not raised must make this call.

    Returns:
        The errors of ranks: on rank 0 some of all, on other ranks one at least if there is any.
    """
    children = [*children_of(mpi.rank, mpi.size)]
    told: list[str] = []
    for child in children:
        told += _receive(mpi, child, _LEFT, wait)
    told = told[:_MOST_TOLD]
    sent = []
    if mpi.rank != 0:
        sent.append(mpi.isend(told, parent_of(mpi.rank), _LEFT))
        told = _receive(mpi, parent_of(mpi.rank), _NEXT, wait)
    sent += [mpi.isend(told[:1], child, _NEXT) for child in reversed(children)]
    if told:
        _unreceived.extend(sent)
    else:
        _wait_for(sent, wait)
    return told


def gather(mpi: MPI.Intracomm, own: Part, wait: Wait) -> list[Part]:
    """Returns the parts of all ranks on rank 0, in the order of the ranks; on other ranks nothing."""
    parts = [own]
    for child in children_of(mpi.rank, mpi.size):
        has_more = True
        while has_more:
            more, has_more = _receive(mpi, child, _PARTS, wait)
            parts += more
            if mpi.rank != 0 and sum(part.times.nbytes for part in parts) >= BATCH_BYTES:
                _wait_for([mpi.isend((parts, True), parent_of(mpi.rank), _PARTS)], wait)
                parts = []
    if mpi.rank == 0:
        return parts
    _wait_for([mpi.isend((parts, False), parent_of(mpi.rank), _PARTS)], wait)
    return []


def result(mpi: MPI.Intracomm, value: str | None, wait: Wait) -> str | None:
    """Returns rank 0's ``value`` on all ranks."""
    if mpi.rank != 0:
        value = _receive(mpi, parent_of(mpi.rank), _DONE, wait)
    _wait_for([mpi.isend(value, child, _DONE) for child in reversed([*children_of(mpi.rank, mpi.size)])], wait)
    return value


def _wait_for(sent: list[MPI.Request], wait: Wait) -> None:
    for request in sent:
        wait(request.Test)


def _receive(mpi: MPI.Intracomm, source: int, tag: int, wait: Wait) -> Any:
    """Receives an object."""
    found: list[MPI.Message] = []

    def has_come() -> bool:
        if not found and (come := mpi.improbe(source, tag)) is not None:
            found.append(come)
        return bool(found)

    wait(has_come)
    return found[0].recv()
