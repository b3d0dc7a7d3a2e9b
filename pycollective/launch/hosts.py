"""The hosts that the user names, and whether they answer."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pycollective.errors import message
from pycollective.launch.find_mpi import LIBRARIES

_CONNECT_S = 10


def parse_hosts(text: str) -> tuple[tuple[str, int | None], ...]:
    """Host names between commas, each with its number of ranks or None: a type for argparse.

    Example:
        >>> parse_hosts("alpha,beta:2")
        (('alpha', None), ('beta', 2))
    """
    parts = [part.partition(":") for part in text.split(",")]
    for name, _, ranks in parts:
        if not name or (ranks and (not ranks.isdecimal() or int(ranks) == 0)):
            raise argparse.ArgumentTypeError(f"expected hosts as alpha,beta:2, got {text!r}")
    return tuple((name, int(ranks) if ranks else None) for name, _, ranks in parts)


def names_in_hostfile(path: str) -> list[str]:
    """The host names in a hostfile: the first word of each line, up to a colon."""
    lines = (line.split("#")[0].split() for line in Path(path).read_text().splitlines())
    return [line[0].split(":")[0] for line in lines if line]


def check_hosts(names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Checks that every other host answers, by the program that the launcher will call to reach it.

    Raises:
        ConnectionError: a host does not answer.
    """
    agents = (environ.get(name) for library in LIBRARIES for name in library.agent_variables)
    agent = next(filter(None, agents), "ssh").split(":")[0].strip()
    call = shlex.split(agent)
    if Path(call[0]).name == "ssh":
        call += ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}"]
    here = {"localhost", "127.0.0.1", os.uname().nodename, os.uname().nodename.split(".")[0]}

    def complaint(name: str) -> str | None:
        try:
            done = subprocess.run(
                [*call, name, "true"],
                capture_output=True,
                text=True,
                timeout=2 * _CONNECT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return None if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"

    others = [name for name in dict.fromkeys(names) if name not in here]
    with ThreadPoolExecutor(max(1, min(32, len(others)))) as pool:
        for name, wrong in zip(others, pool.map(complaint, others), strict=True):
            if wrong is not None:
                expected = f"host {name} to answer '{agent} {name} true'"
                raise ConnectionError(
                    message("run", expected, repr(wrong), "Repair the connection, or leave the host out.")
                )
