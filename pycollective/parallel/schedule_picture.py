"""Pictures of simulated and measured schedules."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pycollective import files
from pycollective.parallel.schedule_simulator import Simulation
from pycollective.parallel.schedules import Kind

_COLOURS = {
    Kind.FORWARD: ("#6baed6", "forward"),
    Kind.BACKWARD: ("#74c476", "backward"),
    Kind.BACKWARD_INPUTS: ("#a1d99b", "backward of inputs"),
    Kind.BACKWARD_WEIGHTS: ("#fdae6b", "backward of weights"),
}


def picture(simulation: Simulation, path: str | Path) -> None:
    """Draws the computations of all ranks over time, into a file.

    Each rank has a row, and each computation a bar with the number of its microbatch. The title has the number of ranks
    p, of microbatches m and of stages of each rank v, and the bubble. Later chunks have paler bars.

    Args:
        simulation: the result of :func:`simulate` or :func:`measured`.
        path: the file to write, in the format that its suffix names, such as ``.svg`` or ``.png``.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> from pycollective.parallel.schedules import one_f_one_b
        >>> from pycollective.parallel.schedule_simulator import simulate
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     picture(simulate(one_f_one_b(4, 8)), f"{folder}/planned.svg")
    """
    files.save_figure(draw(simulation), path)


def draw(simulation: Simulation) -> Figure:
    """Returns the figure that :func:`picture` writes."""
    schedule = simulation.schedule
    figure = Figure(figsize=(12, 1.4 + 0.5 * schedule.stages), layout="constrained")
    axes = figure.subplots()
    used = dict.fromkeys(_COLOURS, False)
    for rank, spans in enumerate(simulation.spans):
        for action, start, end in spans:
            if action.peer is not None:
                continue
            used[action.kind] = True
            paler = 1 - 0.6 * action.chunk / schedule.chunks
            axes.barh(rank, end - start, left=start, color=_COLOURS[action.kind][0], alpha=paler, edgecolor="white")
            if end - start < simulation.total / 100:
                continue  # too narrow for a number
            axes.text((start + end) / 2, rank, str(action.microbatch), ha="center", va="center", fontsize="x-small")
    axes.set_yticks(range(schedule.stages), [f"rank {rank}" for rank in range(schedule.stages)])
    axes.invert_yaxis()
    sizes = f"p = {schedule.stages}, m = {schedule.microbatches}, v = {schedule.chunks}"
    axes.set(xlabel="time", title=f"{schedule.name}: {sizes}; bubble {100 * simulation.bubble:.1f} %")
    legend = [Patch(color=colour, label=label) for kind, (colour, label) in _COLOURS.items() if used[kind]]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(_COLOURS), fontsize="small")
    return figure
