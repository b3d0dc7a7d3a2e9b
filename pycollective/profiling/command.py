"""``pycollective profile`` measures as one of the ranks that a launcher has started, or starts ranks that measure.

MPI must not start in a process that starts ranks: they would inherit MPI's variables.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pycollective.launch.arguments import positive
from pycollective.launch.started_by import is_rank
from pycollective.run import command

_EXAMPLES = """examples:
  pycollective profile -o cluster.json               2 ranks on this host
  srun -n 64 pycollective profile -o cluster.json    the ranks and hosts of a job
"""


def main(arguments: Sequence[str]) -> int:
    """Measures, or starts ranks that measure. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="pycollective profile",
        description="Measures how fast these ranks compute and communicate, and writes it for `pycollective plan`.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file for the profile (JSON)")
    parser.add_argument(
        "--dtypes",
        type=lambda text: tuple(filter(None, text.split(","))),
        default=("float32", "bfloat16"),
        help="dtypes of products and convolutions, between commas (default float32,bfloat16)",
    )
    parser.add_argument("--devices", type=positive, default=1, help="number of local devices of each rank (default 1)")
    parser.add_argument(
        "--ranks", type=positive, default=2, help="number of ranks to start where no launcher has (default 2)"
    )
    options = parser.parse_args(arguments)
    if not options.output.absolute().parent.is_dir():
        parser.error(f"expected -o in a folder that is there, got {options.output}")
    if not options.dtypes:
        parser.error("expected a dtype after --dtypes, got none")
    # The ranks that the command below starts get --ranks 1, so they start nothing.
    if options.ranks > 1 and not is_rank(os.environ):
        profile = [sys.executable, "-m", "pycollective", "profile", *arguments, "--ranks", "1"]
        return command.main(["-n", str(options.ranks), "--oversubscribe", "--bind", "none", *profile])
    return int(importlib.import_module("pycollective.profiling.main").run(options))
