"""The comparison of programs at a function's first call, on simulated ranks. The oracle compares each two of them."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from pycollective.errors import CollectiveMismatch
from pycollective.named_axes import overlap
from pycollective.ranks import agreement
from pycollective.ranks.agreement import CollectiveLine, TraceReport
from pycollective.ranks.meeting import FIRST_CALL, digest_of, first_of, meet_or_fail
from tests.unit.simulated_ranks import call_all, ranks_of
from tests.unit.test_out_of_band import MESSAGE_BYTES, SIZES, log2

Outcome = list[CollectiveLine] | str


def compared(outcomes: Sequence[Outcome], *, seed: int = 0, delay: float = 0.3) -> tuple[list[Any], Any]:
    """What each rank gets: None or its error. And the network."""
    ranks = ranks_of(len(outcomes), seed=seed, delay=delay)

    def call(rank: Any) -> Any:
        report = TraceReport(rank, "jit", "step", outcomes[rank.rank])
        key = FIRST_CALL, digest_of(report.outcome)
        return key, functools.partial(agreement.compare, report)

    results = call_all(ranks, call)
    assert not any(ranks[0].mpi.network.queues.values())
    return results, ranks[0].mpi.network


def lines(*numbers: int, text: str = "psum(float32[3])") -> list[CollectiveLine]:
    return [CollectiveLine(text, number) for number in numbers]


def reordered(own: Outcome, other: Outcome) -> bool:
    """Whether two ranks reduce the same operands in another order, by the words of docs/design.md."""
    assert isinstance(own, list)
    assert isinstance(other, list)
    differ = [i for i in range(len(own)) if own[i] != other[i]]
    moved = [i for i in differ if any(other[j] == own[i] for j in differ)]
    return any(own[j] == other[i] for i in moved for j in differ)


# Programs that are equal ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_equal_programs_cost_a_digest(size: int) -> None:
    """The bytes of a rank grow neither with the program nor with the ranks, but for one message to each child."""
    for count in (0, 3, 300):
        program = [CollectiveLine(f"psum(float32[{i}])", i) for i in range(count)]
        results, network = compared([program] * size)
        assert results == [None] * size
        assert network.messages.total() == 2 * (size - 1)
        for rank in range(size):
            assert network.messages[rank] <= 1 + log2(size)
            assert network.sent[rank] <= 2 * MESSAGE_BYTES * network.messages[rank]


# Programs that differ -------------------------------------------------------------------------------------


def expected_text(rank: int, outcomes: Sequence[Outcome]) -> str | None:
    """The error of a rank that compares its text with that of each other rank, from the lowest on."""
    own = outcomes[rank]
    if isinstance(own, str):
        return None
    mine = [line.text for line in own]
    for other, outcome in enumerate(outcomes):
        if isinstance(outcome, str):
            return f"here with no error, got {outcome} on rank {other}"
        theirs = [line.text for line in outcome]
        for here, there in itertools.zip_longest(mine, theirs, fillvalue="no further collective"):
            if here != there:
                return f"here with {here}, got {there} on rank {other}"
    return None


def check_texts(outcomes: Sequence[Outcome], seed: int) -> None:
    results, _ = compared(outcomes, seed=seed)
    for rank, (error, own) in enumerate(zip(results, outcomes, strict=True)):
        want = expected_text(rank, outcomes)
        if isinstance(own, str):
            assert error is None  # its own error is raised already
        elif want is not None:
            assert f"pycollective.jit: expected the same program on every rank, {want} (rank {rank} of " in str(error)
            assert isinstance(error, CollectiveMismatch) != ("no error" in want)
        else:
            assert error is None


@pytest.mark.parametrize("seed", range(150))
def test_each_rank_names_the_lowest_rank_whose_text_differs_from_its_own(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([2, 3, 4, 5, 7, 8, 11])
    kinds: list[Outcome] = [
        [CollectiveLine(f"psum(float32[{rng.randrange(2)}])", 1) for _ in range(rng.randrange(4))]
        for _ in range(rng.choice([1, 2, 3]))
    ]
    if rng.random() < 0.4:
        kinds.append(f"ValueError: {seed}")
    check_texts([rng.choice(kinds) for _ in range(size)], seed)


@pytest.mark.parametrize("size", [2, 3, 9])
def test_an_error_of_one_rank_reaches_all(size: int) -> None:
    for odd in range(size):
        results, _ = compared(["TypeError: only here" if rank == odd else lines(1, 2) for rank in range(size)])
        for rank, error in enumerate(results):
            if rank != odd:
                assert not isinstance(error, CollectiveMismatch)
                assert re.search(rf"here with no error, got TypeError: only here on rank {odd} \(rank", str(error))
        assert results[odd] is None


def test_a_rank_in_another_call() -> None:
    """A rank whose trace has failed raises that error, and no other one."""
    ranks = ranks_of(3)
    outcomes: list[Outcome] = [lines(1, text="psum"), "ValueError: own"]

    def call(rank: Any) -> Any:
        if rank.rank == 2:
            return "trace", functools.partial(meet_or_fail, rank, "trace", None, first_of)
        return "first", functools.partial(agreement.compare, TraceReport(rank, "jit", "step", outcomes[rank.rank]))

    first, failed, other = call_all(ranks, call)
    assert isinstance(first, CollectiveMismatch)
    assert "expected the same program on every rank, here with psum, got a call of trace on rank 2 (rank 0" in str(
        first
    )
    assert failed is None
    assert "expected the other ranks to call trace too, got the first call of a function on rank 0 (rank 2" in str(
        other
    )


def test_texts_travel_where_they_are_needed() -> None:
    """Rank 0's lines go to all ranks, and those of the lowest rank that differs to rank 0. All others stay."""
    size, program = 64, [CollectiveLine(f"psum(float32[{i}])" + "x" * 100, i) for i in range(100)]
    whole = sum(len(line.text) for line in program)
    for odd in (1, 37, 63):
        other = [*program[:-1], CollectiveLine("pmax", 99)]
        results, network = compared([other if rank == odd else program for rank in range(size)])
        assert all(isinstance(error, CollectiveMismatch) for error in results)
        for rank in range(size):
            assert network.received[rank] < 1.5 * whole + 20 * MESSAGE_BYTES
            assert network.sent[rank] < (log2(size) + 1) * 1.5 * whole
            assert network.messages[rank] <= 2 * (1 + log2(size)) + 1


# Origins --------------------------------------------------------------------------------------------------


def check_origins(outcomes: Sequence[Outcome], seed: int) -> None:
    """All ranks get an error if two ranks reduce in another order, and none else. Each error is true."""
    pairs = {
        (one, other)
        for one, other in itertools.permutations(range(len(outcomes)), 2)
        if reordered(outcomes[one], outcomes[other])
    }
    results, _ = compared(outcomes, seed=seed)
    if not pairs:
        assert results == [None] * len(outcomes)
        return
    for rank, error in enumerate(results):
        assert isinstance(error, CollectiveMismatch)
        found = re.search(r", here with psum\S+ as collective \d, got its operands .* on rank (\d+) \(rank", str(error))
        if found is not None:
            assert (rank, int(found[1])) in pairs
        else:
            of_others = re.search(r", on rank (\d+) with psum\S+ as collective \d, .* on rank (\d+) \(rank", str(error))
            assert of_others is not None, error
            assert (int(of_others[1]), int(of_others[2])) in pairs
    # Where rank 0 is one of two, each rank that differs from it in this way names it, and rank 0 names the lowest.
    of_first = sorted(other for one, other in pairs if one == 0)
    if of_first:
        assert f"on rank {of_first[0]} (rank 0 of" in str(results[0])
        for rank in of_first:
            assert f"on rank 0 (rank {rank} of" in str(results[rank])


@pytest.mark.parametrize("seed", range(300))
def test_two_ranks_that_reduce_in_another_order(seed: int) -> None:
    rng = random.Random(seed)
    size, count = rng.choice([2, 3, 4, 5, 8, 13]), rng.choice([2, 3, 4])
    kinds: list[Outcome] = [
        lines(*(rng.randrange(rng.choice([3, 8, 50])) for _ in range(count))) for _ in range(rng.choice([2, 3, 6]))
    ]
    check_origins([rng.choice(kinds) for _ in range(size)], seed)


def test_two_ranks_that_differ_from_each_other_and_not_from_rank_0() -> None:
    """The relation is not transitive: a comparison with rank 0 alone would not find them."""
    check_origins([lines(7, 8), lines(1, 2), lines(2, 1), lines(7, 8)], 0)
    check_origins([lines(7, 8), lines(1, 9), lines(1, 2), lines(1, 9), lines(2, 1)], 0)


def test_ranks_may_reduce_other_operands() -> None:
    check_origins([lines(1, 2, 3), lines(1, 4, 3), lines(0, 2, 3), lines(5, 6, 7)], 0)
    check_origins([lines(1, 2), lines(3, 1), lines(4, 3)], 0)  # an operand at another place, and no exchange


def test_equal_origins_of_other_texts_are_no_order() -> None:
    one, other = (
        [CollectiveLine("psum(a)", first), CollectiveLine("psum(b)", second)] for first, second in ((1, 2), (2, 1))
    )
    assert compared([one, other])[0] == [None, None]


def test_lists_of_origins_travel_once_for_each_kind() -> None:
    """They go up the tree, each list once; only two come down, and only if they differ in an order."""
    size, count = 64, 300
    one, other = range(1 << 60, (1 << 60) + count), range(5, 5 + count)
    results, network = compared([lines(*(other if rank % 2 else one)) for rank in range(size)])
    assert results == [None] * size
    of_two_lists = 2 * 11 * count
    for rank in range(size):
        assert network.sent[rank] < of_two_lists + 20 * MESSAGE_BYTES
        assert network.received[rank] < log2(size) * of_two_lists + 20 * MESSAGE_BYTES


def test_many_ranks_with_operands_of_their_own() -> None:
    """Each list travels up the tree, to rank 0 alone."""
    size, count = 128, 50
    results, network = compared([lines(*range(1000 * rank, 1000 * rank + count)) for rank in range(size)])
    assert results == [None] * size
    sent = sorted(network.sent[rank] for rank in range(size))
    assert sent[size // 2] < 11 * count + 10 * MESSAGE_BYTES
    assert network.received[0] < 11 * count * size + 20 * MESSAGE_BYTES


# Orders of sums -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 8])
def test_orders_of_sums_are_equal_on_all_ranks_or_on_none(size: int) -> None:
    orders = [((("psum",), [[0, 1]]),), ((("psum",), [[1, 0]]),), None]
    for odd in range(size):
        for first, other in itertools.product(orders, repeat=2):
            ranks = ranks_of(size, seed=odd)

            def call(rank: Any, odd: int = odd, first: Any = first, other: Any = other) -> Any:
                own = other if rank.rank == odd else first
                return digest_of(own), functools.partial(overlap.compare_orders, rank, own)

            assert call_all(ranks, call) == [first == other] * size
