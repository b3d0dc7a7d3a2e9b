"""Draws the table: median time and bus bandwidth over size, with a curve for each implementation."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from pycollective import files
from pycollective.bench.report import COLUMNS, UNITS, Row

_QUANTITIES = (("median_us", "median time of a call (us)"), ("busbw", "bus bandwidth (GB/s)"))


def plot(rows: Sequence[Row], title: str, file: Path) -> None:
    """Writes a picture to ``file``; an ``.html`` file holds the table too."""
    kinds = sorted({(row.op, row.mode, row.type) for row in rows})
    colours = {
        implementation: f"C{i}" for i, implementation in enumerate(dict.fromkeys(row.implementation for row in rows))
    }
    figure, panels = plt.subplots(len(kinds), 2, figsize=(12, 4.2 * len(kinds)), squeeze=False, layout="constrained")
    for kind, pair in zip(kinds, panels, strict=True):
        chosen = [row for row in rows if (row.op, row.mode, row.type) == kind]
        for axes, (name, label) in zip(pair, _QUANTITIES, strict=True):
            for implementation in dict.fromkeys(row.implementation for row in chosen):
                own = [row for row in chosen if row.implementation == implementation]
                sizes, values = [row.size for row in own], [getattr(row, name) for row in own]
                axes.plot(sizes, values, marker="o", label=implementation, color=colours[implementation])
            axes.set(xscale="log", yscale="log", xlabel="size (B)", ylabel=label, title=", ".join(kind))
            axes.grid(alpha=0.3)
        pair[0].legend(fontsize="small")
    figure.suptitle(title)
    if file.suffix == ".html":
        picture = io.StringIO()
        figure.savefig(picture, format="svg")
        table = "\n".join([COLUMNS, UNITS, *(row.line() for row in rows)])
        svg = picture.getvalue()
        files.write(
            file,
            f"<!doctype html><meta charset=utf-8><title>{title}</title>{svg[svg.index('<svg') :]}<pre>{table}</pre>\n",
        )
    else:
        files.save_figure(figure, file)
    plt.close(figure)
