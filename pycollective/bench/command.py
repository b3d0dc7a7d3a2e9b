"""``pycollective bench`` measures as one of the ranks that a launcher has started, or starts ranks that measure.

MPI must not start in a process that starts ranks: they would inherit MPI's variables.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from pycollective.bench.options import add_options, check
from pycollective.launch.started_by import is_rank
from pycollective.run import command


def main(arguments: Sequence[str]) -> int:
    """Measures, or starts ranks that measure. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="pycollective bench", description="Measures collectives.")
    add_options(parser)
    options = parser.parse_args(arguments)
    check(parser, options)
    # The ranks that the command below starts get --ranks 1, so they start nothing.
    if options.ranks > 1 and not is_rank(os.environ):
        bench = [sys.executable, "-m", "pycollective", "bench", *arguments, "--ranks", "1"]
        return command.main(["-n", str(options.ranks), "--oversubscribe", "--bind", "none", *bench])
    return int(importlib.import_module("pycollective.bench.main").run(options))
