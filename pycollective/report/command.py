"""``pycollective report`` reads what a job has left behind, and needs neither MPI nor the job's ranks."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pycollective.errors import message, name_ranks
from pycollective.report import reading, tables, timeline, verdicts

_MAX_VERDICTS = 20
"""How many calls that are not fully matched the table shows."""


def main(arguments: Sequence[str]) -> int:
    """Prints the report; returns 1 if there is none to make."""
    description = (
        "Shows what a file of pycollective.trace says, or the records that the ranks of a failed job have left."
    )
    parser = argparse.ArgumentParser(prog="pycollective report", description=description)
    parser.add_argument("path", type=Path, help="a file of pycollective.trace, or a folder with files rank-R.json")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="of a trace: write a page with plots too (matplotlib)"
    )
    options = parser.parse_args(arguments)
    path: Path = options.path
    if path.is_dir():
        if options.html:
            parser.error("--html is for a trace: the records of a failed job have no page")
        return _show_records(path)
    if options.html and importlib.util.find_spec("matplotlib") is None:
        return _refuse("matplotlib, for the plots of --html", "none", "pip install matplotlib, or leave --html out.")
    found = timeline.read(path)
    if found is None:
        got = f"{path}, which is neither" if path.exists() else f"{path}, which does not exist"
        return _refuse_path(got)
    summary = timeline.summary(found)
    console = _console()
    console.print(tables.table(tables.CALLS, tables.call_cells(summary.rows)))
    console.print(tables.table(tables.RANKS, tables.rank_cells(summary.ranks)))
    console.print(tables.summarize(summary), highlight=False)
    if options.html:
        importlib.import_module("pycollective.report.page").write(found, summary, path.name, options.html)
    return 0


def _console() -> Console:
    """Where the report goes: as wide as it needs if nobody watches."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def _refuse(expected: str, got: str, remedy: str) -> int:
    sys.stderr.write(message("report", expected, got, remedy) + "\n")
    return 1


def _refuse_path(got: str) -> int:
    expected = "a file of pycollective.trace, or a folder with files rank-R.json"
    return _refuse(expected, got, "pycollective.trace writes the first, a failed job the second.")


def _job(own: dict[str, Any]) -> tuple[int, str | None]:
    """What the records of one job share: its number of ranks, and its name if it has ended by a failure."""
    return own["world_size"], own.get("job")


def _show_records(folder: Path) -> int:
    """Prints the verdicts on the records in a folder."""
    records: list[tuple[float, dict[str, Any]]] = []
    notes = []
    for file in sorted(folder.glob("rank-*.json")):
        found = reading.load(file)
        wrong = reading.wrong_in(found, verdicts.FORM)
        if wrong is None:
            records.append((file.stat().st_mtime, found))
        else:
            place = f": {wrong} is missing, or of another kind" if wrong else ""
            notes.append(f"{file.name} holds no whole records{place}.")
    if not records:
        return _refuse_path(f"the folder {folder} without whole ones")
    job = max(records, key=lambda record: record[0])[1]
    of_job = [own for _, own in records if _job(own) == _job(job)]
    others = [own["rank"] for _, own in records if _job(own) != _job(job)]
    if others:
        notes.append(f"The records of {name_ranks(others)} are of another job, and left out.")
    findings = verdicts.judge(of_job)
    console = _console()
    if findings.verdicts:
        console.print(tables.table(tables.VERDICTS, tables.verdict_cells(findings.verdicts[:_MAX_VERDICTS])))
    if len(findings.verdicts) > _MAX_VERDICTS:
        notes.append(f"{len(findings.verdicts) - _MAX_VERDICTS} more calls are not fully matched.")
    for sentence in [*notes, *findings.sentences]:
        console.print(sentence, highlight=False, markup=False)
    return 0
