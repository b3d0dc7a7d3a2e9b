"""``pycollective bench``: measures as one of the ranks that a launcher started, or starts some.

MPI must not start before that is decided: its variables would be inherited by the ranks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from pycollective.bench.options import add_options, check
from pycollective.launch import run
from pycollective.launch.started_by import is_rank


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="pycollective bench", description="Measures collectives.")
    add_options(parser)
    options = parser.parse_args(arguments)
    check(parser, options)
    # With --ranks 1, as in the command below, nothing is started.
    if options.ranks > 1 and not is_rank(os.environ):
        bench = [sys.executable, "-m", "pycollective", "bench", *arguments, "--ranks", "1"]
        return run.main(["-n", str(options.ranks), "--oversubscribe", "--bind", "none", *bench])
    return int(importlib.import_module("pycollective.bench.main").run(options))
