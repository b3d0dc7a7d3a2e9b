"""Verdicts on the records that the ranks of a failed job have left: which calls match, which do not, whose fault it is.

A collective has the same communicator, channel and number on all its ranks. The names of the verdicts are those of
PyTorch's flight recorder. There the state of a call comes before its dtype and shape; here what ranks call comes first,
since a call that does not match also ends in different states.

Source: PyTorch's ``tools/flight_recorder``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pycollective.errors import name_ranks
from pycollective.report import reading
from pycollective.transport.watch import END

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


def _is_process_group(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(reading.text, value))


_ENTRY = {
    "record_id": reading.count,
    "pg_id": reading.text,
    "process_group": _is_process_group,
    "collective_seq_id": reading.count,
    "profiling_name": reading.text,
    "input_sizes": [lambda _: True],
    "input_dtypes": [reading.text],
    "description": reading.text,
    "state": reading.text,
    "time_created_ns": reading.whole,
    "is_p2p": reading.flag,
    "frames": [{"filename": reading.text, "line": reading.count, "name": reading.text}],
}
FORM = {
    "rank": reading.rank,
    "world_size": reading.size,
    "reason": reading.text,
    "pg_config": reading.groups,
    "entries": [_ENTRY],
    "complete_from": reading.count,
    "job": reading.absent_or(reading.text),
    "writers": reading.absent_or([reading.rank]),
}
"""What the records of a rank must have for :func:`judge`."""


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
        suspects: the ranks that were asked for a file, have none, and take part in the call, if another rank was still
            in it, and nothing but its state differs.
        is_shown: whether it has sides. A call has none if all ranks match, or if all ranks with a file have a record of
            it and have ended it alike.
    """

    name: str
    communicator: str
    seq: int
    sides: list[Side]
    culprits: list[int]
    suspects: list[int]
    is_shown: bool


@dataclass(frozen=True)
class Findings:
    """What the records of a job say.

    Attributes:
        counts: how many collectives have each verdict.
        verdicts: those that are not fully matched, the first in time in front, undecided ones last. Calls that all
            ranks with a file have made and completed alike are not among them.
        sentences: what else there is to say, and a summary.
    """

    counts: Counter[str]
    verdicts: list[Verdict]
    sentences: list[str]


_UNDER_WAY = ("scheduled", "started")
"""The states of a call that has not ended."""

_ALL_RANKS = "0"
"""The id in the place of a group's, of a wait for all ranks."""

_NO_RECORD = "no record of the call"
"""What a rank with a file did in a call that its ring has lost."""

_NO_FILE = "has no file"

_NOT_ASKED = "was not asked for a file"
"""Of many ranks a part writes files (``native/monitor/record_writers.h``). Nobody blames the others."""


class _Wait(NamedTuple):
    """A kind of wait outside programs: the id of its group, and what it is. Such waits have no numbers."""

    group: str
    description: str


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
    size = max(own["world_size"] for own in records)
    asked = {rank for own in records for rank in own.get("writers") or range(own["world_size"])}
    absent = {rank for rank in asked if rank not in by_rank and rank < size}
    unasked = [rank for rank in range(size) if rank not in by_rank and rank not in absent]
    members = {group: _members(group, records) for group in {place.group for place in calls}}
    found = [
        _verdict(place, entries, members[place.group], histories, absent)
        for place, entries in sorted(calls.items(), key=lambda call: min(map(_created, call[1].values())))
    ]
    counts = Counter(verdict.name for verdict in found)
    wrong = [verdict for verdict in found if verdict.name not in (FULLY_MATCHED, UNDECIDED)]
    undecided = [verdict for verdict in reversed(found) if verdict.name == UNDECIDED]
    shown = [verdict for verdict in undecided if verdict.is_shown]
    left_out = len(undecided) - len(shown)
    sentences = [*_reasons(records), *_without_file(absent, unasked, size)]
    sentences += [*_waits_and_messages(records, histories)]
    sentences += [*_summary(counts, left_out), *_advice(found, records, histories, absent)]
    return Findings(counts, [*wrong, *shown], sentences)


def _created(entry: Entry) -> int:
    return int(entry["time_created_ns"])


def _is_wait(entry: Entry) -> bool:
    """Whether a record is that of a wait outside programs: no collective, no message."""
    return entry["collective_seq_id"] == 0 and not entry["is_p2p"]


def _wait_of(entry: Entry) -> _Wait:
    return _Wait(entry["pg_id"], entry["description"])


def _members(group: str, records: Sequence[Records]) -> list[int]:
    """The ranks of a group; for the group "0", which has no name, all ranks."""
    if group == _ALL_RANKS:
        return list(range(records[0]["world_size"]))
    found = next((own["pg_config"][group] for own in records if group in own["pg_config"]), {"ranks": ""})
    return [int(rank) for rank in re.findall(r"\d+", found["ranks"])]


class _History:
    """Which calls a rank has made, as far as its ring tells, and which it was still in."""

    def __init__(self, records: Records) -> None:
        entries, complete_from = records["entries"], records["complete_from"]
        self._has_all = complete_from == 0
        # From which call of each lane on the ring has all. An older call may be there, since it stays under way.
        self._first: dict[tuple[str, str], int] = {}
        for entry in entries:
            lane, seq = (entry["pg_id"], entry["process_group"][1]), entry["collective_seq_id"]
            if seq > 0 and entry["record_id"] >= complete_from:
                self._first[lane] = min(seq, self._first.get(lane, seq))
        done = [entry["record_id"] for entry in entries if entry["state"] == "completed"]
        self._last_completed = max(done, default=-1)
        self._waits = Counter(map(_wait_of, filter(_is_wait, entries)))

    def has_not_made(self, place: _Place) -> bool:
        """Whether the rank, which has no record of the call, has certainly not made it."""
        first = self._first.get((place.group, place.channel))
        return self._has_all or (first is not None and place.seq > first)

    def is_in(self, entry: Entry) -> bool:
        """Whether the rank was in its call at last: it is under way, or has failed and none has succeeded since."""
        is_last = entry["record_id"] > self._last_completed
        return entry["state"] in _UNDER_WAY or (entry["state"] == "failed" and is_last)

    def has_waited(self, wait: _Wait, times: int) -> bool:
        """Whether the rank has certainly begun such waits so many times."""
        return self._has_all and self._waits[wait] >= times

    def count(self, wait: _Wait) -> int:
        """How many such waits the ring has."""
        return self._waits[wait]


def _verdict(
    place: _Place,
    entries: Mapping[int, Entry],
    members: Sequence[int],
    histories: Mapping[int, _History],
    absent: Collection[int],
) -> Verdict:
    others = [rank for rank in members if rank not in entries]
    missing = [rank for rank in others if rank in histories and histories[rank].has_not_made(place)]
    unknown = [rank for rank in others if rank not in histories or not histories[rank].has_not_made(place)]
    name, culprits = _mismatch(entries)
    if name == FULLY_MATCHED and missing:
        name, culprits = STATE, missing
    if name == FULLY_MATCHED and len({entry["state"] for entry in entries.values()}) > 1:
        name, culprits = STATE, _minority(entries, lambda entry: entry["state"])
    if name == FULLY_MATCHED and unknown:
        name = UNDECIDED
    first = next(iter(entries.values()))
    channel = "" if place.channel == "channel 0" else f", {place.channel}"
    lost = [rank for rank in unknown if rank in histories]
    without = [rank for rank in unknown if rank in absent]
    is_open = name in (UNDECIDED, STATE) and any(histories[rank].is_in(entry) for rank, entry in entries.items())
    suspects = without if is_open else []
    is_shown = name != FULLY_MATCHED and (name != UNDECIDED or is_open or bool(lost))
    sides = [*_sides(entries), *_sides_without_record(missing, lost, without, unknown)] if is_shown else []
    communicator = f"{first['process_group'][0]}{channel}"
    return Verdict(name, communicator, place.seq, sides, culprits, suspects, is_shown)


def _sides_without_record(
    missing: Sequence[int], lost: Sequence[int], without: Sequence[int], unknown: Sequence[int]
) -> Iterator[Side]:
    unasked = sorted({*unknown}.difference(lost, without))
    for ranks, what in (
        (missing, "has not made the call"),
        (lost, _NO_RECORD),
        (without, _NO_FILE),
        (unasked, _NOT_ASKED),
    ):
        if ranks:
            yield Side(name_ranks(ranks), what, "", "")


def _mismatch(entries: Mapping[int, Entry]) -> tuple[str, list[int]]:
    """Compares what ranks call, but for the state; returns the verdict and the ranks that differ from most."""
    for name, fact in (
        (TYPE, lambda entry: entry["profiling_name"]),
        (DTYPE, lambda entry: str(entry["input_dtypes"])),
        (SIZE, lambda entry: (str(entry["input_sizes"]), entry["description"])),
    ):
        if culprits := _minority(entries, fact):
            return name, culprits
    if any(entry["state"] == "failed" for entry in entries.values()) and (culprits := _minority(entries, _line)):
        return SIZE, culprits
    return FULLY_MATCHED, []


def _minority(entries: Mapping[int, Entry], fact: Any) -> list[int]:
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


# What there is to say beside the table ------------------------------------------------------------------------


def _reasons(records: Sequence[Records]) -> Iterator[str]:
    for reason in dict.fromkeys(own["reason"].strip().split("\n")[0] for own in records):
        if reason:
            yield f"The job ended because: {reason.removeprefix('pycollective: ')}"


def _without_file(absent: Collection[int], unasked: Sequence[int], size: int) -> Iterator[str]:
    if absent:
        they = "it was" if len(absent) == 1 else "they were"
        yield f"No records of {name_ranks(absent)} of {size}: {they} stopped or killed, or could not write here."
    if unasked:
        yield f"{len(unasked)} of {size} ranks were not asked for their records: {name_ranks(unasked)}."


def _waits_and_messages(records: Sequence[Records], histories: Mapping[int, _History]) -> Iterator[str]:
    """The messages that ranks were in at last, and their waits outside programs, with the ranks not in them."""
    messages: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    waits: dict[_Wait, dict[int, Entry]] = defaultdict(dict)
    busy = set()
    for own in sorted(records, key=lambda own: own["rank"]):
        rank = own["rank"]
        for entry in filter(histories[rank].is_in, own["entries"]):
            if _is_wait(entry):
                waits[_wait_of(entry)][rank] = entry
            elif entry["collective_seq_id"] == 0:
                messages[entry["description"], entry["process_group"][0], _line(entry)].append(rank)
            busy.add(rank)
    for (description, communicator, line), ranks in messages.items():
        yield f"{_begin_of_sentence(ranks)} in {_describe_call(description, communicator, line)}."
    for wait, entries in waits.items():
        first = next(iter(entries.values()))
        if wait.description == END:
            subject, _, _ = _begin_of_sentence(list(entries)).rpartition(" ")
            yield f"{subject} had ended, and waited for the other ranks."
            continue
        call = _describe_call(wait.description, first["process_group"][0], _line(first))
        told = f"{_begin_of_sentence(list(entries))} in {call}"
        times = max(histories[rank].count(wait) for rank in entries)
        members = [rank for rank in _members(wait.group, records) if rank not in entries and rank in histories]
        missing = [rank for rank in members if not histories[rank].has_waited(wait, times)]
        if missing:
            verb = "was" if len(missing) == 1 else "were"
            culprits = [rank for rank in missing if rank not in busy] or missing
            told += f"; {name_ranks(missing)} {verb} not: look at {name_ranks(culprits)}"
        yield f"{told}."


def _begin_of_sentence(ranks: Sequence[int]) -> str:
    """The begin of a sentence on ranks.

    Example:
        >>> _begin_of_sentence([1]), _begin_of_sentence([0, 2])
        ('Rank 1 was', 'Ranks 0, 2 were')
    """
    return f"{name_ranks(ranks).capitalize()} {'was' if len(ranks) == 1 else 'were'}"


def _describe_call(description: str, communicator: str, line: str) -> str:
    return description + (f" of communicator {communicator}" if communicator else "") + (f", at {line}" if line else "")


def _summary(counts: Counter[str], left_out: int) -> Iterator[str]:
    if not counts:
        yield "There are no collectives in the records."
        return
    verdicts = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    yield f"{counts.total()} collectives: {verdicts}."
    if left_out:
        yield f"Not shown: {left_out} {UNDECIDED} that all ranks with a file have ended alike."


def _advice(
    found: Sequence[Verdict], records: Sequence[Records], histories: Mapping[int, _History], absent: Collection[int]
) -> Iterator[str]:
    """Where to begin: the first mismatch, and the ranks without a file for which others may have waited."""
    first = next((verdict for verdict in found if verdict.name not in (FULLY_MATCHED, UNDECIDED)), None)
    if first is not None:
        yield (
            f"The first that does not match is number {first.seq} of communicator {first.communicator}: "
            f"look at {name_ranks(first.culprits)}."
        )
    suspects = {rank for verdict in found for rank in verdict.suspects}
    for own in records:
        for entry in filter(histories[own["rank"]].is_in, own["entries"]):
            if entry["collective_seq_id"] == 0:
                suspects |= {*absent} & {*_members(entry["pg_id"], records)}
    if suspects:
        has = "has" if len(suspects) == 1 else "have"
        names = name_ranks(suspects)
        yield f"Ranks were still in calls on communicators of {names}, which {has} no file: look at {names}."
