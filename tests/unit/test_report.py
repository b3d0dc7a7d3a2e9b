"""``pycollective report`` on files that were written by hand, and the sums behind it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycollective.report import command, verdicts
from pycollective.report.timeline import FACTORS, summary
from pycollective.timeline import events
from pycollective.timeline.calls import Part
from pycollective.timeline.clocks import Reading
from pycollective.timeline.waits import wait_of

GROUP = {"7": {"name": "7", "desc": "world", "ranks": "[0, 1, 2]"}}


def entry(seq: int, **changes: Any) -> dict[str, Any]:
    """A record of an allreduce."""
    return {
        "record_id": seq - 1,
        "pg_id": "7",
        "process_group": ["world", "channel 0"],
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "profiling_name": "pycollective:allreduce",
        "input_sizes": [[4]],
        "input_dtypes": ["float32"],
        "description": "allreduce(float32[4], op=sum)",
        "nbytes": 16,
        "state": "completed",
        "time_created_ns": seq,
        "is_p2p": False,
        "frames": [{"name": "step", "filename": "train.py", "line": 9}],
        **changes,
    }


def records(rank: int, entries: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """The file of a rank that has made these calls, and no others."""
    facts = {"rank": rank, "world_size": 3, "reason": "", "pg_config": GROUP, "complete_from": 0, "entries": entries}
    return {**facts, **changes}


def write(folder: Path, entries: dict[int, list[dict[str, Any]]], *, size: int = 3, reason: str = "") -> None:
    for rank, own in entries.items():
        (folder / f"rank-{rank}.json").write_text(json.dumps(records(rank, own, world_size=size, reason=reason)))


def judged(*ranks: list[dict[str, Any]]) -> verdicts.Findings:
    """The findings on the records of ranks 0, 1, ..."""
    return verdicts.judge([records(rank, own) for rank, own in enumerate(ranks)])


GATHER = {"profiling_name": "pycollective:allgather", "description": "allgather(float32[4])"}
INT = {"input_dtypes": ["int32"], "description": "allreduce(int32[4], op=sum)"}
LARGER = {"input_sizes": [[5]], "description": "allreduce(float32[5], op=sum)"}
MAXIMUM = {"description": "allreduce(float32[4], op=max)"}
ELSEWHERE = {"frames": [{"name": "step", "filename": "train.py", "line": 11}]}
FAILED = {"state": "failed"}


@pytest.mark.parametrize(
    ("others", "odd", "name"),
    [
        ({}, {}, "FULLY_MATCHED"),
        ({}, ELSEWHERE, "FULLY_MATCHED"),
        ({}, GATHER, "COLLECTIVE_TYPE_MISMATCH"),
        ({}, INT, "COLLECTIVE_DTYPE_MISMATCH"),
        ({}, LARGER, "SIZE_OR_SYNTAX_MISMATCH"),
        ({}, MAXIMUM, "SIZE_OR_SYNTAX_MISMATCH"),
        (FAILED, {**FAILED, **ELSEWHERE}, "SIZE_OR_SYNTAX_MISMATCH"),
        ({}, {"state": "started"}, "COLLECTIVE_STATE_MISMATCH"),
        ({}, {**GATHER, "state": "started"}, "COLLECTIVE_TYPE_MISMATCH"),
    ],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_verdict_on_one_rank_that_differs(others: dict[str, Any], odd: dict[str, Any], name: str, rank: int) -> None:
    ranks = [[entry(1), entry(2, **(odd if rank == own else others))] for own in range(3)]
    found = judged(*ranks)
    assert found.counts == ({"FULLY_MATCHED": 2} if name == "FULLY_MATCHED" else {"FULLY_MATCHED": 1, name: 1})
    if name != "FULLY_MATCHED":
        (verdict,) = found.verdicts
        assert (verdict.name, verdict.communicator, verdict.seq, verdict.culprits) == (name, "world", 2, [rank])
        assert f"rank {rank}" in [side.who for side in verdict.sides]


def test_a_call_that_a_rank_has_not_made() -> None:
    last = entry(2, state="started")
    (verdict,) = judged([entry(1), last], [entry(1)], [entry(1), last]).verdicts
    assert (verdict.name, verdict.seq, verdict.culprits) == ("COLLECTIVE_STATE_MISMATCH", 2, [1])
    assert [(side.who, side.call) for side in verdict.sides] == [
        ("ranks 0, 2", "allreduce(float32[4], op=sum)"),
        ("rank 1", "has not made the call"),
    ]


def test_a_call_that_a_ring_has_lost_or_whose_file_is_missing() -> None:
    late = [entry(seq, record_id=seq + 5000) for seq in (2, 3)]
    calls = [entry(1), entry(2), entry(3)]
    found = verdicts.judge([records(0, calls), records(1, calls), records(2, late, complete_from=5002)])
    assert [(verdict.name, verdict.seq, verdict.culprits) for verdict in found.verdicts] == [("UNDECIDED", 1, [])]
    found = judged([entry(1)], [entry(1)])
    assert found.counts == {"UNDECIDED": 1}
    assert "No records of rank 2 of 3: it was stopped or killed, or could not write here." in found.sentences


def test_a_ring_that_has_lost_calls_beside_one_that_stays_under_way() -> None:
    """The first record is still there. So is the first call of a lane, and not the next ones."""
    begun = entry(1, state="started")
    calls = [entry(1), entry(2), entry(3)]
    late = records(2, [begun, entry(3, record_id=5002)], complete_from=5000)
    found = verdicts.judge([records(0, calls), records(1, calls), late])
    assert [(verdict.name, verdict.seq) for verdict in found.verdicts] == [
        ("COLLECTIVE_STATE_MISMATCH", 1),
        ("UNDECIDED", 2),
    ]
    assert (found.verdicts[1].culprits, found.verdicts[1].sides[-1]) == (
        [],
        verdicts.Side("rank 2", "no record of the call", "", ""),
    )
    behind = records(2, [begun, entry(2, record_id=5001)], complete_from=5000)
    assert verdicts.judge([records(0, calls), records(1, calls), behind]).verdicts[-1].culprits == [2]


# Ranks that are not asked for their records -----------------------------------------------------------------------

MANY = {"7": {"name": "7", "desc": "world", "ranks": str([*range(1024)])}}
WRITERS = {"world_size": 1024, "pg_config": MANY, "writers": [0, 100, 512, 1023]}


def test_ranks_that_were_not_asked_are_told_and_not_blamed() -> None:
    last = entry(2, state="started")
    files = [records(rank, [entry(1), last], **WRITERS) for rank in (0, 100, 1023)]
    found = verdicts.judge([*files, records(512, [entry(1)], **WRITERS)])
    assert found.counts == {"UNDECIDED": 1, "COLLECTIVE_STATE_MISMATCH": 1}
    (verdict,) = found.verdicts
    assert (verdict.seq, verdict.culprits, verdict.suspects) == (2, [512], [])
    assert [(side.who, side.call) for side in verdict.sides] == [
        ("ranks 0, 100, 1023", "allreduce(float32[4], op=sum)"),
        ("rank 512", "has not made the call"),
        ("ranks 1-99, 101-511, 513-1022", "was not asked for a file"),
    ]
    assert found.sentences == [
        "1020 of 1024 ranks were not asked for their records: ranks 1-99, 101-511, 513-1022.",
        "2 collectives: 1 UNDECIDED, 1 COLLECTIVE_STATE_MISMATCH.",
        "Not shown: 1 UNDECIDED that all ranks with a file have ended alike.",
        "The first that does not match is number 2 of communicator world: look at rank 512.",
    ]


@pytest.mark.parametrize("call", [{}, {"collective_seq_id": 0, "p2p_seq_id": 2, "is_p2p": True}])
def test_a_rank_that_was_asked_and_has_no_file_is_blamed(call: dict[str, Any]) -> None:
    files = [records(rank, [entry(1), entry(2, state="started", **call)], **WRITERS) for rank in (0, 100, 1023)]
    told = verdicts.judge(files).sentences
    assert "No records of rank 512 of 1024: it was stopped or killed, or could not write here." in told
    assert told[-1] == ("Ranks were still in calls on communicators of rank 512, which has no file: look at rank 512.")


def test_a_wait_outside_programs_in_which_ranks_are_that_were_not_asked() -> None:
    files = [records(rank, [entry(1), wait(2, state="started")], **WRITERS) for rank in (0, 100, 1023)]
    sentence = "Ranks 0, 100, 1023 were in the first call of a function of communicator world"
    assert verdicts.judge([*files, records(512, [entry(1)], **WRITERS)]).sentences[1] == (
        f"{sentence}; rank 512 was not: look at rank 512."
    )
    assert f"{sentence}." in verdicts.judge(files).sentences


def test_a_call_under_way_on_all_ranks_with_a_file_is_shown() -> None:
    files = [records(rank, [entry(1, state="started")], **WRITERS) for rank in (0, 100, 512, 1023)]
    found = verdicts.judge(files)
    assert [(verdict.name, verdict.suspects) for verdict in found.verdicts] == [("UNDECIDED", [])]
    assert not any("look at" in told for told in found.sentences)


def test_two_ranks_that_end_a_job_ask_for_the_records_of_both_their_lists() -> None:
    first, second = {**WRITERS, "writers": [0, 1]}, {**WRITERS, "writers": [1, 2]}
    told = verdicts.judge([records(0, [], **first), records(1, [], **second)]).sentences
    assert told[:2] == [
        "No records of rank 2 of 1024: it was stopped or killed, or could not write here.",
        "1021 of 1024 ranks were not asked for their records: ranks 3-1023.",
    ]


def test_the_first_mismatch_comes_first() -> None:
    other = {"pg_id": "7", "process_group": ["world", "channel 1"]}
    early = entry(1, time_created_ns=5, **other)
    ranks = [[entry(1, time_created_ns=9), early], [entry(1, time_created_ns=9, **INT), {**early, **GATHER}]]
    ranks.append(ranks[0])
    found = judged(*ranks)
    assert [(verdict.communicator, verdict.name) for verdict in found.verdicts] == [
        ("world, channel 1", "COLLECTIVE_TYPE_MISMATCH"),
        ("world", "COLLECTIVE_DTYPE_MISMATCH"),
    ]
    assert (
        "The first that does not match is number 1 of communicator world, channel 1: look at rank 1." in found.sentences
    )


def test_waits_that_are_no_collectives_are_told() -> None:
    split = entry(1, collective_seq_id=0, profiling_name="pycollective:split", description="split", state="started")
    found = judged([entry(1)], [entry(1), split], [entry(1)])
    assert found.counts == {"FULLY_MATCHED": 1}
    told = "Rank 1 was in split of communicator world, at train.py:9 (step); ranks 0, 2 were not: look at ranks 0, 2."
    assert told in found.sentences


@pytest.mark.parametrize("state", ["started", "failed"])
def test_a_rank_without_a_file_is_named(state: str) -> None:
    calls = [entry(1), entry(2), entry(3, state=state)]
    found = judged(calls, calls)
    assert found.counts == {"UNDECIDED": 3}
    (verdict,) = found.verdicts
    assert (verdict.name, verdict.seq, verdict.suspects) == ("UNDECIDED", 3, [2])
    assert [(side.who, side.call, side.state) for side in verdict.sides] == [
        ("ranks 0, 1", "allreduce(float32[4], op=sum)", state),
        ("rank 2", "has no file", ""),
    ]
    assert found.sentences == [
        "No records of rank 2 of 3: it was stopped or killed, or could not write here.",
        "3 collectives: 3 UNDECIDED.",
        "Not shown: 2 UNDECIDED that all ranks with a file have ended alike.",
        "Ranks were still in calls on communicators of rank 2, which has no file: look at rank 2.",
    ]


def test_a_rank_without_a_file_that_nobody_waited_for_is_not_blamed() -> None:
    failed = entry(2, state="failed")  # the program went on after it
    assert not any("look at" in told for told in judged([entry(1), failed, entry(3)], [entry(1)]).sentences[:-1])
    found = judged([entry(1), entry(2, **FAILED)], [entry(1), entry(2, **GATHER, **FAILED)])
    assert found.sentences[-1].endswith("number 2 of communicator world: look at rank 1.")


def test_a_rank_without_a_file_while_others_differ_in_their_states() -> None:
    """Rank 0 is ahead by a call, or rank 1 by one less: without rank 2's file nobody knows who waited for whom."""
    found = judged([entry(1), entry(2, state="started")], [entry(1, state="started")])
    assert [verdict.name for verdict in found.verdicts] == ["COLLECTIVE_STATE_MISMATCH"] * 2
    assert [told.rpartition(": ")[2] for told in found.sentences[-2:]] == ["look at rank 1.", "look at rank 2."]


def test_a_message_to_a_rank_without_a_file() -> None:
    receive = {"collective_seq_id": 0, "p2p_seq_id": 1, "is_p2p": True, "description": "recv(float32[4]) from rank 2"}
    found = judged([entry(1), entry(2, **receive, state="started")], [entry(1)])
    assert "Rank 0 was in recv(float32[4]) from rank 2 of communicator world, at train.py:9 (step)." in found.sentences
    assert found.sentences[-1].endswith("on communicators of rank 2, which has no file: look at rank 2.")


def wait(number: int, **changes: Any) -> dict[str, Any]:
    """A record of a wait outside programs."""
    what = "the first call of a function"
    return entry(number, collective_seq_id=0, description=what, frames=[], **changes)


@pytest.mark.parametrize(("others", "one"), [("started", "started"), ("failed", "failed"), ("failed", "started")])
def test_a_first_call_that_a_rank_does_not_make(others: str, one: str) -> None:
    found = judged([entry(1), wait(2, state=others)], [entry(1)], [entry(1), wait(2, state=one)])
    assert found.counts == {"FULLY_MATCHED": 1}
    assert found.sentences == [
        "Ranks 0, 2 were in the first call of a function of communicator world; rank 1 was not: look at rank 1.",
        "1 collectives: 1 FULLY_MATCHED.",
    ]


def test_waits_that_blame_nobody() -> None:
    def told(*ranks: list[dict[str, Any]]) -> list[str]:
        return judged(*ranks).sentences[:-1]

    alone = "Rank 0 was in the first call of a function of communicator world."
    assert told([wait(1, state="started")], [wait(1)], [wait(1)]) == [alone]  # those are past it
    lost = [records(0, [wait(1, state="started")]), records(1, [wait(1)]), records(2, [wait(5001)], complete_from=5000)]
    # Rank 2 may have been in others that its ring has lost.
    assert verdicts.judge(lost).sentences[:-1] == [alone[:-1] + "; rank 2 was not: look at rank 2."]
    assert told([wait(1, **FAILED), wait(2)], [wait(1), wait(2)], [wait(1), wait(2)]) == []
    ended = wait(2, state="started") | {"pg_id": "0", "description": "the end of the other ranks"}
    assert told([entry(1), ended], [entry(1)], [entry(1), ended]) == [
        "Ranks 0, 2 had ended, and waited for the other ranks."
    ]


def test_of_the_ranks_that_are_not_in_a_wait_those_that_wait_elsewhere_are_not_blamed() -> None:
    split = wait(2, state="started")
    busy = entry(2, collective_seq_id=1, pg_id="8", state="started")
    assert (
        judged([entry(1), split], [entry(1)], [entry(1), busy])
        .sentences[0]
        .endswith("; ranks 1, 2 were not: look at rank 1.")
    )


def test_a_folder_of_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "pycollective: rank 1 of 3 raised; ending all ranks.\nTraceback"
    write(tmp_path, {0: [entry(1), entry(2)], 1: [entry(1), entry(2, **GATHER)]}, reason=reason)
    (tmp_path / "rank-2.json").write_text('{"rank": 2, "entr')
    assert command.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    for line in (
        "rank-2.json holds no whole records.",
        "The job ended because: rank 1 of 3 raised; ending all ranks.",
        "No records of rank 2 of 3",
        "2 collectives: 1 UNDECIDED, 1 COLLECTIVE_TYPE_MISMATCH.",
        "number 2 of communicator world: look at rank 1.",
        "train.py:9 (step)",
    ):
        assert line in told


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda own: own.update(rank="0"), "rank"),
        (lambda own: own.update(complete_from=-1), "complete_from"),
        (lambda own: own.pop("complete_from"), "complete_from"),
        (lambda own: own.update(job=3), "job"),
        (lambda own: own.update(writers=[0, "1"]), "writers"),
        (lambda own: own.update(world_size=1 << 40), "world_size"),
        (lambda own: own.update(reason=None), "reason"),
        (lambda own: own["pg_config"].update({"8": {"ranks": "[0, 123456789]"}}), "pg_config"),
        (lambda own: own["pg_config"].update({"8": None}), "pg_config"),
        (lambda own: own.update(entries={}), "entries"),
        (lambda own: own["entries"].append(3), "entries[2]"),
        (lambda own: own["entries"][1].pop("state"), "entries[1].state"),
        (lambda own: own["entries"][1].update(process_group=["world"]), "entries[1].process_group"),
        (lambda own: own["entries"][1].update(time_created_ns=None), "entries[1].time_created_ns"),
        (lambda own: own["entries"][1].update(is_p2p=0), "entries[1].is_p2p"),
        (lambda own: own["entries"][0].update(description="\ud800"), "entries[0].description"),
        (lambda own: own["entries"][0]["frames"].append({"filename": "a", "name": "b"}), "entries[0].frames[1].line"),
    ],
)
def test_records_with_a_value_that_is_none_of_ours(
    change: Callable[[dict[str, Any]], Any], place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {0: [entry(1), entry(2)], 1: [entry(1), entry(2)]})
    file = tmp_path / "rank-0.json"
    facts = json.loads(file.read_text())
    change(facts)
    file.write_text(json.dumps(facts))
    assert command.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert f"rank-0.json holds no whole records: {place} is missing, or of another kind." in told
    assert "No records of ranks 0, 2 of 3" in told


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff\xfe", b"3"])
def test_what_is_no_json_of_records(text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {0: [entry(1)]})
    (tmp_path / "rank-1.json").write_bytes(text)
    (tmp_path / "rank-2.json").mkdir()
    assert command.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "rank-1.json holds no whole records." in told
    assert "rank-2.json holds no whole records." in told


def test_names_that_look_like_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = {"process_group": ["[/x]", "channel 0"]}
    write(tmp_path, {0: [entry(1, description="[red]sum", **group)], 1: [entry(1, **group)]})
    assert command.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "[/x]" in told
    assert "[red]sum" in told


def test_records_of_an_earlier_job_in_the_same_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {2: [entry(1, **GATHER)]}, size=4)
    os.utime(tmp_path / "rank-2.json", (1, 1))
    write(tmp_path, {0: [entry(1)], 1: [entry(1)]})
    assert command.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "The records of rank 2 are of another job, and left out." in told
    assert "MISMATCH" not in told


def test_records_of_an_earlier_job_of_the_same_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that is not asked for its records leaves those of an earlier job where they are."""
    for rank, job, own in ((0, "b", entry(1)), (1, "a", entry(1, **GATHER)), (2, "b", entry(1))):
        facts = records(rank, [own], job=job, writers=[0, 2])
        file = tmp_path / f"rank-{rank}.json"
        file.write_text(json.dumps(facts))
        os.utime(file, (1, 1) if job == "a" else None)
    assert command.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "The records of rank 1 are of another job, and left out." in told
    assert "1 of 3 ranks were not asked for their records: rank 1." in told
    assert "MISMATCH" not in told


@pytest.mark.parametrize(
    "text", [None, "no JSON", "[1]", "{}", '{"traceEvents": []}', '{"otherData": {"producer": "?"}}']
)
def test_a_path_that_is_neither(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    if text is not None:
        file.write_text(text)
    assert command.main([str(file)]) == 1
    assert command.main([str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert (
        told.count("pycollective.report: expected a file of pycollective.trace, or a folder with files rank-R.json")
        == 2
    )


def part(rank: int, spans: list[tuple[int, int]], **changes: Any) -> Part:
    """The part of a rank that made sums from some times to others, in microseconds."""
    times = np.array([(begin, begin, end) for begin, end in spans], np.int64).reshape(-1, 3) * 1000
    facts: dict[str, Any] = {
        "rank": rank,
        "host": "host",
        "kinds": [entry(0, nbytes=3000, **changes)],
        "kind": np.zeros(len(spans), np.int64),
        "seq": np.arange(1, len(spans) + 1),
        "times": times,
        "groups": {"7": {**GROUP["7"], "ranks": "[0, 1]"}},
        "dropped": 0,
        "begin": Reading(0, 0, 100),
        "end": Reading(1_000_000, 0, 100),
        "span": (0, 1_000_000),
    }
    return Part(**facts)


def trace_of(*parts: Part) -> dict[str, Any]:
    return {"otherData": events.other_data(parts), "traceEvents": list(events.events(parts))}


def test_summary_of_a_trace() -> None:
    # Rank 1 comes 20 us late to the first and second call, and 10 us early to the third one.
    trace = trace_of(part(0, [(100, 130), (200, 230), (310, 330)]), part(1, [(120, 131), (220, 231), (300, 331)]))
    timeline = summary(trace)
    (row,) = timeline.rows
    assert (row.op, row.nbytes, row.ranks, row.calls, row.total_bytes) == ("allreduce", 3000, 2, 3, 9000)
    assert row.total_us == pytest.approx((30 + 30 + 20 + 11 + 11 + 31) / 2)
    assert row.share == pytest.approx(row.total_us / 1000)
    assert row.median_us == pytest.approx(25)
    # After the last rank has come the calls take 10, 10, 20, 11, 11, 21 us.
    assert row.busbw == pytest.approx(3000 / 11 / 1000)
    assert (row.slowest, row.last_in) == (1, 2)
    assert row.waited_us == pytest.approx(40)
    waited = {rank.rank: (rank.waited_us, rank.waited_for_us) for rank in timeline.ranks}
    assert waited == {0: (pytest.approx(40), pytest.approx(10)), 1: (pytest.approx(10), pytest.approx(40))}


def test_time_is_the_mean_of_the_ranks_that_make_the_call() -> None:
    timeline = summary(trace_of(part(0, [(100, 130)]), part(1, [(120, 134)]), part(2, [])))
    (row,) = timeline.rows
    assert (row.ranks, row.calls, row.total_us, row.median_us) == (2, 1, pytest.approx(22), pytest.approx(22))
    assert row.share == pytest.approx((30 + 14) / 3000)


@pytest.mark.parametrize(
    "change",
    [
        lambda trace: trace["traceEvents"].append(3),
        lambda trace: trace["traceEvents"][0].pop("dur"),
        lambda trace: trace["traceEvents"][0].update(ts=float("nan")),
        lambda trace: trace["traceEvents"][0].update(name="$\\frac"),
        lambda trace: trace["traceEvents"][0]["args"].pop("nbytes"),
        lambda trace: trace["traceEvents"][0]["args"].update(seq=[]),
        lambda trace: trace["otherData"].pop("groups"),
        lambda trace: trace["otherData"]["groups"].update({"7": {}}),
        lambda trace: trace["otherData"].update(ranks=[]),
        lambda trace: trace["otherData"]["ranks"][0].update(dropped="none"),
        lambda trace: trace["otherData"]["ranks"][0].update(ended_us=10**400),
    ],
)
def test_a_trace_with_a_value_that_is_none_of_ours(
    change: Callable[[dict[str, Any]], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = trace_of(part(0, [(100, 130)]), part(1, [(120, 134)]))
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(trace))
    assert command.main([str(file)]) == 0
    change(trace)
    file.write_text(json.dumps(trace))
    assert command.main([str(file)]) == 1
    assert "expected a file of pycollective.trace" in capsys.readouterr().err


def test_the_timeline_starts_with_the_first_rank() -> None:
    early = part(1, [(1, 31)])._replace(begin=Reading(0, -50_000, 100), end=Reading(1_000_000, -50_000, 100))
    trace = trace_of(part(0, [(100, 130)]), early)
    assert [event["ts"] for event in trace["traceEvents"] if event.get("cat") == "collective"] == [150.0, 1.0]
    assert [(rank["began_us"], rank["ended_us"]) for rank in trace["otherData"]["ranks"]] == [(50, 1050), (0, 1000)]


def test_devices_of_a_rank_are_in_a_call_at_the_same_time() -> None:
    trace = trace_of(part(0, [(100, 130)]), part(1, [(120, 131)]))
    for event in [event for event in trace["traceEvents"] if event.get("cat") == "collective"]:
        other = {**event, "ts": event["ts"] + 5, "args": {**event["args"], "channel": "channel 1"}}
        trace["traceEvents"].append(other)
    timeline = summary(trace)
    assert timeline.rows[0].calls == 2
    assert timeline.rows[0].total_us == pytest.approx((35 + 16) / 2)
    assert timeline.rows[0].waited_us == pytest.approx(25)
    assert [rank.in_calls_us for rank in timeline.ranks] == [pytest.approx(35), pytest.approx(16)]


def test_differences_within_the_error_of_the_clocks_name_nobody() -> None:
    parts = part(0, [(100, 130)]), part(1, [(120, 131)])
    unsure = [own._replace(begin=own.begin._replace(error=20_000)) for own in parts]
    assert summary(trace_of(*parts)).rows[0].slowest == 1
    trace = trace_of(*unsure)
    assert summary(trace).rows[0].slowest is None
    assert [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"] == ["allreduce"] * 2


def test_the_part_of_a_call_that_waits_for_a_rank_is_shown() -> None:
    trace = trace_of(part(0, [(100, 130)]), part(1, [(120, 131)]))
    waits = [event for event in trace["traceEvents"] if event.get("cat") == "skew"]
    assert [(event["pid"], event["name"], event["ts"], event["dur"]) for event in waits] == [
        (0, "waits for rank 1", 100.0, 20.0)
    ]


@pytest.mark.parametrize(
    ("operation", "root", "expected"),
    [
        ("allreduce", -1, [(20, 2), (10, 2), (0, 2)]),
        ("barrier", -1, [(20, 2), (10, 2), (0, 2)]),
        ("bcast", 1, [(10, 1), (0, 1), (0, 2)]),
        ("reduce", 1, [(0, 0), (10, 2), (0, 2)]),
        ("scan", -1, [(0, 0), (0, 1), (0, 2)]),
        ("ppermute", -1, [(0, 0), (0, 1), (0, 2)]),
    ],
)
def test_for_whom_a_rank_waits(operation: str, root: int, expected: list[tuple[int, int]]) -> None:
    spans = {0: (0, 100), 1: (10, 100), 2: (20, 100)}
    assert [wait_of(operation, rank, root, [0, 1, 2], spans) for rank in range(3)] == expected


def test_bus_bandwidth_has_the_factors_of_nccl_tests() -> None:
    n = 4
    expected = {
        "allreduce": 1.5,
        "allgather": 0.75,
        "reduce_scatter": 0.75,
        "alltoall": 0.75,
        "bcast": 1.0,
        "reduce": 1.0,
    }
    assert {name: FACTORS[name](n) for name in expected} == expected
