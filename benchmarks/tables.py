"""Writes what ``scripts/performance`` measured as Markdown: a table for each command, a column for each implementation.

    python benchmarks/tables.py build/performance > build/performance/tables.md

It reads NAME.json, from ``benchmarks/peers.py --json``, and the command from the first line of NAME.txt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def size(nbytes: int) -> str:
    """Returns a number of bytes as text: ``65536`` as 64 KiB."""
    unit, factor = next((u, f) for u, f in reversed(UNITS.items()) if nbytes >= f)
    return f"{nbytes / factor:.4g} {unit}"


def cell(row: dict[str, Any] | None) -> str:
    """Returns the median time, its ratio to that of raw MPI, and an exclamation mark if results were wrong."""
    if row is None:
        return "-"
    wrong = " !" if row["wrong"] else ""
    time = f"{row['median_us']:.1f}" if row["median_us"] < 1000 else f"{row['median_us']:.0f}"
    ratio = "" if row["implementation"] == "raw MPI" or row["over_raw"] is None else f" ({row['over_raw']:.2f})"
    return time + ratio + wrong


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines of a table: a row for each operation, mode, type and size, a column for each implementation."""
    implementations = list(dict.fromkeys(row["implementation"] for row in rows))
    lines = [
        "| workload | size | " + " | ".join(implementations) + " |",
        "|---|---" + "|---" * len(implementations) + "|",
    ]
    for key in dict.fromkeys((row["op"], row["mode"], row["type"], row["size"]) for row in rows):
        found = {r["implementation"]: r for r in rows if (r["op"], r["mode"], r["type"], r["size"]) == key}
        op, mode, dtype, nbytes = key
        lines.append(
            f"| {op}, {mode}, {dtype} | {size(nbytes)} | "
            + " | ".join(cell(found.get(c)) for c in implementations)
            + " |"
        )
    return lines


def main(folder: Path) -> None:
    """Writes all tables to standard output."""
    print("# Tables\n\n`scripts/performance` made them: medians in microseconds, in brackets their ratio to raw MPI;")
    print("! where results were wrong.")
    for file in sorted(folder.glob("*.json")):
        data = json.loads(file.read_text())
        command = file.with_suffix(".txt").read_text().splitlines()[0].removeprefix("$ ")
        print(f"\n## {file.stem}\n\n    {command}\n", "; ".join(data["title"]), "", *table(data["rows"]), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
