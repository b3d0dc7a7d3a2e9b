"""Messages between ranks that are not part of programs (``ranks.out_of_band``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import pycollective as pc
from pycollective.ranks.out_of_band import Steps


def poll(has_come: Callable[[], bool]) -> None:
    while not has_come():
        time.sleep(0.001)


def give_up(has_come: Callable[[], bool]) -> None:
    raise TimeoutError


def all_values(part: pc.Communicator, own: Any) -> Steps[list[Any]]:
    out = part._out_of_band
    found: list[Any] = yield from out.tell((yield from out.reduce([own], lambda lower, higher: lower + higher)))
    return found


def gather(part: pc.Communicator, own: Any, wait: Callable[[Callable[[], bool]], None] = poll) -> list[Any]:
    return part._out_of_band.complete(str(own), lambda: all_values(part, own), wait)


def test_all_ranks_in_their_order(world: pc.Communicator) -> None:
    for part in (world.split(color=0, key=-world.rank), world.split(color=world.rank // 3)):
        assert part is not None
        for size in (1, 100_000):  # the larger one is sent only when the other rank receives
            assert gather(part, [part.rank] * size) == [[rank] * size for rank in range(part.size)]
        part.free()


def test_a_value_of_one_rank(world: pc.Communicator) -> None:
    part = world.split(color=0)
    assert part is not None

    def steps(source: int) -> Steps[Any]:
        out = part._out_of_band
        handed = yield from out.hand([part.rank] * 100_000, source)
        return (yield from out.tell(handed))

    for source in range(part.size):
        told = part._out_of_band.complete(source, lambda source=source: steps(source), poll)
        assert told == [source] * 100_000
    part.free()


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_call_that_is_made_again(size: int, world: pc.Communicator) -> None:
    part = world.split(color=0)
    assert part is not None
    if world.size > 1 and world.rank % 2:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                gather(part, ("first", [part.rank] * size), give_up)
    for word in ("first", "second", "third"):
        assert gather(part, (word, [part.rank] * size)) == [(word, [rank] * size) for rank in range(part.size)]
    part.free()


def test_a_call_that_another_call_follows(world: pc.Communicator) -> None:
    """The rank that has left the first call ends it before it makes the second."""
    part = world.split(color=0)
    assert part is not None
    left = part.size > 1 and part.rank == part.size - 1
    if left:
        with pytest.raises(TimeoutError):
            gather(part, ("first", part.rank), give_up)
    for word in ("second",) if left else ("first", "second"):
        assert gather(part, (word, part.rank)) == [(word, rank) for rank in range(part.size)]
    part.free()


def test_a_call_that_others_never_make(world: pc.Communicator) -> None:
    # Messages that nobody receives keep no rank waiting, and do not reach later calls of programs.
    part = world.split(color=0)
    assert part is not None
    if world.size > 1 and world.rank % 2:
        with pytest.raises(TimeoutError):
            gather(part, part.rank, give_up)
    perm = [(rank, (rank + 1) % part.size) for rank in range(part.size)]
    assert pc.ppermute(part.rank, part, perm) == (part.rank - 1) % part.size
    assert part.mpi.allreduce(1) == part.size
    part.free()
    # MPI gives the next communicator the context of the one that was freed, with the messages that are left in it.
    later = world.split(color=0)
    assert later is not None
    assert gather(later, "later") == ["later"] * later.size
    later.free()
