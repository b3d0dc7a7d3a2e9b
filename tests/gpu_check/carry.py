"""What ``scripts/gpu-carry`` checks and prints: the wheel of the package, and the command for the GPU machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tests.gpu_check import environment

LONGEST = 2000
"""The most characters that such a machine takes as a command."""
SECONDS, TERM_S = 500, 525
"""The time of the whole check, and when it gets SIGTERM: such a machine ends a command after 9 minutes."""


def command(folder: str, version: str, commit: str) -> str:
    """Returns the command that installs the wheels on the GPU machine, checks, and leaves the report and an archive.

    Args:
        folder: the wheels, as the GPU machine finds them from the directory of the repository.
        version: the version of Python, such as 3.12.
        commit: what the report calls the tree; the GPU machine may have no git.
    """
    options = ["--python", f"python{version}", "--wheels", folder, "--commit", commit, "--seconds", str(SECONDS)]
    limit = ["timeout", "--preserve-status", "-k", "10", "-s", "TERM", str(TERM_S)]
    check = shlex.join([*limit, "scripts/gpu-check", *options])
    out = 'out="${OUT:-results}"'
    # Few files may be brought back, and the archive has all logs.
    return f'{out}; {check} --out "$out/gpu-check.md"; status=$?; rm -rf "$out/gpu-check-logs"; exit $status'


def main() -> int:
    """Prints the command; returns 1 if the wheel in the folder was not made from this tree."""
    folder, version, commit = sys.argv[1:]
    root = Path(__file__).parents[2]
    for wheel in Path(folder).glob("pycollective-*.whl"):
        if found := environment.difference(wheel, root):
            sys.stderr.write(f"scripts/gpu-carry: {found}. Has the tree changed meanwhile? Run it again.\n")
            return 1
    sys.stdout.write(f"{command(folder, version, commit)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
