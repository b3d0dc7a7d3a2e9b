"""Writes the report: Markdown that can be pasted into docs/gpu.md without changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.gpu_check.running import FAILED, SKIPPED, Result

_LONGEST = 400
"""The largest number of characters in a cell."""


def cell(text: str) -> str:
    """Returns ``text`` as a cell of a table: in one line, and not too long."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def rows_of(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return [f"| {' | '.join(map(cell, line))} |" for line in lines]


def steps(results: Sequence[Result]) -> list[str]:
    """Returns the table of the steps."""
    lines = []
    for result in results:
        text = result.text
        if result.status == FAILED and result.log is not None:
            text = f"{cell(text)} (full output: {result.log.name})"
        seconds = "" if result.seconds is None else f"{result.seconds:.0f}"
        lines.append([result.name, result.status, seconds, text])
    return rows_of(("step", "result", "s", "details"), lines)


def bandwidths(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns the table of bandwidths, with a line for each operation and size; empty if nothing was measured."""
    contenders = list(dict.fromkeys(str(row["contender"]) for row in rows))
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault((str(row["op"]), int(str(row["size"]))), {})
        line[str(row["contender"])] = f"{float(str(row['algbw'])):.2f}"
    if not lines:
        return []
    heading = ["GB/s", *contenders]
    body = [
        [f"{op}, {size >> 20} MiB", *(line.get(name, "-") for name in contenders)] for (op, size), line in lines.items()
    ]
    return rows_of(heading, body)


def verdict(results: Sequence[Result]) -> str:
    """Returns a sentence that counts the steps by their results."""
    counts = {status: sum(result.status == status for result in results) for status in (FAILED, SKIPPED)}
    good = len(results) - sum(counts.values())
    return f"Steps: {good} ok, {counts[FAILED]} failed, {counts[SKIPPED]} skipped."


def report(
    title: str, facts: Mapping[str, str], results: Sequence[Result], rows: Sequence[Mapping[str, object]] = ()
) -> str:
    """Returns the whole report.

    Args:
        title: the title of the section.
        facts: what is known about the machine: names and values.
        results: the results of the steps.
        rows: the figures of ``pycollective bench``.
    """
    about = rows_of(("", ""), list(facts.items())) if facts else []
    parts = [[f"### {title}"], about, steps(results), bandwidths(rows), [verdict(results)]]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"
