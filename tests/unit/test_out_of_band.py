"""Values that go up and down the tree of ranks: each order of events, calls that are left, and calls that differ."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import pytest

from pycollective.ranks.meeting import OtherCall, Sameness, digest_of, meet
from pycollective.ranks.out_of_band import Steps
from tests.unit.simulated_ranks import MustWait, call_all, ranks_of

SIZES = [*range(1, 34), 64, 128]


def log2(size: int) -> int:
    return math.ceil(math.log2(size))


def all_ranks(rank: Any) -> Steps[list[int]]:
    """The numbers of all ranks, in the order in which the tree combines them."""
    out = rank._out_of_band
    found: list[int] = yield from out.tell((yield from out.reduce([rank.rank], lambda lower, higher: lower + higher)))
    return found


@pytest.mark.parametrize("size", SIZES)
def test_values_are_combined_in_the_order_of_the_ranks(size: int) -> None:
    for seed in range(3):
        ranks = ranks_of(size, seed=seed)
        assert call_all(ranks, lambda rank: ("all", lambda: all_ranks(rank))) == [list(range(size))] * size


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_a_value_of_one_rank(size: int) -> None:
    def steps(rank: Any, source: int) -> Steps[Any]:
        out = rank._out_of_band
        handed = yield from out.hand(f"of {rank.rank}", source)
        assert (handed is None) == (rank.rank != 0)
        told = yield from out.tell(handed)
        return told

    for source in range(size):
        ranks = ranks_of(size, seed=source)
        results = call_all(ranks, lambda rank, source=source: ("hand", lambda: steps(rank, source)))
        assert results == [f"of {source}"] * size


@pytest.mark.parametrize("size", SIZES)
def test_messages_and_bytes_of_a_meeting(size: int) -> None:
    """The longest chain of messages and the messages of a rank grow as the logarithm, those of all ranks as n."""
    ranks = ranks_of(size)
    network = ranks[0].mpi.network

    def steps(rank: Any) -> Steps[Any]:
        return meet(rank, "a call", Sameness.of(rank, "the same"), Sameness.followed_by)

    results = call_all(ranks, lambda rank: ("same", lambda: steps(rank)))
    assert [(found.digest, found.other) for found in results] == [(digest_of("the same"), None)] * size
    assert network.messages.total() == 2 * (size - 1)
    assert max(rank.mpi.depth for rank in ranks) <= 2 * log2(size)
    for rank in range(size):
        assert network.messages[rank] <= 1 + log2(size)
        assert network.sent[rank] <= MESSAGE_BYTES * network.messages[rank]
    assert network.received.total() <= 2 * (size - 1) * MESSAGE_BYTES
    assert not any(network.queues.values())


MESSAGE_BYTES = 250
"""An upper limit of a message of a meeting about a digest: it depends neither on the ranks nor on the program."""


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_ranks_in_different_calls(size: int) -> None:
    """All learn of it: those that call as rank 0 does see the lowest other rank, and the others see rank 0."""
    for other in range(1, size):
        for second in range(size):
            whats = ["plan"] * size
            whats[second] = "trace"
            whats[other] = "join"

            def steps(rank: Any, whats: list[str] = whats) -> Steps[Any]:
                what = whats[rank.rank]  # values of two calls can't be combined
                return meet(rank, what, {"plan": 1, "trace": "text", "join": None}[what], operator.add)

            ranks = ranks_of(size, seed=10 * other + second)
            results = call_all(ranks, lambda rank, steps=steps: (whats[rank.rank], lambda: steps(rank)))
            lowest = next(rank for rank in range(size) if whats[rank] != whats[0])
            for rank, found in enumerate(results):
                seen = lowest if whats[rank] == whats[0] else 0
                assert found == OtherCall(whats[seen], seen)
            assert call_all(ranks, lambda rank: ("all", lambda: all_ranks(rank))) == [list(range(size))] * size


def leave(rank: Any, key: str, steps: Steps[Any]) -> None:
    with pytest.raises(MustWait):
        rank.turn(key, lambda: steps)


@pytest.mark.parametrize("left_by", [0, 1, 2, 3])
def test_a_rank_that_makes_another_call_after_one_that_it_has_left(left_by: int) -> None:
    """The call that it has left comes first, on all ranks. So the ranks agree on each call, and on which one it is."""
    ranks = ranks_of(4, delay=0.0)

    def call(rank: Any, what: str) -> Steps[Any]:
        return meet(rank, what, [rank.rank], lambda lower, higher: lower + higher)

    leave(ranks[left_by], "first", call(ranks[left_by], "first"))
    # The others make that call later, and this rank makes the next one already.
    both: list[list[Any]] = [[] for _ in ranks]

    def two_calls(rank: Any) -> Iterator[None]:
        for what in ["second"] if rank.rank == left_by else ["first", "second"]:
            while True:
                try:
                    both[rank.rank].append(rank.turn(what, lambda what=what: call(rank, what)))
                    break
                except MustWait:
                    yield

    under_way = [two_calls(rank) for rank in ranks]
    for _ in range(200):
        for steps in under_way:
            next(steps, None)
    everybody = [0, 1, 2, 3]
    assert both == [[everybody] if rank == left_by else [everybody, everybody] for rank in range(4)]
    # The others never make it: then all ranks get an error, and go on together.
    leave(ranks[left_by], "third", call(ranks[left_by], "third"))

    def refusing(rank: Any, what: str) -> Steps[Any]:
        met = yield from call(rank, what)
        if isinstance(met, OtherCall):
            raise RuntimeError(f"{met.what} on rank {met.rank}")
        return met

    ranks = ranks_of(4, delay=0.0)
    leave(ranks[left_by], "third", refusing(ranks[left_by], "third"))
    results = call_all(ranks, lambda rank: ("fourth", lambda: refusing(rank, "fourth")))
    for rank, error in enumerate(results):
        assert isinstance(error, RuntimeError)
        if left_by == 0:
            assert str(error) == ("fourth on rank 1" if rank == 0 else "third on rank 0")
        else:
            assert str(error) == ("fourth on rank 0" if rank == left_by else f"third on rank {left_by}")
    results = call_all(ranks, lambda rank: ("fifth", lambda: refusing(rank, "fifth")))
    assert results == [everybody] * 4


@pytest.mark.parametrize("step", ["reduce", "tell", "hand"])
def test_messages_that_another_rank_takes_late(step: str) -> None:
    """A rank leaves a step when its messages have left: MPI may need it until then, and they need their memory."""
    ranks = ranks_of(2, delay=0.0)
    sender, other = ranks if step == "tell" else reversed(ranks)
    arguments = {"reduce": (1, operator.add), "tell": ("text",), "hand": ("text", 1)}[step]

    def steps(rank: Any) -> Steps[Any]:
        result = yield from getattr(rank._out_of_band, step)(*arguments)
        return result

    for _ in range(2):
        leave(sender, step, steps(sender))
        assert len(sender._out_of_band._sent) == 1
    expected = 2 if step == "reduce" else "text"
    assert other.turn(step, lambda: steps(other)) == expected
    sender.turn(step, lambda: steps(sender))
    assert sender._out_of_band._sent == []


def test_messages_of_a_call_that_has_ended_by_an_error_on_both_sides() -> None:
    """They keep their memory until the other rank has taken them, and it does not mistake them for later ones."""
    ranks = ranks_of(2, delay=0.0)

    def failing(rank: Any) -> Steps[Any]:
        out = rank._out_of_band
        if rank.rank == 1:
            out._step += 1
            out._send(["old"], 0)
        raise MemoryError(f"on rank {rank.rank}")
        yield

    for rank in ranks:
        with pytest.raises(MemoryError, match=f"on rank {rank.rank}"):
            rank.turn("failing", lambda rank=rank: failing(rank))
    assert len(ranks[1]._out_of_band._left) == 1
    assert call_all(ranks, lambda rank: ("all", lambda: all_ranks(rank))) == [[0, 1]] * 2
    assert ranks[1]._out_of_band._left == []


def test_a_rank_whose_call_has_ended_by_an_error_of_its_own() -> None:
    """Its next call is not taken for a step of the call that the others are in, and its old messages are not theirs."""
    ranks = ranks_of(3, delay=0.0)

    def failing(rank: Any) -> Steps[Any]:
        found = yield from all_ranks(rank)
        if rank.rank == 1:
            raise MemoryError("only here")
        return found + (yield from all_ranks(rank))

    results: dict[int, BaseException | list[int]] = {}
    for _ in range(20):
        for rank in ranks:
            if rank.rank in results:
                continue
            try:
                results[rank.rank] = rank.turn("failing", lambda rank=rank: failing(rank))
            except MustWait:
                pass
            except MemoryError as error:
                results[rank.rank] = error
    assert set(results) == {1}
    leave(ranks[1], "next", all_ranks(ranks[1]))
    text = (
        r"expected rank 1 in step 3 of call 0 outside programs, got a message of step 1 of its call 1 \(rank 0 of 3\)"
    )
    with pytest.raises(RuntimeError, match=text):
        ranks[0].turn("failing", lambda: failing(ranks[0]))
