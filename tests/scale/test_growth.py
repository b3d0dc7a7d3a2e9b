"""What a call, a meeting and a start cost on many hosts: laws of growth, by counts alone.

The ranks are processes without JAX (``rank.py``), L on each of H hosts. They run the compiled library, its handlers,
its monitor and the messages outside of programs.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scale.jobs import CALLS, LARGE, Hosts

pytestmark = pytest.mark.whole

SIZES = [(4, 2), (8, 2), (16, 2), (4, 8)]
"""H and L. The first three have the same L, the first and the last one the same H."""

Counted = dict[tuple[int, int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def counted(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """What the ranks of each size have counted."""
    found = {size: hosts.count(*size, tmp_path_factory.mktemp("job")) for size in SIZES}
    sys.stdout.write(table_of(found))
    return found


def table_of(counted: Counted) -> str:
    """The table of docs/performance.md."""
    lines = {
        "messages of the first rank of a host for a comparison": lambda ranks: most(
            ranks, "first comparison", "messages"
        ),
        "bytes on the link of a host for a comparison": lambda ranks: most(ranks, "comparisons", "link_bytes") / CALLS,
        "comparisons of 8 calls of a section, first run": lambda ranks: most(
            ranks, "first run of a section", "comparisons"
        ),
        "the same, later run": lambda ranks: most(ranks, "later run of it", "comparisons"),
        "bytes on the link for a sum of 128 KiB": lambda ranks: most(ranks, "large sum", "link_bytes"),
        "messages of all ranks for a meeting outside programs": lambda ranks: sum(
            rank["first meeting"]["out_of_band"] for rank in ranks
        ),
        "memory that the ranks of a host share, as far as they touch it": lambda ranks: most(
            ranks, "in all", "board_bytes"
        ),
        "of it the buffers of sums of 80 and 128 KiB": lambda ranks: sum(
            most(ranks, phase, "board_bytes") for phase in ("first run of a section", "first large sum")
        ),
        "descriptors that the package opens": lambda ranks: most(ranks, "in all", "descriptors"),
    }
    sizes = " | ".join(f"{hosts} x {local}" for hosts, local in counted)
    rows = [
        f"| {name} | {' | '.join(f'{value(ranks):,.0f}' for ranks in counted.values())} |"
        for name, value in lines.items()
    ]
    return "\n".join([f"\n| what | {sizes} |", "|---" * (1 + len(counted)) + "|", *rows, ""])


def most(ranks: list[dict[str, Any]], phase: str, what: str) -> float:
    """The greatest count of a rank in a phase; of bytes on a link those that the barriers around it do not take."""
    greatest = max(rank[phase][what] for rank in ranks)
    if what == "link_bytes":
        greatest -= min(rank["nothing"][what] for rank in ranks)
    return greatest


@pytest.mark.parametrize(("phase", "times"), [("first comparison", 1), ("comparisons", CALLS)])
def test_a_comparison_takes_log2_of_hosts_messages_of_each_leader(counted: Counted, phase: str, times: int) -> None:
    for (hosts, _), ranks in counted.items():
        for rank in ranks:
            assert rank[phase]["comparisons"] == times
            assert rank[phase]["messages"] == (times * math.log2(hosts) if rank["is_first_of_host"] else 0)
            assert rank[phase]["collectives"] == 0  # the operand has come with the comparison


def test_the_bytes_of_a_comparison_grow_with_log2_of_hosts_and_not_with_their_ranks(counted: Counted) -> None:
    of_round = {
        (hosts, local): most(ranks, "comparisons", "link_bytes") / CALLS / math.log2(hosts)
        for (hosts, local), ranks in counted.items()
    }
    # A block of 56 bytes goes each way, with the headers and acknowledgements of TCP and of MPI.
    assert all(2 * 56 < nbytes < 400 for nbytes in of_round.values()), of_round


def test_a_later_run_of_a_program_is_compared_once(counted: Counted) -> None:
    for (hosts, _), ranks in counted.items():
        for rank in ranks:
            for phase, compared in (("first run of a section", CALLS), ("later run of it", 1)):
                assert rank[phase]["comparisons"] == compared
                assert rank[phase]["messages"] == (compared * math.log2(hosts) if rank["is_first_of_host"] else 0)
                assert rank[phase]["collectives"] == CALLS


def test_a_host_sends_of_a_large_sum_what_its_ranks_have_in_common(counted: Counted) -> None:
    for phase in ("first large sum", "large sum"):
        nbytes = {size: most(ranks, phase, "link_bytes") / (4 * LARGE) for size, ranks in counted.items()}
        # Between hosts a reduce_scatter and an allgather: each sends and receives less than the array.
        assert all(2 < times < 4.4 for times in nbytes.values()), nbytes


def test_a_meeting_goes_along_the_edges_of_a_tree(counted: Counted) -> None:
    for ranks in counted.values():
        for phase, meetings in (("first meeting", 1), ("meetings", CALLS)):
            sent = [rank[phase]["out_of_band"] for rank in ranks]
            assert sum(sent) == 2 * (len(ranks) - 1) * meetings
            assert max(sent) <= math.log2(len(ranks)) * meetings
            assert most(ranks, phase, "link_bytes") < 400 * math.log2(len(ranks)) * meetings + 2000


def test_a_rank_opens_no_more_descriptors_for_more_ranks(counted: Counted) -> None:
    opened = {size: {rank["in all"]["descriptors"] for rank in ranks} for size, ranks in counted.items()}
    assert max(map(max, opened.values())) <= 10, opened
    assert len({max(numbers) for numbers in opened.values()}) == 1, opened


def test_a_host_touches_memory_for_its_own_ranks_alone(counted: Counted) -> None:
    touched = {size: most(ranks, "in all", "board_bytes") for size, ranks in counted.items()}
    assert touched[4, 2] == touched[8, 2] == touched[16, 2] > 0, touched
    assert touched[4, 8] <= 4 * touched[4, 2], touched


def test_many_ranks_of_one_host_compare_in_its_memory(hosts: Hosts, tmp_path: Path) -> None:
    for rank in hosts.count(1, 40, tmp_path):
        for phase in ("first comparison", "comparisons", "first run of a section", "later run of it"):
            times = CALLS if phase in ("comparisons", "first run of a section") else 1
            assert rank[phase]["comparisons"] == times
            assert rank[phase]["messages"] == rank[phase]["collectives"] == 0
