"""Draws a trace: where the time goes, who comes late, and how the time of a call changes."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt

from pycollective.report.timeline import Timeline

_MOST_BARS = 12

_MOST_POINTS = 1000
"""More calls of one operation become a picture of pixels, which is smaller."""


def svg(trace: Mapping[str, Any], timeline: Timeline) -> str:
    """The picture as an element of a page.

    Args:
        trace: the contents of the file.
        timeline: its summary.
    """
    rows = timeline.rows[:_MOST_BARS][::-1]
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
        calls.plot(times, durations, ".", markersize=3, label=op, rasterized=len(chosen) > _MOST_POINTS)
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
