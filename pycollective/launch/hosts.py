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

_CONNECT_TIMEOUT_S = 10

MOST_CHECKED = 32
"""Up to so many hosts are checked, all at a time. More are left to the launcher: its tree of processes may have other
ways to a host than one connection of this process to each."""


def parse_hosts(text: str) -> tuple[tuple[str, int | None], ...]:
    """Host names between commas, each with its number of ranks or None: a type for argparse.

    Example:
        >>> parse_hosts("alpha,beta:2")
        (('alpha', None), ('beta', 2))
    """
    parts = [part.partition(":") for part in text.split(",")]
    for name, _, ranks in parts:
        if not name or name.startswith("-") or (ranks and (not ranks.isdecimal() or int(ranks) == 0)):
            raise argparse.ArgumentTypeError(f"expected hosts as alpha,beta:2, got {text!r}")
    return tuple((name, int(ranks) if ranks else None) for name, _, ranks in parts)


def parse_hostfile(text: str) -> tuple[tuple[str, int | None], ...]:
    r"""The host names in a hostfile, each with its number of ranks or None: ``a:2``, ``a slots=2``, or two lines ``a``.

    Raises:
        ValueError: a name is an option to the programs that get it.

    Example:
        >>> parse_hostfile("alpha:2  # MPICH\nbeta slots=3\ngamma\ndelta\ndelta\n")
        (('alpha', 2), ('beta', 3), ('gamma', None), ('delta', 2))
    """
    numbers: dict[str, list[int | None]] = {}
    for words in (line.split("#")[0].split() for line in text.splitlines()):
        if words:
            name, _, number = words[0].partition(":")
            if name.startswith("-"):  # launchers pass it on to ssh
                remedy = "Correct the hostfile."
                raise ValueError(message("run", "names of hosts in the hostfile", repr(words[0]), remedy))
            slots = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
            given = next((text for text in [number, *slots] if text.isdecimal()), None)
            numbers.setdefault(name, []).append(None if given is None else int(given))
    return tuple(
        (name, given[0] if len(given) == 1 else sum(1 if number is None else number for number in given))
        for name, given in numbers.items()
    )


def check_hosts(names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Checks that every other host answers, by the program that the launcher will call to reach it.

    More than :data:`MOST_CHECKED` hosts are not checked.

    Raises:
        ConnectionError: a host does not answer.
    """
    agents = (environ.get(name) for library in LIBRARIES for name in library.remote_shell_variables)
    agent = next(filter(None, agents), "ssh").split(":")[0].strip()
    call = shlex.split(agent)
    if Path(call[0]).name == "ssh":
        call += ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_TIMEOUT_S}", "--"]
    here = {"localhost", "127.0.0.1", os.uname().nodename, os.uname().nodename.split(".")[0]}

    def complaint(name: str) -> str | None:
        try:
            done = subprocess.run(
                [*call, name, "true"],
                capture_output=True,
                text=True,
                timeout=2 * _CONNECT_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return None if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"

    others = [name for name in dict.fromkeys(names) if name not in here]
    if not 0 < len(others) <= MOST_CHECKED:
        return
    with ThreadPoolExecutor(len(others)) as pool:
        for name, wrong in zip(others, pool.map(complaint, others), strict=True):
            if wrong is not None:
                expected = f"host {name} to answer '{agent} {name} true'"
                raise ConnectionError(
                    message("run", expected, repr(wrong), "Repair the connection, or leave the host out.")
                )
