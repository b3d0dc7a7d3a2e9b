"""``pycollective plan`` for a program that is written with ``pycollective.parallel``: it ranks the program's layouts.

The program says what it trains: it has a function ``network`` that takes the words of its command line and returns a
:class:`~pycollective.planning.Network`. It has the options of ``examples/train_gpt.py`` for a layout, and for
``--verify`` also ``--steps`` and ``--step-times``, a file for what the steps take
(:class:`~pycollective.planning.StepRecord`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pycollective import files
from pycollective.errors import message
from pycollective.launch.arguments import not_negative
from pycollective.planning.by_formulas.layouts import Estimator, Layout, Row, layouts
from pycollective.planning.by_formulas.network import Network
from pycollective.planning.by_formulas.step_record import WATCHED_STEPS, Steps
from pycollective.planning.profile import Profile

_WHERE = "plan"


def run(options: argparse.Namespace) -> int:
    """Prints the ranking of a program's layouts. Returns the exit status.

    Raises:
        ValueError: there is no plan, or the program says nothing of its network.
        OSError: a file cannot be read or written.
    """
    picture = _picture() if options.plot else None  # what is missing is said before the work
    profile = Profile.load(options.profile)
    network = _network_of(options.program, options.arguments)
    devices = profile.check_devices(options.devices)
    limit = profile.memory if options.memory is None else int(options.memory * 2**30)
    estimator = Estimator(network, profile, options.dtype)
    every = [one for one in layouts(network, devices) if all(getattr(one, s.name) == s.value for s in options.only)]
    if not every:
        only = "".join(f", with {setting.text}" for setting in options.only)
        remedy = "Use other numbers of devices, heads, positions and examples, or other words after --only."
        raise ValueError(message(_WHERE, f"a layout on {devices} devices{only}", "none", remedy))
    bar = Console(stderr=True)
    rows = [
        Row(layout, estimator.estimate(layout))
        for layout in track(every, "estimating", console=bar, transient=True, disable=not bar.is_terminal)
    ]
    fitting = sorted((row for row in rows if row.needed <= limit), key=lambda row: row.estimate.seconds)
    if not fitting:
        expected, got = f"a layout on {devices} devices of {limit:,} B", min(row.needed for row in rows)
        remedy = "Use more devices, a smaller batch or other numbers."
        raise ValueError(message(_WHERE, expected, f"up to {got:,} B for the smallest", remedy))
    chosen = fitting[: max(options.top, options.verify or 0)]

    def save(ranking: Sequence[Row]) -> None:
        if options.json:
            about = {"profile": profile.source, "devices": devices, "memory": limit}
            text = json.dumps({**about, "rows": [row.as_dict() for row in ranking]}, indent=1)
            files.write(options.json, text + "\n")

    status = 0
    if options.verify:
        try:
            for ranking in _verified(chosen, options, devices // profile.devices, limit):
                chosen = ranking
                save(chosen)  # a job may end before all have run
        except KeyboardInterrupt:
            ran = sum(row.measured_s is not None for row in chosen)
            sys.stderr.write(f"interrupted: {ran} of {min(options.verify, len(chosen))} layouts have run\n")
            status = 128 + signal.SIGINT
    console = Console()
    console.print(profile.source, markup=False, highlight=False, soft_wrap=True)
    for note in profile.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(rows)} layouts on {devices} devices, {len(fitting)} fit into {limit / 2**30:.3g} GiB")
    console.print(_table(chosen))
    words = shlex.join([options.program.name, *options.arguments, *chosen[0].arguments()])
    console.print(f"best: {words}", markup=False, highlight=False, soft_wrap=True)
    save(chosen)
    if picture:
        picture(chosen, options.plot)
    return status


def _table(rows: Sequence[Row]) -> Table:
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


def _picture() -> Callable[[Sequence[Row], Path], None]:
    try:
        module = importlib.import_module("pycollective.planning.by_formulas.picture")
    except ImportError as error:
        raise ValueError(
            message(_WHERE, "matplotlib, which draws --plot", str(error), "pip install matplotlib")
        ) from None
    return cast(Callable[[Sequence[Row], Path], None], module.picture)


class Setting(NamedTuple):
    """A field of a layout with its value, and the text that says so, as in "stage=1"."""

    text: str
    name: str
    value: Any


def setting(text: str) -> Setting:
    """Reads an argument of ``--only``."""
    name, _, value = text.partition("=")
    if name not in Layout._fields or not value:
        names = ", ".join(Layout._fields)
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE with a name of {names}, got {text}")
    default = Layout._field_defaults.get(name, 1)
    if isinstance(default, bool):
        if value not in ("yes", "no"):
            raise argparse.ArgumentTypeError(f"expected {name}=yes or {name}=no, got {text}")
        return Setting(text, name, value == "yes")
    if isinstance(default, str):
        return Setting(text, name, "" if value == "none" else value)
    return Setting(text, name, not_negative(value))


def _network_of(program: Path, arguments: list[str]) -> Network:
    """What the program trains. It is imported as a module, not run."""
    if not program.is_file():
        raise ValueError(message(_WHERE, "a program", f"no file {program}", "Say where it is."))
    sys.path.insert(0, str(program.resolve().parent))
    try:
        found: dict[str, Any] = runpy.run_path(str(program), run_name="pycollective_plan")
    except ImportError as error:
        expected = f"a program whose imports are there, {program}"
        raise ValueError(message(_WHERE, expected, str(error), "Install what it needs.")) from error
    if "network" not in found:
        remedy = "See examples/train_gpt.py and docs/plan.md."
        raise ValueError(message(_WHERE, f"a function `network` in {program}", "none", remedy))
    network = found["network"](arguments)
    if not isinstance(network, Network):
        got = f"{type(network).__name__}"
        raise ValueError(message(_WHERE, "a Network from the program's `network`", got, "See docs/plan.md."))
    return network


def _verified(rows: Sequence[Row], options: argparse.Namespace, ranks: int, limit: int) -> Iterator[list[Row]]:
    """Runs the program in the K best layouts. Yields the rows after each run.

    First are those that ran within the limit of memory, by their times, and last those that failed or needed more. In
    the end it raises ValueError if all of them did.
    """
    good: list[Row] = []
    bad: list[Row] = []
    bar = Console(stderr=True)
    best = rows[: options.verify]
    for row in track(best, "running", console=bar, transient=True, disable=not bar.is_terminal):
        ran = _with_measured(row, options, ranks)
        if ran.failure:
            bar.print(_failed(ran), markup=False, highlight=False, soft_wrap=True)
        (bad if ran.failure or ran.needed > limit else good).append(ran)
        good.sort(key=lambda row: row.measured_s or 0.0)
        yield [*good, *rows[len(good) + len(bad) :], *bad]
    if good:
        return
    ended = [row.needed for row in bad if not row.failure]
    if not ended:
        raise ValueError(_failed(bad[0]))
    expected = f"a run that needs no more than {limit:,} B"
    remedy = "Verify more layouts with --verify, or use more devices or a smaller batch."
    raise ValueError(message(_WHERE, expected, f"{min(ended):,} B for the smallest", remedy))


def _failed(row: Row) -> str:
    return message(_WHERE, "a run that ends well", row.failure, "Start it yourself to see more.")


def _with_measured(row: Row, options: argparse.Namespace, ranks: int) -> Row:
    """Runs the program in a layout. The median time of a step counts, without the first steps."""
    default = [sys.executable, "-m", "pycollective", "run", "-n", str(ranks), "--oversubscribe"]
    launch = shlex.split(options.launch) if options.launch else default
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times.json"
        more = [*row.arguments(), "--steps", str(options.steps), "--step-times", str(times)]
        command = [*launch, sys.executable, str(options.program), *options.arguments, *more]
        none, pipe = subprocess.DEVNULL, subprocess.PIPE
        with subprocess.Popen(command, stdin=none, stdout=none, stderr=pipe, text=True) as process:
            try:
                _, told = process.communicate()
            except KeyboardInterrupt:
                process.terminate()  # a launcher that is killed could not end its ranks
                process.communicate()
                raise
        if process.returncode != 0 or not times.exists():
            failure = f"status {process.returncode} of {shlex.join(command)}: {told.strip()[-500:]}"
            return row._replace(failure=failure)
        seconds, memory = Steps.load(times)
        if not seconds:
            return row._replace(failure=f"no steps of {shlex.join(command)}")
    first = max(len(seconds) // 4, min(WATCHED_STEPS[-1] + 1, len(seconds) - 1))
    return row._replace(measured_s=statistics.median(seconds[first:]), measured_memory=memory)
