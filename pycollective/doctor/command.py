"""``pycollective doctor``: what this machine and job have, and what is wrong with it.

Without a launcher it checks the installation, and starts two ranks of itself. As ranks of a job it speaks of the job.
What needs MPI is in ``job.py``: here nothing is imported that a broken installation could end.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence

from pycollective.doctor import installation
from pycollective.doctor.findings import OK, WRONG, Finding, show
from pycollective.launch.launchers import is_rank
from pycollective.launch.libraries import loaded


def main(arguments: Sequence[str]) -> int:
    """Prints what it finds; returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="pycollective doctor", description="Says what this machine and job have.")
    parser.add_argument("--json", action="store_true", help="for programs: a list of findings")
    options = parser.parse_args(arguments)
    try:
        library = loaded()
    except (ImportError, RuntimeError) as error:
        return show([installation.versions(), Finding("MPI library", WRONG, str(error), "")], as_json=options.json)
    if is_rank(os.environ):
        return int(importlib.import_module("pycollective.doctor.job").main(as_json=options.json))
    found = [
        installation.versions(),
        Finding("MPI library", OK, f"{library.name} ({library.path})"),
        installation.mpiexec(library),
        installation.native(),
    ]
    if all(finding.status != WRONG for finding in found):
        found += installation.trial()
    return show(found, as_json=options.json)
