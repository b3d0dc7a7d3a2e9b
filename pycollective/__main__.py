"""The command ``pycollective``, also ``python -m pycollective``."""

from __future__ import annotations

import argparse
import importlib
import sys

import pycollective

# The module of each command, which is imported only for that command: ``run`` must not start MPI, and needs no JAX.
COMMANDS = {
    "run": ("pycollective.run.command", "start a program as ranks, through the MPI library's launcher"),
    "doctor": ("pycollective.doctor.command", "report what this installation and job have, and what is wrong"),
    "report": ("pycollective.report.command", "show what a trace, or the records of a failed job, say"),
    "profile": ("pycollective.profiling.command", "measure how fast ranks compute and communicate, for plans"),
    "plan": ("pycollective.planning.command", "rank the ways to train a program's network on a cluster"),
    "bench": ("pycollective.bench.command", "measure collectives beside raw MPI and other libraries"),
}


def main() -> int:
    """Runs a subcommand and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="pycollective",
        description="Write jax.lax, run on MPI.",
        epilog="\n".join(["commands:", *(f"  {name:<8} {what}" for name, (_, what) in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=pycollective.__version__)
    parser.add_argument("command", choices=COMMANDS, help="see below, and pycollective COMMAND --help")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the command's arguments")
    options = parser.parse_args()
    module, _ = COMMANDS[options.command]
    return int(importlib.import_module(module).main(options.arguments))


if __name__ == "__main__":
    sys.exit(main())
