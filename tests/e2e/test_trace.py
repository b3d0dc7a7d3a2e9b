"""``pycollective.trace`` and ``pycollective report`` on jobs of two ranks."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import launch
from tests.e2e.launch import limited, mpirun

SHORT = 120  # seconds; none of these should take a tenth of it on an idle machine

BEGIN = """
import sys, time
import jax, jax.numpy as jnp
import pycollective as pc
from pycollective.timeline import clocks
from pycollective.transport import watch

file = sys.argv[1]
world = pc.init()
rank = world.rank
x = jnp.ones((2, 3))


@pc.jit
def step(x):
    return pc.psum(x, world) / world.size


step(x).block_until_ready()
"""


def trace_of(tmp_path: Path, program: str, *, ranks: int = 2) -> tuple[dict[str, Any], str]:
    """The trace that a program writes, and what the ranks write to stderr."""
    source, file = tmp_path / "program.py", tmp_path / "out.json"
    source.write_text(BEGIN + program)
    done = mpirun(ranks, str(source), str(file), timeout=SHORT)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir() if path != source] == ["out.json"]
    return json.loads(file.read_text()), done.stderr


def calls_in(trace: dict[str, Any], rank: int, name: str = "allreduce") -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if (event["pid"], event["name"]) == (rank, name)]


@pytest.mark.library
def test_no_call_is_lost_and_the_format_is_valid(tmp_path: Path) -> None:
    trace, told = trace_of(
        tmp_path,
        """
with pc.trace(file):
    for _ in range(3000):  # the recorder's ring has 2048
        x = step(x)
    y = pc.sendrecv(x, world, dest=1 - rank, source=1 - rank)
    half = world.split(0)
pc.psum(x, world).block_until_ready()  # it is not in the trace
""",
    )
    assert "not in the trace" not in told
    assert {rank["rank"]: rank["calls"] for rank in trace["otherData"]["ranks"]} == {0: 3002, 1: 3002}
    for rank in (0, 1):
        own = calls_in(trace, rank)
        assert [event["args"]["seq"] for event in own] == list(range(2, 3002))
        args = own[0]["args"]
        assert args["description"] == "allreduce(float32[2,3], op=sum)"
        assert (args["communicator"], args["nbytes"], args["state"]) == ("world", 24, "completed")
        assert re.fullmatch(r"program\.py:16 \(step\)", args["source"])
        assert [event["cat"] for event in calls_in(trace, rank, "sendrecv")] == ["message"]
        assert [event["cat"] for event in calls_in(trace, rank, "split")] == ["wait"]
    check_format(trace)
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert [name.partition(",")[0] for name in (names[0], names[1])] == ["rank 0 of 2", "rank 1 of 2"]


def check_format(trace: dict[str, Any]) -> None:
    """The rules of the trace-event format for the two kinds of events that there are."""
    ends: dict[tuple[int, int], list[float]] = defaultdict(list)
    threads = set()
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert all(type(event[key]) is int for key in ("pid", "tid"))
        if event["ph"] == "M":
            wanted = "sort_index" if event["name"].endswith("sort_index") else "name"
            assert list(event["args"]) == [wanted]
            threads |= {(event["pid"], event["tid"])} if event["name"] == "thread_name" else set()
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for event in sorted(complete, key=lambda event: (event["ts"], -event["dur"])):
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        place = event["pid"], event["tid"]
        assert place in threads
        while ends[place] and ends[place][-1] <= event["ts"]:
            ends[place].pop()
        # An event of a thread lies inside another one, or beside it. A picosecond is for the floats.
        assert not ends[place] or event["ts"] + event["dur"] <= ends[place][-1] + 1e-6
        ends[place].append(event["ts"] + event["dur"])


def test_the_slowest_rank_is_named(tmp_path: Path) -> None:
    trace_of(
        tmp_path,
        """
with pc.trace(file):
    for _ in range(20):
        if rank == 1:
            time.sleep(0.05)
        x = step(x).block_until_ready()
""",
    )
    page = tmp_path / "out.html"
    done = report(str(tmp_path / "out.json"), "--html", str(page))
    assert done.returncode == 0, done.stderr
    found = re.search(r"allreduce +24 +2 +20 .* rank 1, last in (\d+) +([\d.]+) (m?)s", done.stdout)
    assert found, done.stdout
    assert int(found[1]) > 15
    assert 0.5 < float(found[2]) / (1000 if found[3] else 1) < 10  # 20 times 50 ms, and what the machine adds
    assert "The others waited longest for rank 1" in done.stdout
    written = page.read_text()
    assert "<svg" in written
    assert "rank 1, last in" in written
    assert not re.search(r'(src|href)="(?!#)', written), "the page needs another file"


def report(*arguments: str) -> Any:
    return limited([sys.executable, "-m", "pycollective", "report", *arguments], SHORT)


@pytest.mark.parametrize(("ranks", "odd"), [(2, 1), (4, 2)])
def test_clocks_of_other_hosts(ranks: int, odd: int, tmp_path: Path) -> None:
    """Of four ranks the last compares its clock with the odd rank's, and the odd rank its own with rank 0's."""
    trace, _ = trace_of(
        tmp_path,
        f"""
import numpy as np

clocks._FAN_OUT = 2
if rank == {odd}:  # its clock is 1000 s ahead, and gains 1 %
    started = time.monotonic_ns()
    wrong = lambda ns: ns + 1_000_000_000_000 + (ns - started) // 100
    clocks.now_ns = lambda: wrong(time.monotonic_ns())
    stop_trace, words = watch.stop_trace, watch.record_words()
    times = [words.index(name) for name in ("created", "started", "completed")]

    def stopped():
        records, dropped = stop_trace()
        table = np.frombuffer(records, np.int64).reshape(-1, len(words)).copy()
        table[:, times] = wrong(table[:, times])
        return table.tobytes(), dropped

    watch.stop_trace = stopped
with pc.trace(file):
    for _ in range(50):
        time.sleep(0.02)
        x = step(x).block_until_ready()
""",
        ranks=ranks,
    )
    of_ranks = trace["otherData"]["ranks"]
    for rank in range(1, ranks):
        error_us = of_ranks[0]["clock_error_us"] + of_ranks[rank]["clock_error_us"]
        assert abs(of_ranks[rank]["clock_offset_us"] + (1e9 if rank == odd else 0)) < 1e8
        assert len(calls_in(trace, 0)) == len(calls_in(trace, rank)) == 50
        for here, there in zip(calls_in(trace, 0), calls_in(trace, rank), strict=True):
            # A sum ends on no rank before the other has come.
            assert here["ts"] <= there["ts"] + there["dur"] + error_us
            assert there["ts"] <= here["ts"] + here["dur"] + error_us


def test_calls_beyond_the_limit_are_counted(tmp_path: Path) -> None:
    trace, told = trace_of(
        tmp_path,
        """
with pc.trace(file, most_calls=10):
    for _ in range(25):
        x = step(x)
""",
    )
    assert [len(calls_in(trace, rank)) for rank in (0, 1)] == [10, 10]
    for rank in (0, 1):
        line = (
            f"pycollective.trace: expected at most 10 calls of a rank, got 15 more on rank {rank}. They are not in the"
        )
        assert told.count(line) == 1, told
    assert re.search(r"program\.py:\d+: RuntimeWarning: pycollective\.trace: ", told), told


@pytest.mark.library
@pytest.mark.parametrize("raises", [0, pytest.param(1, marks=pytest.mark.whole), 2])
def test_a_rank_that_raises_keeps_nobody_waiting(raises: int, tmp_path: Path) -> None:
    source, file = tmp_path / "program.py", tmp_path / "out.json"
    source.write_text(
        BEGIN
        + """
try:
    with pc.trace(file):
        x = step(x)
        if rank == int(sys.argv[2]):
            raise ValueError("no luck")
except ValueError as error:
    print("caught", error, flush=True)
print(float(step(x)[0, 0]), flush=True)
with pc.trace(file + ".next"):  # the messages of the first trace do not reach it
    x = step(x)
"""
    )
    done = mpirun(3, str(source), str(file), str(raises), timeout=SHORT)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(["caught", "no", "luck", "1.0", "1.0", "1.0"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json.next", "program.py"]
    told = (
        f"expected all ranks to leave the trace, got rank {raises} raised ValueError: no luck. {file} is not written."
    )
    assert done.stderr.count(told) == (raises != 0), done.stderr


def test_a_rank_that_raises_ends_the_job(tmp_path: Path) -> None:
    source, file = tmp_path / "program.py", tmp_path / "out.json"
    source.write_text(BEGIN + 'with pc.trace(file):\n    if rank == 1:\n        raise ValueError("no luck")\n')
    done = mpirun(2, str(source), str(file), timeout=SHORT)
    assert done.returncode not in (0, 124, 137), done.stderr
    assert done.stderr.count("ValueError: no luck") >= 1, done.stderr
    assert not file.exists()
    launch.wait_until_gone(str(source))


@pytest.mark.whole
def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    source = tmp_path / "program.py"
    source.write_text(BEGIN + "with pc.trace(file):\n    pass\n")
    done = mpirun(2, str(source), str(tmp_path / "none" / "out.json"), timeout=SHORT)
    assert done.returncode not in (0, 124, 137)
    assert "pycollective.trace: expected a folder that exists, and one trace at a time, got " in done.stderr


MISMATCH = """
for _ in range(5):
    x = step(x)
x.block_until_ready()
if sys.argv[1] == "type":
    y = pc.psum(x, world) if rank == 0 else pc.all_gather(x, world)
elif sys.argv[1] == "dtype":
    y = pc.psum(x if rank == 0 else x.astype(jnp.int32), world)
elif sys.argv[1] == "size":
    y = pc.psum(x if rank == 0 else x[:, :2], world)
elif rank == 0:
    y = step(x)
else:
    time.sleep(300)
y.block_until_ready()
"""


@pytest.mark.parametrize(
    ("fault", "verdict", "sides"),
    [
        ("type", "COLLECTIVE_TYPE_MISMATCH", ["rank 0 .*allreduce", "rank 1 .*allgather"]),
        pytest.param(
            "dtype",
            "COLLECTIVE_DTYPE_MISMATCH",
            [r"rank 0 .*allreduce\(float32", r"rank 1 .*allreduce\(int32"],
            marks=pytest.mark.whole,
        ),
        pytest.param(
            "size", "SIZE_OR_SYNTAX_MISMATCH", [r"rank 0 .*\[2,3\]", r"rank 1 .*\[2,2\]"], marks=pytest.mark.whole
        ),
        ("missing", "COLLECTIVE_STATE_MISMATCH", ["rank 0 .*program.py:16", "rank 1 .*has not made the call"]),
    ],
)
def test_verdicts_on_the_records_of_a_failed_job(fault: str, verdict: str, sides: list[str], tmp_path: Path) -> None:
    source, records = tmp_path / "program.py", tmp_path / "records"
    source.write_text(BEGIN + MISMATCH)
    env = {"PYCOLLECTIVE_RECORDS": str(records), "PYCOLLECTIVE_TIMEOUT": "5"}
    assert mpirun(2, str(source), fault, timeout=SHORT, env=env).returncode not in (0, 124, 137)
    done = report(str(records))
    assert done.returncode == 0, done.stderr
    assert re.search(rf"world +7 +{verdict}", done.stdout), done.stdout
    for side in sides:
        assert re.search(side, done.stdout), f"{side}\n{done.stdout}"
    assert "6 FULLY_MATCHED" in done.stdout
    assert "look at rank 1." in done.stdout
    (records / "rank-1.json").unlink()
    done = report(str(records))
    assert "No records of rank 1 of 2" in done.stdout
    assert "7 UNDECIDED" in done.stdout
    assert re.search(r"world +7 +UNDECIDED +rank 0 .*\n +rank 1 +has no file", done.stdout), done.stdout
    assert not re.search(r"world +[1-6] +UNDECIDED", done.stdout), done.stdout
    assert "which has no file: look at rank 1." in done.stdout
