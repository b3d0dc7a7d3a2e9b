"""Jobs of ranks without JAX on several hosts of this machine, which ``scripts/hosts`` makes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HOSTS = str(ROOT / "scripts" / "hosts")

MOST_HOSTS = 16

CALLS = 8
"""The calls of each phase of ``rank.py count``."""

SMALL, MEDIUM, LARGE = 2, 20_000, 1 << 15
"""Numbers of float32: 8 bytes travel with the comparison; levels of hosts sum 80 KiB, and MPI 128 KiB between hosts."""


@dataclass
class Job:
    """A job that runs.

    Attributes:
        process: its launcher.
        folder: where its ranks write their files.
        size: the number of its ranks.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    size: int

    @property
    def said(self) -> str:
        """What it has written to its standard error so far."""
        return (self.folder / "stderr").read_text(errors="replace")

    def wait_until_all_call(self, seconds: float = 120) -> None:
        """Returns when every rank has compared its first calls."""
        deadline = time.monotonic() + seconds
        while len([*self.folder.glob("*.pid")]) < self.size:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def wait_until_says(self, text: str, seconds: float = 60) -> None:
        """Returns when a text stands in its standard error."""
        deadline = time.monotonic() + seconds
        while text not in self.said:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks that are left, also of those that are stopped, as this host numbers them."""
        mark = str(self.folder).encode()
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            if mark in _read(path / "cmdline"):
                for variable in _read(path / "environ").split(b"\0"):
                    if variable.startswith(b"PMI_RANK="):
                        found[int(variable[9:])] = int(path.name)
        return found

    def wait_until_gone(self, seconds: float) -> float:
        """Returns when no rank is left, and how long that took."""
        began = time.monotonic()
        while left := self.ranks():
            assert time.monotonic() - began < seconds, f"{len(left)} of {self.size} ranks are left\n{self.said}"
            time.sleep(0.05)
        return time.monotonic() - began


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


def _start(hosts: int, ranks: int) -> list[str]:
    """The command that starts the Python program that follows it on so many ranks of each of so many hosts."""
    where = ",".join(f"h{host}:{ranks}" for host in range(hosts))
    run = [sys.executable, "-m", "pycollective", "run", "-n", str(hosts * ranks), "--hosts", where, "--bind", "none"]
    return [HOSTS, "exec", "timeout", "-k", "5", "240", *run]


@dataclass
class Hosts:
    """Hosts that run.

    Attributes:
        state: the folder of ``scripts/hosts``.
        calls: the library of ``calls.cc``.
    """

    state: Path
    calls: Path

    @contextmanager
    def job(self, hosts: int, ranks: int, folder: Path, *arguments: str) -> Iterator[Job]:
        """Starts ``rank.py`` on so many ranks of each of so many hosts. What is left of the job at the end is killed.

        Args:
            hosts: the number of hosts.
            ranks: the ranks of each.
            folder: where they write their files.
            arguments: of ``rank.py``.
        """
        program = [str(ROOT / "tests" / "scale" / "rank.py"), str(self.calls), str(folder), *arguments]
        environ = {**os.environ, "PYCOLLECTIVE_HOSTS": str(self.state), "PYTHONPATH": str(ROOT)}
        environ |= {"PYCOLLECTIVE_TIMEOUT": "100", "PYCOLLECTIVE_RECORDS": "off", "OMP_NUM_THREADS": "1"}
        environ |= {"UCX_TCP_KEEPIDLE": "inf"}  # otherwise connections send packets while MPI is idle
        with (folder / "stderr").open("wb") as out:
            process = subprocess.Popen(
                [*_start(hosts, ranks), *program],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environ,
            )
        job = Job(process, folder, hosts * ranks)
        try:
            yield job
        finally:
            for pid in job.ranks().values():
                os.kill(pid, signal.SIGKILL)
            process.terminate()
            process.wait(30)

    def run_with_jax(self, hosts: int, ranks: int, program: Path) -> str:
        """What a program with JAX writes on so many ranks of each of so many hosts. It must end in order."""
        environ = {**os.environ, "PYCOLLECTIVE_HOSTS": str(self.state), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = [*_start(hosts, ranks), str(program)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environ, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def count(self, hosts: int, ranks: int, folder: Path) -> list[dict[str, Any]]:
        """What the ranks of ``rank.py count`` have counted, in their order."""
        with self.job(hosts, ranks, folder, "count") as job:
            assert job.process.wait() == 0, job.said
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(hosts * ranks)]

    def first_process_of(self, host: int) -> int:
        """The process with which a host ends."""
        return int((self.state / f"h{host}").read_text())

    def set_link(self, host: int, state: str) -> None:
        """Cuts the link of a host ("down"), or connects it again ("up")."""
        inside = ["nsenter", "-t", str(self.first_process_of(host)), "-n"]
        subprocess.run([*inside, "ip", "link", "set", "eth0", state], check=True)

    def bytes_on_links(self) -> list[int]:
        """The bytes that each host has sent and received so far."""
        links: Sequence[str] = (self.state / "links").read_text().split()
        folders = [Path(f"/sys/class/net/{link}/statistics") for link in links]
        return [sum(int((of / name).read_text()) for name in ("tx_bytes", "rx_bytes")) for of in folders]
