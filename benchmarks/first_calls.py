"""Counts the messages and bytes of calls outside programs on simulated ranks: first calls, assert_equal_across, ...

    python -m benchmarks.first_calls 1024

It measures no time. Each line has two values of the ranks, the median and the largest, of the messages and bytes that
they send and of the bytes that they receive; and the longest chain of messages that follow each other. "Gathered" is
what each rank would receive if every rank gathered what every other one brings.
"""

from __future__ import annotations

import argparse
import functools
import pickle
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from pycollective.collectives import equality
from pycollective.named_axes import overlap
from pycollective.parallel.join import _Lengths
from pycollective.ranks import agreement
from pycollective.ranks.agreement import CollectiveLine, TraceReport
from pycollective.ranks.meeting import digest_of, first_of, meet_or_fail
from tests.unit.simulated_ranks import call_all, ranks_of

COLLECTIVES = 300
Call = tuple[Any, Callable[[], Any]]
"""What a rank brings, and the steps of its call."""


def program(last: str = "", first_origin: int = 1 << 60) -> list[CollectiveLine]:
    params = "axes=('data',), axis_index_groups=None; axis_size=8, tiled=False"
    lines = [CollectiveLine(f"psum(float32[768,{i}]; {params})", first_origin + i) for i in range(COLLECTIVES - 1)]
    return [*lines, CollectiveLine(last or f"psum(float32[768]; {params})", 1)]


def first_call(rank: Any, own: list[CollectiveLine] | str) -> Call:
    return own, functools.partial(agreement.compare, TraceReport(rank, "jit", "step", own))


def orders(rank: Any) -> Call:
    own = [(tuple(f"psum {i} float32[768,{i}]" for i in range(COLLECTIVES)), [[*range(COLLECTIVES)]])]
    return own, functools.partial(overlap.compare_orders, rank, own)


def equal_arrays(rank: Any) -> Call:
    own = equality._read_all(rank, {str(i): np.ones(8) for i in range(COLLECTIVES)})
    return ("a call of assert_equal_across", None, digest_of(own.entries), False), functools.partial(
        equality._compare, rank, own
    )


def lengths(rank: Any) -> Call:
    own = _Lengths.of(rank.rank, 100)
    return 100, functools.partial(meet_or_fail, rank, "parallel.join", own, _Lengths.followed_by)


def trace(rank: Any) -> Call:
    return None, functools.partial(meet_or_fail, rank, "trace", None, first_of)


def calls(size: int) -> dict[str, Callable[[Any], Call]]:
    middle = size // 2 + 1
    other = program("pmax")
    return {
        f"first call, {COLLECTIVES} equal collectives": lambda rank: first_call(rank, program()),
        "the same, one text differs on one rank": lambda rank: first_call(
            rank, other if rank.rank == middle else program()
        ),
        "the same, an error on one rank": lambda rank: first_call(
            rank, "ValueError: odd" if rank.rank == middle else program()
        ),
        "the same, operands of rank 0 of its own": lambda rank: first_call(
            rank, program(first_origin=1 << (61 if rank.rank == 0 else 60))
        ),
        "the same, operands of each rank of its own": lambda rank: first_call(
            rank, program(first_origin=(1 << 61) + (rank.rank << 32))
        ),
        "orders of sums": orders,
        f"assert_equal_across, {COLLECTIVES} equal arrays": equal_arrays,
        "parallel.join": lengths,
        "begin of a trace": trace,
    }


def show(name: str, values: list[int]) -> str:
    return f"{name} {statistics.median(values):,.0f} / {max(values):,}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts messages and bytes of calls outside programs.")
    parser.add_argument("sizes", type=int, nargs="+", help="numbers of ranks")
    for size in parser.parse_args().sizes:
        print(f"{size} ranks")
        for name, call in calls(size).items():
            ranks = ranks_of(size, delay=0.0)
            network = ranks[0].mpi.network
            brought = {rank.rank: call(rank) for rank in ranks}
            gathered = sum(len(pickle.dumps(brought[rank][0], protocol=pickle.HIGHEST_PROTOCOL)) for rank in brought)
            results = call_all(ranks, lambda rank, brought=brought: (None, brought[rank.rank][1]))
            errors = sum(isinstance(result, Exception) for result in results)
            of_ranks = [
                show(word, [counter[rank] for rank in range(size)])
                for word, counter in (
                    ("messages", network.messages),
                    ("sent", network.sent),
                    ("received", network.received),
                )
            ]
            chain = max(rank.mpi.depth for rank in ranks)
            print(f"  {name}: {', '.join(of_ranks)} B, chain {chain}, errors {errors}; gathered {gathered:,} B")


if __name__ == "__main__":
    main()
