"""The exit status that a rank knows before its exit handlers run."""

from __future__ import annotations

import subprocess
import sys

import pytest

RECORD = """
import atexit, gc, sys, threading
from pycollective.faults import exit_status
{before}
exit_status.record()
exit_status.record()
atexit.register(lambda: print("status", exit_status.status()))
"""


def run(program: str, before: str = "") -> tuple[int, str, str]:
    """The exit status, the output and the errors of a program."""
    command = [sys.executable, "-c", RECORD.format(before=before) + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("sys.exit(3)", 3),
        ("raise SystemExit(3)", 3),
        ("exit(3)", 3),
        ("sys.exit(-1)", 255),
        ("sys.exit('a message')", 1),
        ("sys.exit()", 0),
        ("try:\n    sys.exit(3)\nfinally:\n    raise SystemExit(4)", 4),
    ],
)
def test_the_status_of_an_exit(program: str, status: int) -> None:
    returncode, out, _ = run(program)
    assert (returncode, out) == (status, f"status {status}\n")


@pytest.mark.parametrize(
    "program",
    [
        "pass",
        "try:\n    sys.exit(3)\nexcept SystemExit as error:\n    assert error.code == 3",
        "thread = threading.Thread(target=lambda: sys.exit(3))\nthread.start()\nthread.join()",
    ],
)
def test_what_is_no_exit(program: str) -> None:
    assert run(program) == (0, "status None\n", "")


def test_a_python_whose_attributes_cannot_be_reached() -> None:
    """The rank does not learn its status, and says so; the launcher still gets it."""
    returncode, out, errors = run("sys.exit(3)", before="gc.get_referents = lambda *_: []")
    assert (returncode, out) == (3, "status None\n")
    expected = (
        "init: expected CPython's dictionary of the attributes of SystemExit, got none. A rank that calls sys.exit"
    )
    assert errors.count(expected) == 1, errors
