"""The table of ``pycollective plan``."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from pycollective.planning.by_formulas.layouts import Row


def table(rows: Sequence[Row]) -> Table:
    """Layouts with what they are predicted to take, beside what they took where they were run."""
    shown = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    shown.add_column("layout")
    verified = any(row.measured_s is not None for row in rows)
    measured = ("measured\nms", "measured\nMiB") if verified else ()
    for name in ("step\nms", "computing\nms", "sending\nms", "bubble\nms", "memory\nMiB", *measured):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        estimate = row.estimate
        numbers = (estimate.seconds, estimate.computing_s, estimate.communication_s, estimate.bubble_s)
        cells = [str(row.layout), *(f"{seconds * 1e3:.2f}" for seconds in numbers), f"{estimate.memory / 2**20:.1f}"]
        if verified:
            unknown = "failed" if row.failure else "-"
            cells.append(unknown if row.measured_s is None else f"{row.measured_s * 1e3:.2f}")
            cells.append("-" if row.measured_memory is None else f"{row.measured_memory / 2**20:.1f}")
        shown.add_row(*cells)
    return shown
