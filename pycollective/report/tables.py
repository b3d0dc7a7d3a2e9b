"""Tables of the report, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from pycollective.report.timeline import Rank, Row, Timeline
from pycollective.report.verdicts import Verdict

Cells = list[list[str]]

CALLS = (
    "operation",
    "bytes",
    "ranks",
    "calls",
    "all bytes",
    "time",
    "median",
    "busbw",
    "share",
    "slowest",
    "waited for it",
)
"""The columns of the table of calls."""

RANKS = ("rank", "host", "traced", "in calls", "waiting", "others waited for it")
"""The columns of the table of ranks; the last one is the sum of the other ranks' waits."""

VERDICTS = ("communicator", "number", "verdict", "who", "call", "line", "state")
"""The columns of the table of verdicts."""

_LEFT_ALIGNED = {"operation", "slowest", "host", "communicator", "verdict", "who", "call", "line", "state"}


def call_cells(rows: Sequence[Row]) -> Cells:
    """The cells of the table of calls."""
    return [
        [
            row.op,
            str(row.nbytes),
            str(row.ranks),
            str(row.calls),
            amount(row.total_bytes),
            duration(row.total_us),
            duration(row.median_us),
            "-" if row.busbw is None else f"{three_digits(row.busbw)} GB/s",
            f"{row.share:.1%}",
            "-" if row.slowest is None else f"rank {row.slowest}, last in {row.last_in}",
            "-" if row.slowest is None else duration(row.waited_us),
        ]
        for row in rows
    ]


def rank_cells(ranks: Sequence[Rank]) -> Cells:
    """The cells of the table of ranks."""
    times = [(rank.traced_us, rank.in_calls_us, rank.waited_us, rank.waited_for_us) for rank in ranks]
    return [[str(rank.rank), rank.host, *map(duration, own)] for rank, own in zip(ranks, times, strict=True)]


def verdict_cells(verdicts: Sequence[Verdict]) -> Cells:
    """The cells of the table of verdicts: a line for each call that ranks made, and one for those that made none."""
    cells = []
    for verdict in verdicts:
        place = [verdict.communicator, str(verdict.seq), verdict.name]
        for side in verdict.sides:
            cells.append([*place, side.who, side.call, side.line, side.state])
            place = ["", "", ""]
    return cells


def table(columns: Sequence[str], cells: Cells) -> Table:
    """A table for a terminal."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="left" if column in _LEFT_ALIGNED else "right", overflow="fold")
    for line in cells:
        made.add_row(*map(Text, line))  # names of the user's may look like rich's markup
    return made


def summarize(timeline: Timeline) -> str:
    """One sentence on a trace, and one on what is not in it."""
    ranks = timeline.ranks
    traced = sum(rank.traced_us for rank in ranks)
    shares = [
        sum(times) / traced if traced else 0
        for times in zip(*((r.in_calls_us, r.waited_us) for r in ranks), strict=True)
    ]
    text = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} traced for {duration(traced / len(ranks))}: "
    text += f"{shares[0]:.0%} of the time in calls, {shares[1]:.0%} waiting for later ranks."
    worst = max(ranks, key=lambda rank: rank.waited_for_us)
    if worst.waited_for_us > 0:
        text += f" The others waited longest for rank {worst.rank}: {duration(worst.waited_for_us)} in sum."
    dropped = [f"{rank.dropped} of rank {rank.rank}" for rank in ranks if rank.dropped]
    if dropped:
        text += f" Calls that the trace did not keep: {', '.join(dropped)}."
    return text


def duration(us: float) -> str:
    """A time in a unit that fits.

    Example:
        >>> duration(3.21), duration(4321.0), duration(999_600.0), duration(7654321.0), duration(2e9)
        ('3.2 us', '4.32 ms', '1 s', '7.65 s', '2000 s')
    """
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        # 999.5 ms and more are written as 1 s: three digits of them are 1000 ms.
        if us >= 0.9995 * size:
            return f"{three_digits(us / size)} {unit}"
    return f"{us:.1f} us"


def amount(nbytes: int) -> str:
    """A number of bytes.

    Example:
        >>> amount(512), amount(3 << 20), amount(1_040_000)
        ('512 B', '3 MiB', '1016 KiB')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{three_digits(nbytes / size)} {unit}"
    return f"{nbytes} B"


def three_digits(value: float) -> str:
    """A number with three digits, or with all digits of a larger whole number: never with an exponent for its size."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
