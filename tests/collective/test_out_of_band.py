"""Messages between ranks that are not part of programs (``ranks.out_of_band``)."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import pycollective as pc


def poll(has_come: Callable[[], bool]) -> None:
    while not has_come():
        time.sleep(0.001)


def give_up(has_come: Callable[[], bool]) -> None:
    raise TimeoutError


def test_all_ranks_in_their_order(world: pc.Communicator) -> None:
    for part in (world.split(color=0, key=-world.rank), world.split(color=world.rank // 3)):
        assert part is not None
        for size in (1, 100_000):  # the larger one is sent only when the other rank receives
            assert part._out_of_band.allgather([part.rank] * size, poll) == [[rank] * size for rank in range(part.size)]
        part.free()


def test_a_call_that_is_made_again(world: pc.Communicator) -> None:
    part = world.split(color=0)
    assert part is not None
    if world.size > 1 and world.rank % 2:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                part._out_of_band.allgather(("first", part.rank), give_up)
    for word in ("first", "second", "third"):
        assert part._out_of_band.allgather((word, part.rank), poll) == [(word, rank) for rank in range(part.size)]
    part.free()


def test_a_call_that_others_never_make(world: pc.Communicator) -> None:
    # Messages that nobody receives keep no rank waiting, and do not reach later calls of programs.
    part = world.split(color=0)
    assert part is not None
    if world.size > 1 and world.rank % 2:
        with pytest.raises(TimeoutError):
            part._out_of_band.allgather(part.rank, give_up)
    perm = [(rank, (rank + 1) % part.size) for rank in range(part.size)]
    assert pc.ppermute(part.rank, part, perm) == (part.rank - 1) % part.size
    assert part.mpi.allreduce(1) == part.size
    part.free()
    # MPI gives the next communicator the context of the one that was freed, with the messages that are left in it.
    later = world.split(color=0)
    assert later is not None
    assert later._out_of_band.allgather("later", poll) == ["later"] * later.size
    later.free()
