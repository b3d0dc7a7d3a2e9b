"""What a timeline of ``pycollective.trace`` says of each operation and size."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pycollective.bench.operations import OPERATIONS
from pycollective.report import reading

Event = Mapping[str, Any]

_IN_BENCH = {
    "allreduce": "psum",
    "allgather": "all_gather",
    "reduce_scatter": "psum_scatter",
    "alltoall": "all_to_all",
    "bcast": "broadcast",
    "ppermute": "ppermute",
}
FACTORS: dict[str, Callable[[int], float]] = {
    **{name: OPERATIONS[ours].factor for name, ours in _IN_BENCH.items()},
    "reduce": lambda _: 1.0,
    "sendrecv": lambda _: 1.0,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
}
"""Bus bandwidth over algorithm bandwidth, from the number of ranks, as nccl-tests has it (its PERFORMANCE.md)."""


class Rank(NamedTuple):
    """A rank of the job.

    Attributes:
        rank: its number.
        host: its host.
        traced_us: how long its trace lasted.
        in_calls_us: how much of that it spent in calls.
        waited_us: how much of that it waited for other ranks in collectives.
        waited_for_us: how long the other ranks together waited for it.
        dropped: the number of its calls that are not in the trace.
    """

    rank: int
    host: str
    traced_us: float
    in_calls_us: float
    waited_us: float
    waited_for_us: float
    dropped: int


@dataclass(frozen=True)
class Row:
    """The calls of one operation on arrays of one size.

    Attributes:
        op: the operation.
        nbytes: of the larger of operand and result.
        ranks: the number of ranks that make a call together.
        calls: how many calls; a collective counts once for each device of a rank, a message at each end.
        total_us: the time that a rank spent in them, the mean of the ranks that make them.
        median_us: the median time of a call.
        busbw: bus bandwidth in GB/s, from the median time after the last rank has come; None where there is none.
        share: of the traced time of all ranks.
        slowest: the rank that comes last on average; None if the ranks differ by less than their clocks may.
        last_in: in how many of the calls it came last.
        waited_us: how long another rank waited for it in all these calls, the mean of the other ranks.
    """

    op: str
    nbytes: int
    ranks: int
    calls: int
    total_us: float
    median_us: float
    busbw: float | None
    share: float
    slowest: int | None
    last_in: int
    waited_us: float

    @property
    def total_bytes(self) -> int:
        """The bytes of all calls."""
        return self.calls * self.nbytes


class Timeline(NamedTuple):
    """A trace: its ranks, and a row for each operation and size, those that took the longest first."""

    ranks: list[Rank]
    rows: list[Row]


def read(file: Path) -> dict[str, Any] | None:
    """The contents of a file of ``pycollective.trace``; None if it is none, or lacks what :func:`summary` needs."""
    found = reading.load(file)
    return found if reading.wrong_in(found, _FORM) is None else None


def _is_ours(value: Any) -> bool:
    return bool(value == "pycollective")


def _are_ranks(value: Any) -> bool:
    return bool(value) and reading.wrong_in(value, [_RANK]) is None


def _is_event(value: Any) -> bool:
    """Whether an event is that of a call, with what the summary needs, or one that the summary passes over."""
    if not isinstance(value, dict) or not isinstance(value.get("ph"), str):
        return False
    is_call = value["ph"] == "X" and value.get("cat") != "skew"
    return not is_call or reading.wrong_in(value, _CALL) is None


def _is_operation(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w. ]+", value, re.ASCII) is not None


_RANK = {
    "rank": reading.rank,
    "host": reading.text,
    "began_us": reading.microseconds,
    "ended_us": reading.microseconds,
    "clock_error_us": reading.microseconds,
    "dropped": reading.count,
}
_CALL = {
    "name": _is_operation,
    "cat": reading.text,
    "ts": reading.microseconds,
    "dur": reading.microseconds,
    "pid": reading.rank,
    "args": {
        "group": reading.text,
        "channel": reading.text,
        "seq": reading.count,
        "nbytes": reading.count,
        "waited_us": reading.microseconds,
        "waited_for_rank": reading.rank,
    },
}
_FORM = {"otherData": {"producer": _is_ours, "ranks": _are_ranks, "groups": reading.groups}, "traceEvents": [_is_event]}


def summary(trace: Mapping[str, Any]) -> Timeline:
    """Sums up the events of a trace."""
    other = trace["otherData"]
    sizes = {group: len(re.findall(r"\d+", found["ranks"])) for group, found in other["groups"].items()}
    calls = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] != "skew"]
    of_kind = defaultdict(list)
    for event in calls:
        size = 2 if event["cat"] == "message" else sizes.get(event["args"]["group"], len(other["ranks"]))
        of_kind[event["name"], event["args"]["nbytes"], size].append(event)
    ranks = [_rank(facts, calls) for facts in other["ranks"]]
    error_us = 2 * max(facts["clock_error_us"] for facts in other["ranks"])
    rows = [_row(*key, events, ranks, error_us) for key, events in of_kind.items()]
    return Timeline(ranks, sorted(rows, key=lambda row: -row.share))


def _rank(facts: Mapping[str, Any], calls: Sequence[Event]) -> Rank:
    rank = facts["rank"]
    own = [event for event in calls if event["pid"] == rank]
    waits = [event for event in calls if event["args"]["waited_for_rank"] == rank]
    return Rank(
        rank,
        facts["host"],
        facts["ended_us"] - facts["began_us"],
        sum(_by_rank(own, _duration).values()),
        sum(_by_rank(own, _wait).values()),
        sum(_by_rank(waits, _wait).values()),
        facts["dropped"],
    )


def _duration(event: Event) -> float:
    return float(event["dur"])


def _wait(event: Event) -> float:
    return float(event["args"]["waited_us"])


def _by_rank(events: Sequence[Event], length: Callable[[Event], float]) -> dict[int, float]:
    """How long each rank was in some of the events; the devices of a rank are there at the same time.

    Args:
        events: the events.
        length: the time of an event that counts, from its begin.
    """
    total: dict[int, float] = defaultdict(float)
    until: dict[int, float] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        rank, end = event["pid"], event["ts"] + length(event)
        before = until.get(rank, event["ts"])
        total[rank] += max(0.0, end - max(event["ts"], before))
        until[rank] = max(before, end)
    return total


def _row(op: str, nbytes: int, size: int, events: Sequence[Event], ranks: Sequence[Rank], error_us: float) -> Row:
    together: dict[Any, dict[int, Event]] = defaultdict(dict)
    for event in events:
        args = event["args"]
        is_alone = event["cat"] != "collective"
        together[
            args["group"], args["channel"], args["seq"], event["pid"] if is_alone else -1, is_alone and event["ts"]
        ][event["pid"]] = event
    late_us: dict[int, list[float]] = defaultdict(list)
    last: Counter[int] = Counter()
    for call in together.values():
        if len(call) > 1:
            came = {rank: event["ts"] for rank, event in call.items()}
            for rank, ts in came.items():
                late_us[rank].append(ts - min(came.values()))
            last[max(came, key=lambda rank: came[rank])] += 1
    mean_us = {rank: statistics.fmean(times) for rank, times in late_us.items()}
    slowest = max(mean_us, key=lambda rank: mean_us[rank], default=None)
    if slowest is not None and mean_us[slowest] <= error_us:
        slowest = None
    waits = [event for event in events if event["args"]["waited_for_rank"] == slowest]
    alone_us = statistics.median(event["dur"] - event["args"]["waited_us"] for event in events)
    in_calls_us = _by_rank(events, _duration)
    traced_us = sum(rank.traced_us for rank in ranks)
    has_busbw = op in FACTORS and nbytes > 0 and size > 1 and alone_us > 0
    return Row(
        op=op,
        nbytes=nbytes,
        ranks=size,
        calls=len(together),
        total_us=statistics.fmean(in_calls_us.values()),
        median_us=statistics.median(event["dur"] for event in events),
        busbw=nbytes / alone_us / 1000 * FACTORS[op](size) if has_busbw else None,
        share=sum(in_calls_us.values()) / traced_us if traced_us > 0 else 0.0,
        slowest=slowest,
        last_in=0 if slowest is None else last[slowest],
        waited_us=0.0 if slowest is None else sum(_by_rank(waits, _wait).values()) / max(1, size - 1),
    )
