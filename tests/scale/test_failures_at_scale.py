"""Failures of a job of 64 ranks on 8 hosts: what the user reads, and that everything ends.

The promises are those that ``tests/e2e/test_hosts.py`` tests on 2 to 4 ranks. The ranks are processes without JAX.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.scale.jobs import Hosts, Job

pytestmark = pytest.mark.whole

HOSTS, LOCAL = 8, 8


# Of the report. A stopped leader may keep a result from its host that other hosts have, so ranks may wait in two calls.
WAITS = r"^  ranks? ([\d, -]+) ha(?:s|ve) waited in collective \d+ of communicator world, allreduce.* at step\.py:7 "


@dataclass
class Failure:
    """What fails in the job, and what the user reads.

    Attributes:
        begins: lets it fail.
        told: the lines of the report, in their order, as regular expressions.
        silent: the ranks that do not answer. The report says of all others that they wait; None: there is no report.
        ends: repairs what outlasts the job.
    """

    begins: Callable[[Hosts, Job], object]
    told: Sequence[str]
    silent: range | None = None
    ends: Callable[[Hosts], object] = lambda _: None


def of_rank(rank: int, number: signal.Signals) -> Callable[[Hosts, Job], object]:
    return lambda _, job: os.kill(job.ranks()[rank], number)


def killed(rank: int) -> Failure:
    return Failure(
        of_rank(rank, signal.SIGKILL), [rf"^pycollective: rank {rank} of 64 died: process \d+ on host h1 was killed"]
    )


def stopped(rank: int) -> Failure:
    silent = rf"^  rank {rank} does not answer: process \d+ on host h{rank // LOCAL} is stopped\.$"
    look = rf"^  Look at rank {rank}: the others wait for it\.$"
    return Failure(of_rank(rank, signal.SIGSTOP), [silent, look], range(rank, rank + 1))


FAILURES = {
    "a rank is killed": killed(13),
    "a leader is killed": killed(8),
    "a rank is stopped": stopped(13),
    "a leader is stopped": stopped(8),
    "rank 0 is stopped": stopped(0),
    "a link is cut": Failure(
        lambda hosts, _: hosts.set_link(3, "down"),
        [
            r"^  ranks 24-31 cannot be reached: host h3 does not answer\.$",
            "^  Look at ranks 24-31: the others wait for them",
        ],
        range(24, 32),
        lambda hosts: hosts.set_link(3, "up"),
    ),
    # It comes last, since the host does not come back.
    # Here MPICH's launcher ends the job at once, and no rank reports.
    "a host is killed": Failure(lambda hosts, _: os.kill(hosts.first_process_of(7), signal.SIGKILL), []),
}


@pytest.mark.parametrize("size", [(4, 2), (8, 2), (16, 2), (8, 8)])
def test_a_report_takes_a_bounded_number_of_bytes_for_each_connection(
    size: tuple[int, int], hosts: Hosts, tmp_path: Path
) -> None:
    """The rank that reports asks each rank of its host, and one of each other host."""
    last = size[0] * size[1] - 1
    with hosts.job(*size, tmp_path, "calls", "5", "0", str(last)) as job:
        job.wait_until_all_call()
        time.sleep(2)  # now all wait for the last rank, and no rank sends anything
        before = hosts.bytes_on_links()
        # On a busy machine some ranks may not answer in time. They are named as well.
        job.wait_until_says("the others wait for")
        taken = [now - then for then, now in zip(before, hosts.bytes_on_links(), strict=True)]
    sys.stdout.write(f"{size[0]} x {size[1]}: {taken[0]:,} bytes on the link of the rank that reports\n")
    others = size[0] - 1
    assert 0 < taken[0] < 6000 * others, taken
    assert max(taken[1:]) < 12000, taken  # a leader may have told other leaders of its wait before it was asked


@pytest.mark.parametrize("failure", FAILURES)
def test_of_64_ranks(failure: str, hosts: Hosts, tmp_path: Path) -> None:
    """All end, and a text of a few lines says why: the ranges of ranks that wait, and what has failed."""
    expected = FAILURES[failure]
    with hosts.job(HOSTS, LOCAL, tmp_path, "calls", "0", "8", "-1") as job:
        job.wait_until_all_call()
        began = time.monotonic()
        expected.begins(hosts, job)
        try:
            status = job.process.wait(60)
            job.wait_until_gone(30)
        finally:
            expected.ends(hosts)
    text = "\n".join(line for line in job.said.splitlines() if line.startswith(("pycollective", "  ")))
    sys.stdout.write(
        f"{failure}: all have ended after {time.monotonic() - began:.1f} s, {len(text)} characters\n{text}\n"
    )
    assert status not in (0, 124, 137), job.said
    place = 0
    for line in expected.told:
        found = re.compile(line, re.MULTILINE).search(text, place)
        assert found, f"{line}\n{job.said}"
        place = found.end()
    if expected.silent is not None:
        waiting = [rank for part in re.findall(WAITS, text, re.MULTILINE) for rank in ranks_in(part)]
        assert sorted(waiting) == [rank for rank in range(HOSTS * LOCAL) if rank not in expected.silent], job.said
    assert len(text) < 1000, text


def ranks_in(text: str) -> list[int]:
    """The ranks of "0-3, 5"."""
    found = []
    for part in text.split(", "):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
