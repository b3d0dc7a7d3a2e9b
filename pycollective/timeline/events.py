"""The timeline in the trace-event format, which Perfetto and chrome://tracing open.

A rank is a process of the timeline, and a channel of a communicator is a thread. A call is a complete event. If the
rank waited for other ranks, an event inside the call shows this wait.

Source: "Trace Event Format", the document of the Chromium project.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pycollective.timeline.calls import Part
from pycollective.timeline.clocks import aligned
from pycollective.timeline.waits import wait_of

Event = dict[str, Any]

_Call = tuple[str, str, int]
"""A group, a channel and a number, which identify one collective on all ranks."""

_OUTSIDE = "outside programs"
"""The name of the thread of waits outside programs: split, the first call of a function, ..."""

_NS_PER_US = 1000


def other_data(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns the file's data beside the events: the ranks, their clocks, the groups; times in microseconds."""
    start = _start(parts)
    ranks = []
    for part in parts:
        began, ended = aligned(np.array(part.span), part.begin, part.end) - start
        ranks.append(
            {
                "rank": part.rank,
                "host": part.host,
                "calls": len(part.kind),
                "dropped": part.dropped,
                "began_us": float(began) / _NS_PER_US,
                "ended_us": float(ended) / _NS_PER_US,
                "clock_offset_us": part.end.offset / _NS_PER_US,
                "clock_error_us": _error(part) / _NS_PER_US,
            }
        )
    groups: dict[str, Any] = {}
    for part in parts:
        groups |= part.groups
    return {"producer": "pycollective", "format": 1, "ranks": ranks, "groups": groups}


def events(parts: Sequence[Part]) -> Iterator[Event]:
    """Yields the events of all ranks.

    Args:
        parts: the parts of all ranks.
    """
    start = _start(parts)
    times = [aligned(part.times, part.begin, part.end) - start for part in parts]
    spans = _spans(parts, times)
    groups: dict[str, Any] = other_data(parts)["groups"]
    members = {name: [int(rank) for rank in re.findall(r"\d+", group["ranks"])] for name, group in groups.items()}
    error = max(map(_error, parts)) * 2
    for part, own in zip(parts, times, strict=True):
        threads: dict[tuple[str, str], int] = {}
        labels: dict[int, str] = {}
        for kind, seq, (created, started, completed) in zip(
            part.kind.tolist(), part.seq.tolist(), own.tolist(), strict=True
        ):
            entry = part.kinds[kind]
            lane = _lane(entry)
            thread = threads.setdefault(lane, len(threads))
            labels[thread] = _label(entry)
            place = {"pid": part.rank, "tid": thread}
            ranks = members.get(entry["pg_id"], [])
            waited, last = 0, part.rank
            if _is_collective(entry) and part.rank in ranks:
                root = _root(entry["description"])
                call = (entry["pg_id"], lane[1], seq)
                waited, last = wait_of(_name(entry), part.rank, root, ranks, spans[call])
            came = started or created
            yield {
                "name": _name(entry),
                "cat": "message" if entry["is_p2p"] else "collective" if _is_collective(entry) else "wait",
                "ph": "X",
                **place,
                "ts": came / _NS_PER_US,
                "dur": max(0, completed - came) / _NS_PER_US,
                "args": {
                    "description": entry["description"],
                    "communicator": entry["process_group"][0] or "all ranks",
                    "group": entry["pg_id"],
                    "channel": lane[1],
                    "seq": seq,
                    "nbytes": entry["nbytes"],
                    "source": _source(entry),
                    "state": entry["state"],
                    "waited_us": waited / _NS_PER_US,
                    "waited_for_rank": last,
                },
            }
            if waited > error:  # a shorter wait may be an error of the clocks
                what = {"name": f"waits for rank {last}", "cat": "skew", "ph": "X", **place, "args": {}}
                yield {**what, "ts": came / _NS_PER_US, "dur": waited / _NS_PER_US}
        yield from _names(part, labels, len(parts))


def _start(parts: Sequence[Part]) -> int:
    """Returns the time 0 of the timeline: when the first rank's trace began, by the clock of rank 0."""
    return min(int(aligned(np.array(part.span), part.begin, part.end)[0]) for part in parts)


def _names(part: Part, labels: Mapping[int, str], size: int) -> Iterator[Event]:
    """The metadata events of a rank."""

    def named(what: str, thread: int, **args: Any) -> Event:
        return {"name": what, "ph": "M", "pid": part.rank, "tid": thread, "args": args}

    yield named("process_name", 0, name=f"rank {part.rank} of {size}, {part.host}")
    yield named("process_sort_index", 0, sort_index=part.rank)
    for thread, label in labels.items():
        yield named("thread_name", thread, name=label)
        yield named("thread_sort_index", thread, sort_index=thread)


def _spans(parts: Sequence[Part], times: Sequence[Any]) -> dict[_Call, dict[int, tuple[int, int]]]:
    """The times at which each rank entered and left each collective."""
    spans: dict[_Call, dict[int, tuple[int, int]]] = defaultdict(dict)
    for part, own in zip(parts, times, strict=True):
        keys = [(entry["pg_id"], _lane(entry)[1]) if _is_collective(entry) else None for entry in part.kinds]
        for kind, seq, (created, started, completed) in zip(
            part.kind.tolist(), part.seq.tolist(), own.tolist(), strict=True
        ):
            if (key := keys[kind]) is not None:
                spans[(*key, seq)][part.rank] = (started or created, completed)
    return spans


def _name(entry: Event) -> str:
    """The name of the operation.

    Example:
        >>> _name({"profiling_name": "pycollective:allreduce"})
        'allreduce'
    """
    return str(entry["profiling_name"].partition(":")[2])


def _is_collective(entry: Event) -> bool:
    """Whether a record is a collective of a program. The description of a wait outside programs has no arguments."""
    return not entry["is_p2p"] and (entry["description"] != _name(entry) or _name(entry) == "barrier")


def _lane(entry: Event) -> tuple[str, str]:
    """The communicator and the channel: a thread of the timeline."""
    if not (entry["is_p2p"] or _is_collective(entry)):
        return "", ""
    return entry["pg_id"], entry["process_group"][1]


def _label(entry: Event) -> str:
    """The name of the thread of a record."""
    group, channel = entry["process_group"]
    return f"{group}, {channel}" if any(_lane(entry)) else _OUTSIDE


def _root(description: str) -> int:
    """The root in a description; -1 if there is none.

    Example:
        >>> _root("bcast(float32[2,3], root=4)"), _root("barrier")
        (4, -1)
    """
    found = re.search(r"\broot=(\d+)", description)
    return int(found[1]) if found else -1


def _source(entry: Event) -> str:
    """The line of the program; "" if it is unknown."""
    return "".join(f"{frame['filename']}:{frame['line']} ({frame['name']})" for frame in entry["frames"][:1])


def _error(part: Part) -> int:
    return max(part.begin.error, part.end.error)
