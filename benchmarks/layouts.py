"""How far the predictions of ``pycollective plan`` are off, from what its runs took.

A second file of the same layouts shows how well the machine repeats itself:

    pycollective profile -o cluster.json
    pycollective plan --profile cluster.json --verify 100 --json run1.json examples/train_gpt.py --layers 4 --width 256
    pycollective plan --profile cluster.json --verify 100 --json run2.json examples/train_gpt.py --layers 4 --width 256
    python benchmarks/layouts.py run1.json run2.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from plan import agreement, in_order, rank_correlation

from pycollective.planning import Layout


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The layouts that were run."""
    return [row for row in json.loads(file.read_text())["rows"] if row["measured_s"]]


def read(rows: list[dict[str, Any]]) -> dict[Layout, tuple[float, float]]:
    """The predicted and measured seconds of layouts."""
    return {Layout(*(row[name] for name in Layout._fields)): (row["seconds"], row["measured_s"]) for row in rows}


def memory_of(rows: list[dict[str, Any]]) -> str:
    """How far predicted memory is off, where it was measured."""
    ratios = [row["memory"] / row["measured_memory"] for row in rows if row.get("measured_memory")]
    off = [abs(ratio - 1) for ratio in ratios]
    least, most = min(ratios, default=math.nan), max(ratios, default=math.nan)
    middle = statistics.median(off) if off else math.nan
    return f"memory of {len(off)}: median error {middle:.0%}, predicted over measured {least:.2f} to {most:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", type=Path, nargs="+", help="files that `pycollective plan --verify K --json` has written"
    )
    files = [rows_of(file) for file in parser.parse_args().runs]
    runs = [read(rows) for rows in files]
    every = sorted(set.intersection(*map(set, runs)), key=lambda layout: runs[0][layout])
    for layout in every:
        measured = "  ".join(f"{1e3 * run[layout][1]:8.1f}" for run in runs)
        print(f"{layout!s:60} {1e3 * runs[0][layout][0]:8.1f} ms, measured {measured}")
    predicted = [runs[0][layout][0] for layout in every]
    for run, rows in zip(runs, files, strict=True):
        took = [run[layout][1] for layout in every]
        largest = max(abs(p / m - 1) for p, m in zip(predicted, took, strict=True))
        print(
            ", ".join(
                [f"{len(every)} layouts", *agreement(predicted, took), f"largest error {largest:.0%}", memory_of(rows)]
            )
        )
    for other in runs[1:]:
        took, again = ([run[layout][1] for layout in every] for run in (runs[0], other))
        apart = [abs(a / b - 1) for a, b in zip(took, again, strict=True)]
        fastest = again[took.index(min(took))] / min(again)
        print(
            f"two runs: median difference {statistics.median(apart):.0%}, rank correlation "
            f"{rank_correlation(took, again):.2f}, pairs in order {in_order(took, again):.0%}, "
            f"the fastest of the first run over that of the other one {fastest:.2f}"
        )


if __name__ == "__main__":
    main()
