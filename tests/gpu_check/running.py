"""Steps with a limit each, all before one deadline; what fails is noted, and the rest goes on."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

OK, FAILED, SKIPPED = "ok", "FAILED", "SKIPPED"

_KILL_AFTER_S = 5.0
"""From SIGTERM to SIGKILL: a launcher ends its ranks meanwhile."""
_LEAST_S = 10.0
"""A step is not begun with less time than that."""
_LAST_LINES = 4
_OF_LAUNCHER = re.compile("=   |YOUR APPLICATION TERMINATED|This typically refers to|Please see the FAQ page")
"""How MPICH's mpiexec says that a rank has ended; the rank has said why."""
_PR_SET_CHILD_SUBREAPER = 36


class AbsentError(Exception):
    """Something that a step needs is not there; says what."""


class StepError(Exception):
    """A step has failed; says how."""


@dataclass(frozen=True)
class Result:
    """A line of the table.

    Attributes:
        name: of the step.
        status: :data:`OK`, :data:`FAILED` or :data:`SKIPPED`.
        text: figures, the last lines of what failed, or the reason.
        seconds: that it took; None where it was not begun.
        log: all that it wrote; None where there is nothing.
    """

    name: str
    status: str
    text: str
    seconds: float | None = None
    log: Path | None = None


class Step:
    """What the work of a step is given: a way to run commands within its limit, all of whose output is kept.

    Attributes:
        log: the file of it.
    """

    def __init__(self, log: Path, ends: float) -> None:
        """Begins an empty log.

        Args:
            log: the file.
            ends: when the step must have ended, on the clock of ``time.monotonic``.
        """
        self.log = log
        self._ends = ends
        log.write_text("")

    def left_s(self) -> float:
        """Seconds until its limit."""
        return self._ends - time.monotonic()

    def run(
        self,
        command: Sequence[str | Path],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        partly: bool = False,
    ) -> str:
        """What a command writes to standard output and error together.

        Args:
            command: and its arguments.
            environ: all its variables; default those of this process.
            cwd: where it runs.
            partly: what it wrote before it failed is of use: returned, the failure being noted in the log alone.

        Raises:
            StepError: it could not be started, ended with another status than 0, or did not end in time.
        """
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(map(str, command))}\n")
        begins = self.log.stat().st_size
        try:
            with self.log.open("a") as log:
                # A session of its own, so that all of it can be ended.
                process = subprocess.Popen(
                    [str(word) for word in command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=None if environ is None else dict(environ),
                    cwd=cwd,
                    start_new_session=True,
                )
        except OSError as error:
            raise StepError(f"{command[0]} did not start: {error.strerror}") from error
        try:
            status = process.wait(max(self.left_s(), 0.1))
            said = f"exit status {status}" if status >= 0 else f"ended by {signal.Signals(-status).name}"
        except subprocess.TimeoutExpired:
            status, said = 1, "no end within its limit"
        finally:
            _end(process)
        output = self.log.read_bytes()[begins:].decode(errors="replace")
        if status != 0:
            with self.log.open("a") as log:
                log.write(f"\n{said}\n")
            if not partly:
                raise StepError(f"{said}: {last_lines(output)}")
        return output


def last_lines(output: str, number: int = _LAST_LINES) -> str:
    """The last lines that say something, in one."""
    lines = [line.strip() for line in output.splitlines() if any(map(str.isalnum, line))]
    told = [line for line in lines if not _OF_LAUNCHER.match(line)]
    return " / ".join(told[-number:]) or "it said nothing"


class Runner:
    """Runs steps one after the other.

    Attributes:
        results: of the steps so far.
    """

    def __init__(self, logs: Path, seconds: float, *, patience: float = 1.0, only: Sequence[str] = ()) -> None:
        """Sets the deadline.

        Args:
            logs: a directory for their output.
            seconds: from now until all must have ended.
            patience: times that all limits are longer.
            only: parts of names: other steps are left out, without a word; empty: none is.
        """
        self.results: list[Result] = []
        self._logs = logs
        self._only = only
        self._patience = patience
        self._deadline = time.monotonic() + seconds * patience
        self._others = _children()
        logs.mkdir(parents=True, exist_ok=True)

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    def wanted(self, name: str) -> bool:
        """Whether a step of this name is asked for."""
        return not self._only or any(part in name for part in self._only)

    def note(self, result: Result) -> bool:
        """Adds a line to the table. Returns whether it is one of success."""
        self.results.append(result)
        took = "" if result.seconds is None else f" ({result.seconds:.0f} s)"
        sys.stderr.write(f"=== {result.name}: {result.status}{took}: {result.text}\n")
        return result.status == OK

    def skip(self, name: str, reason: str) -> None:
        """Notes a step that is not begun."""
        if self.wanted(name):
            self.note(Result(name, SKIPPED, reason))

    def step(self, name: str, limit_s: float, work: Callable[[Step], str]) -> bool:
        """Does the work of one step, whatever happens in it. Returns whether it went well.

        Args:
            name: of the step.
            limit_s: seconds that it may take, if so many are left.
            work: returns what the table says of it.
        """
        if not self.wanted(name):
            return False
        limit_s *= self._patience
        if self.left_s() < min(limit_s, _LEAST_S):
            self.skip(name, "out of time")
            return False
        sys.stderr.write(f"=== {name} ...\n")
        began = time.monotonic()
        log = self._logs / f"{'-'.join(''.join(c if c.isalnum() else ' ' for c in name).split())}.txt"
        step = Step(log, began + min(limit_s, self.left_s()))
        try:
            status, text = OK, work(step)
        except AbsentError as absent:
            status, text = SKIPPED, str(absent)
        except StepError as failure:
            status, text = FAILED, str(failure)
        except Exception as error:  # of this program: the other steps are worth as much
            status, text = FAILED, f"gpu-check itself: {type(error).__name__}: {error}"
        _end_orphans(self._others)
        return self.note(Result(name, status, text, time.monotonic() - began, log if log.stat().st_size else None))


# Processes ------------------------------------------------------------------------------------------------------


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and what else is left of its session."""
    for sent, seconds in ((signal.SIGTERM, _KILL_AFTER_S), (signal.SIGKILL, 1.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with suppress(subprocess.TimeoutExpired):  # one that hangs in a driver cannot be ended: leave it
            process.wait(seconds)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return


def adopt_orphans(adopt: bool = True) -> None:
    """What a launcher leaves when it is killed becomes a child of this process, so that a runner can end it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _end_orphans(others: Collection[int]) -> None:
    """Ends what a step has left: all children of this process but ``others``."""
    for _ in range(20):
        children = _children() - set(others)
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not children:
            return
        time.sleep(0.05)


def _children() -> set[int]:
    """The processes whose parent this one is."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parent = stat.read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.add(int(stat.parent.name))
    return found
