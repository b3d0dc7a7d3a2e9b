"""A picture of layouts: how the time of a step is spent, and the memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from pycollective import files
from pycollective.planning.by_formulas.layouts import Row

_PARTS = (("computing_s", "computing"), ("communication_s", "sending"), ("bubble_s", "bubble"))


def picture(rows: Sequence[Row], file: Path) -> None:
    """Writes bars for each layout; what was measured are marks beside them."""
    labels = [str(row.layout) for row in rows]
    figure, (times, memory) = plt.subplots(1, 2, figsize=(12, 1.5 + 0.4 * len(rows)), layout="constrained", sharey=True)
    left = [0.0] * len(rows)
    places = range(len(rows))
    for name, label in _PARTS:
        values = [getattr(row.estimate, name) * 1e3 for row in rows]
        times.barh(places, values, left=left, label=label)
        left = [a + b for a, b in zip(left, values, strict=True)]
    _mark(times, [row.measured_s for row in rows], 1e3)
    times.set(xlabel="time of a step (ms)", yticks=places, yticklabels=labels)
    times.invert_yaxis()
    times.legend(fontsize="small")
    memory.barh(places, [row.estimate.memory / 2**20 for row in rows], color="C4")
    _mark(memory, [row.measured_memory for row in rows], 2**-20)
    memory.set(xlabel="memory of a device (MiB)")
    files.save_figure(figure, file)
    plt.close(figure)


def _mark(axes: Axes, measured: Sequence[float | None], scale: float) -> None:
    """Marks what was measured on the bars."""
    ran = [(value * scale, place) for place, value in enumerate(measured) if value is not None]
    if ran:
        axes.plot(*zip(*ran, strict=True), "k|", markersize=14, label="measured")
