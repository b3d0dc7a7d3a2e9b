"""The command ``pycollective``, also ``python -m pycollective``."""

from __future__ import annotations

import argparse
import importlib
import sys

import pycollective

# The module of each, imported when it is asked for: ``run`` must not start MPI, and needs no JAX.
COMMANDS = {
    "run": ("pycollective.launch.run", "start a program as ranks, by the launcher of the MPI library"),
    "doctor": ("pycollective.doctor.command", "say what this machine and job have, and what is wrong"),
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
    parser.add_argument("command", choices=COMMANDS, help="see below; pycollective COMMAND --help says more")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    options = parser.parse_args()
    module, _ = COMMANDS[options.command]
    return int(importlib.import_module(module).main(options.arguments))


if __name__ == "__main__":
    sys.exit(main())
