"""``pycollective bench``: measures as one of the ranks that a launcher started, or starts some."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

from pycollective.bench.main import run
from pycollective.bench.options import add_options, check
from pycollective.launchers import launched_size
from pycollective.mpi import MPI


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="pycollective bench", description="Measures collectives.")
    add_options(parser)
    options = parser.parse_args(arguments)
    check(parser, options)
    # With --ranks 1, as in the command below, nothing is started: what a launcher did wrong is for init to say.
    if MPI.COMM_WORLD.size == 1 and options.ranks > 1 and launched_size(os.environ) is None:
        return _launch(options.ranks, arguments)
    return run(options)


def _launch(ranks: int, arguments: Sequence[str]) -> int:
    """The same command as ranks."""
    python = [sys.executable, "-m", "pycollective"]
    start = [*python, "run", "-n", str(ranks), "--oversubscribe", "--bind", "none"]
    # What MPI has put into the environment of this process is not for its children.
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "PMIX_", "OMPI_COMM_WORLD", "PRTE_"))}
    return subprocess.run([*start, *python, "bench", *arguments, "--ranks", "1"], env=environ, check=False).returncode
