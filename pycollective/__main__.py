"""The command ``pycollective``, also ``python -m pycollective``."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pycollective
from pycollective.bench import options as bench_options
from pycollective.bench.main import run as run_bench
from pycollective.launchers import launched_size
from pycollective.mpi import MPI


def main() -> int:
    """Runs a subcommand and returns the exit status."""
    parser = argparse.ArgumentParser(prog="pycollective", description="Write jax.lax, run on MPI.")
    parser.add_argument("--version", action="version", version=pycollective.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="measure collectives beside raw MPI and other libraries")
    bench_options.add_options(bench)
    options = parser.parse_args()
    bench_options.check(bench, options)
    # With --ranks 1, as in the command below, nothing is started: what a launcher did wrong is for init to say.
    if MPI.COMM_WORLD.size == 1 and options.ranks > 1 and launched_size(os.environ) is None:
        return _launch(options.ranks)
    return run_bench(options)


def _launch(ranks: int) -> int:
    """The same command under mpirun."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        sys.exit("pycollective: expected an mpirun on PATH, got none. Start this command with your launcher.")
    oversubscribe = ["--oversubscribe"] if "Open MPI" in MPI.Get_library_version() else []
    again = [sys.executable, "-m", "pycollective", *sys.argv[1:], "--ranks", "1"]
    command = [mpirun, *oversubscribe, "-n", str(ranks), *again]
    # What MPI has put into the environment of this process is not for its children.
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "PMIX_", "OMPI_COMM_WORLD", "PRTE_"))}
    return subprocess.run(command, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
