"""Verdicts on the records that the ranks of a failed job have left: which calls match, which do not, whose fault it is.

A collective has the same communicator, channel and number on all its ranks. The names of the verdicts are those of
PyTorch's flight recorder. There the state of a call comes before its dtype and shape; here what ranks call comes first,
since a call that does not match also ends in different states.

Source: PyTorch's ``tools/flight_recorder``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pycollective.errors import name_ranks

FULLY_MATCHED = "FULLY_MATCHED"
"""All ranks make the same call, and are in the same state."""

TYPE = "COLLECTIVE_TYPE_MISMATCH"
"""Ranks call different operations."""

DTYPE = "COLLECTIVE_DTYPE_MISMATCH"
"""The same operation on other dtypes."""

SIZE = "SIZE_OR_SYNTAX_MISMATCH"
"""The same operation with another shape, reduction or root, or at another line where that made the call fail."""

STATE = "COLLECTIVE_STATE_MISMATCH"
"""Some ranks have not made the call, or some are still in it."""

UNDECIDED = "UNDECIDED"
"""What is there matches, but a rank's record of the call is not there."""

Entry = Mapping[str, Any]
Records = Mapping[str, Any]


class Side(NamedTuple):
    """Ranks that did the same in a call: who, which call, at which line, in which state."""

    who: str
    call: str
    line: str
    state: str


class Verdict(NamedTuple):
    """What the records say of one collective.

    Attributes:
        name: the verdict.
        communicator: the communicator, and its channel where it has several.
        seq: the number of the call.
        sides: the ranks by what they did.
        culprits: the ranks that differ from most others, or have not made the call.
    """

    name: str
    communicator: str
    seq: int
    sides: list[Side]
    culprits: list[int]


@dataclass(frozen=True)
class Findings:
    """What the records of a job say.

    Attributes:
        counts: how many collectives have each verdict.
        verdicts: those that are not fully matched, the first in time in front, undecided ones last.
        sentences: what else there is to say, and a summary.
    """

    counts: Counter[str]
    verdicts: list[Verdict]
    sentences: list[str]


class _Place(NamedTuple):
    """Of a collective: the id of its group, the channel, the number."""

    group: str
    channel: str
    seq: int


def judge(records: Sequence[Records]) -> Findings:
    """Compares the records of ranks, one object of each rank that has written a file."""
    by_rank = {own["rank"]: own for own in records}
    calls: dict[_Place, dict[int, Entry]] = defaultdict(dict)
    for rank, own in by_rank.items():
        for entry in own["entries"]:
            if entry["collective_seq_id"] > 0:
                place = _Place(entry["pg_id"], entry["process_group"][1], entry["collective_seq_id"])
                calls[place][rank] = entry
    histories = {rank: _History(own) for rank, own in by_rank.items()}
    found = [
        _verdict(place, entries, _members(place.group, records), histories)
        for place, entries in sorted(calls.items(), key=lambda call: min(map(_created, call[1].values())))
    ]
    counts = Counter(verdict.name for verdict in found)
    wrong = [verdict for verdict in found if verdict.name not in (FULLY_MATCHED, UNDECIDED)]
    undecided = [verdict for verdict in reversed(found) if verdict.name == UNDECIDED]
    return Findings(counts, [*wrong, *undecided], [*_sentences(by_rank, counts, wrong)])


def _created(entry: Entry) -> int:
    return int(entry["time_created_ns"])


def _members(group: str, records: Sequence[Records]) -> list[int]:
    """The ranks of a group."""
    found = next((own["pg_config"][group] for own in records if group in own["pg_config"]), {"ranks": ""})
    return [int(rank) for rank in re.findall(r"\d+", found["ranks"])]


class _History:
    """Which calls a rank has made, as far as its ring tells."""

    def __init__(self, records: Records) -> None:
        entries = records["entries"]
        self._has_all = not entries or min(entry["record_id"] for entry in entries) == 0
        self._first: dict[tuple[str, str], int] = {}
        for entry in entries:
            lane, seq = (entry["pg_id"], entry["process_group"][1]), entry["collective_seq_id"]
            if seq > 0:
                self._first[lane] = min(seq, self._first.get(lane, seq))

    def has_not_made(self, place: _Place) -> bool:
        """Whether the rank, which has no record of the call, has certainly not made it."""
        first = self._first.get((place.group, place.channel))
        return self._has_all or (first is not None and place.seq > first)


def _verdict(
    place: _Place, entries: Mapping[int, Entry], members: Sequence[int], histories: Mapping[int, _History]
) -> Verdict:
    absent = [rank for rank in members if rank not in entries]
    missing = [rank for rank in absent if rank in histories and histories[rank].has_not_made(place)]
    unknown = [rank for rank in absent if rank not in missing]
    name, culprits = _mismatch(entries)
    if name == FULLY_MATCHED and missing:
        name, culprits = STATE, missing
    if name == FULLY_MATCHED and len({entry["state"] for entry in entries.values()}) > 1:
        name, culprits = STATE, _fewer(entries, lambda entry: entry["state"])
    if name == FULLY_MATCHED and unknown:
        name = UNDECIDED
    first = next(iter(entries.values()))
    channel = "" if place.channel == "channel 0" else f", {place.channel}"
    sides = _sides(entries)
    if missing:
        sides.append(Side(name_ranks(missing), "has not made the call", "", ""))
    if unknown:
        sides.append(Side(name_ranks(unknown), "no record of the call", "", ""))
    return Verdict(name, f"{first['process_group'][0]}{channel}", place.seq, sides, culprits)


def _mismatch(entries: Mapping[int, Entry]) -> tuple[str, list[int]]:
    """Compares what ranks call, but for the state; returns the verdict and the ranks that differ from most."""
    for name, fact in (
        (TYPE, lambda entry: entry["profiling_name"]),
        (DTYPE, lambda entry: str(entry["input_dtypes"])),
        (SIZE, lambda entry: (str(entry["input_sizes"]), entry["description"])),
    ):
        if culprits := _fewer(entries, fact):
            return name, culprits
    if any(entry["state"] == "failed" for entry in entries.values()) and (culprits := _fewer(entries, _line)):
        return SIZE, culprits
    return FULLY_MATCHED, []


def _fewer(entries: Mapping[int, Entry], fact: Any) -> list[int]:
    """The ranks whose ``fact`` is not that of most ranks; where as many have each, that of the lowest rank counts."""
    by_fact: dict[Any, list[int]] = defaultdict(list)
    for rank in sorted(entries):
        by_fact[fact(entries[rank])].append(rank)
    usual = max(by_fact.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    return [rank for rank in sorted(entries) if rank not in usual]


def _sides(entries: Mapping[int, Entry]) -> list[Side]:
    by_side: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank in sorted(entries):
        entry = entries[rank]
        by_side[entry["description"], _line(entry), entry["state"]].append(rank)
    return [Side(name_ranks(ranks), *facts) for facts, ranks in by_side.items()]


def _line(entry: Entry) -> str:
    """The line of the program; "" if nobody knows it."""
    return "".join(f"{frame['filename']}:{frame['line']} ({frame['name']})" for frame in entry["frames"][:1])


def _sentences(by_rank: Mapping[int, Records], counts: Counter[str], wrong: Sequence[Verdict]) -> Iterator[str]:
    """What there is to say beside the table."""
    size = max(own["world_size"] for own in by_rank.values())
    for reason in dict.fromkeys(own["reason"].strip().split("\n")[0] for own in by_rank.values()):
        if reason:
            yield f"The job ended because: {reason.removeprefix('pycollective: ')}"
    absent = [rank for rank in range(size) if rank not in by_rank]
    if absent:
        yield f"No records of {name_ranks(absent)} of {size}: killed perhaps, or without a way to write here."
    for rank, own in sorted(by_rank.items()):
        for entry in own["entries"]:
            if entry["state"] in ("scheduled", "started") and entry["collective_seq_id"] == 0:
                where = f" of communicator {entry['process_group'][0]}" if entry["process_group"][0] else ""
                line = f", at {_line(entry)}" if _line(entry) else ""
                yield f"Rank {rank} was in {entry['description']}{where}{line}."
    verdicts = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    yield f"{counts.total()} collectives: {verdicts}." if counts else "There are no collectives in the records."
    if wrong:
        first = wrong[0]
        yield (
            f"The first that does not match is number {first.seq} of communicator {first.communicator}: "
            f"look at {name_ranks(first.culprits)}."
        )
