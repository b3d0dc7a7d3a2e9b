"""The report of a trace as one page, which needs no other file."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pycollective import files
from pycollective.report import plot, tables
from pycollective.report.timeline import Timeline

_STYLE = (
    "body{font:15px/1.5 sans-serif;margin:2em auto;max-width:70em;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}th,td{padding:.2em .8em;border-bottom:1px solid #ccc;text-align:right}"
    "svg{max-width:100%;height:auto}"
)


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
        f"<h1>{html.escape(title)}</h1>\n<p>{html.escape(tables.sentence(timeline))}</p>\n"
        f"{_table(tables.CALLS, tables.of_calls(timeline.rows))}{_table(tables.RANKS, tables.of_ranks(timeline.ranks))}"
        f"{plot.svg(trace, timeline)}\n",
    )


def _table(columns: Sequence[str], cells: tables.Cells) -> str:
    def line(tag: str, texts: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>\n"

    return f"<table>\n{line('th', columns)}{''.join(line('td', own) for own in cells)}</table>\n"
