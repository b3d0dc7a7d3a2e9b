"""``pycollective doctor`` reports what this installation and job have, and what is wrong with them.

Without a launcher it checks the installation, and starts two ranks of itself. Under a launcher it checks the job.
``job.py`` has what needs MPI: this file imports nothing that could end the process in a broken installation.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence

from pycollective.doctor import installation
from pycollective.doctor.findings import OK, WRONG, Finding, show
from pycollective.launch.find_mpi import loaded_library
from pycollective.launch.started_by import is_rank


def main(arguments: Sequence[str]) -> int:
    """Prints the findings; returns 1 if something is wrong."""
    description = "Reports what this installation and job have, and what is wrong with them."
    parser = argparse.ArgumentParser(prog="pycollective doctor", description=description)
    parser.add_argument("--json", action="store_true", help="print a list of findings, for programs")
    options = parser.parse_args(arguments)
    try:
        library = loaded_library()
    except (ImportError, RuntimeError) as error:
        return show([installation.versions(), Finding("MPI library", WRONG, str(error), "")], as_json=options.json)
    if is_rank(os.environ):
        return int(importlib.import_module("pycollective.doctor.job").main(as_json=options.json))
    found = [
        installation.versions(),
        Finding("MPI library", OK, f"{library.description} ({library.path})"),
        installation.mpiexec(library),
        installation.native(),
    ]
    if all(finding.status != WRONG for finding in found):
        found += installation.trial()
    return show(found, as_json=options.json)
