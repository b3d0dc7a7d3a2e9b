"""The report of a trace as one page with plots, which needs no other file."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from pycollective import files
from pycollective.report import tables
from pycollective.report.timeline import Timeline

_STYLE = (
    "body{font:15px/1.5 sans-serif;margin:2em auto;max-width:70em;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}th,td{padding:.2em .8em;border-bottom:1px solid #ccc;text-align:right}"
    "svg{max-width:100%;height:auto}"
)

_MAX_BARS = 12

_MAX_POINTS = 1000
"""More calls of one operation become a picture of pixels, which is smaller."""


def write(trace: Mapping[str, Any], timeline: Timeline, title: str, file: Path) -> None:
    """Writes the page.

    Args:
        trace: the contents of the file of the trace.
        timeline: its summary.
        title: of the page.
        file: where to write.
    """
    files.write(
        file,
        f"<!doctype html>\n<meta charset=utf-8>\n<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n"
        f"<h1>{html.escape(title)}</h1>\n<p>{html.escape(tables.summarize(timeline))}</p>\n"
        f"{_table(tables.CALLS, tables.call_cells(timeline.rows))}"
        f"{_table(tables.RANKS, tables.rank_cells(timeline.ranks))}"
        f"{_svg(trace, timeline)}\n",
    )


def _table(columns: Sequence[str], cells: tables.Cells) -> str:
    def line(tag: str, texts: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>\n"

    return f"<table>\n{line('th', columns)}{''.join(line('td', own) for own in cells)}</table>\n"


def _svg(trace: Mapping[str, Any], timeline: Timeline) -> str:
    """The plots of a trace: where the time goes, who comes late, and how the time of a call changes."""
    rows = timeline.rows[:_MAX_BARS][::-1]
    figure, (shares, ranks, calls) = plt.subplots(3, 1, figsize=(10, 11), layout="constrained")
    labels = [f"{row.op}, {row.nbytes} B" for row in rows]
    shares.barh(labels, [row.share * 100 for row in rows])
    shares.set(xlabel="share of the traced time (%)", title="Operations")

    names = [f"rank {rank.rank}" for rank in timeline.ranks]
    own = [(rank.in_calls_us - rank.waited_us) / 1e3 for rank in timeline.ranks]
    waits = [rank.waited_us / 1e3 for rank in timeline.ranks]
    ranks.barh(names, own, label="in calls, all ranks there")
    ranks.barh(names, waits, left=own, label="in calls, waiting for later ranks")
    ranks.invert_yaxis()
    ranks.set(xlabel="time (ms)", title="Ranks")
    ranks.legend(fontsize="small")

    events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] != "skew"]
    for op in dict.fromkeys(row.op for row in timeline.rows):
        chosen = [event for event in events if event["name"] == op]
        times, durations = [event["ts"] / 1e6 for event in chosen], [event["dur"] for event in chosen]
        calls.plot(times, durations, ".", markersize=3, label=op, rasterized=len(chosen) > _MAX_POINTS)
    calls.set(yscale="log", xlabel="time since the trace began (s)", ylabel="time of a call (us)", title="Calls")
    if events:
        calls.legend(fontsize="small")
    for axes in (shares, ranks, calls):
        axes.grid(alpha=0.3)
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    plt.close(figure)
    text = picture.getvalue()
    return text[text.index("<svg") :]
