"""Runs steps, each within its own limit and all before one deadline. If a step fails, the next one still runs."""

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
"""The time between SIGTERM and SIGKILL, in which a launcher ends its ranks."""
_LEAST_S = 10.0
"""The time that must be left when a step begins, unless its limit is shorter."""
_LAST_LINES = 4
_LAUNCHER_LINE = re.compile("=   |YOUR APPLICATION TERMINATED|This typically refers to|Please see the FAQ page")
"""Lines that MPICH's mpiexec prints when a rank fails. They do not say why; the lines of the rank do."""
_PR_SET_CHILD_SUBREAPER = 36


class AbsentError(Exception):
    """Something that a step needs is missing; the message says what."""


class StepError(Exception):
    """A step has failed; the message says how."""


class Interrupted(KeyboardInterrupt):
    """A signal that ends this program has come.

    Attributes:
        number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


@dataclass(frozen=True)
class Result:
    """A line of the table.

    Attributes:
        name: the name of the step.
        status: :data:`OK`, :data:`FAILED` or :data:`SKIPPED`.
        text: the figures of the step, how it failed, or why it was skipped.
        seconds: the time that the step took; None: it was not begun.
        log: the file with all output of the step; None: there is no output.
    """

    name: str
    status: str
    text: str
    seconds: float | None = None
    log: Path | None = None


class Step:
    """Runs the commands of one step within the step's limit, and keeps all their output.

    Attributes:
        log: the file with the output.
    """

    def __init__(self, log: Path, limit_s: float) -> None:
        """Begins an empty log.

        Args:
            log: the file.
            limit_s: the seconds from now in which the step must have ended.
        """
        self.log = log
        self._limit_s = limit_s
        self._ends = time.monotonic() + limit_s
        log.write_text("")

    def left_s(self) -> float:
        """Returns the seconds until the step's limit."""
        return self._ends - time.monotonic()

    def run(
        self,
        command: Sequence[str | Path],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        partly: bool = False,
    ) -> str:
        """Runs a command. Returns what it writes to standard output and standard error together.

        Args:
            command: the command and its arguments.
            environ: all its environment variables; None: those of this process.
            cwd: the directory that it runs in; None: that of this process.
            partly: if the command fails, its output is returned too, and only the log tells of the failure. A command
                that does not end in time fails all the same.

        Raises:
            StepError: the command could not be started, failed, or did not end in time.
        """
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(map(str, command))}\n")
        begins = self.log.stat().st_size
        try:
            with self.log.open("a") as log:
                # The command gets a session of its own, so that all its processes can be ended together.
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
            how = f"exit status {status}" if status >= 0 else f"ended by {signal.Signals(-status).name}"
        except subprocess.TimeoutExpired:
            status, how, partly = 1, f"it did not end within the limit of this step, {self._limit_s:.3g} s", False
        finally:
            _end(process)
        output = self.log.read_bytes()[begins:].decode(errors="replace")
        if status != 0:
            with self.log.open("a") as log:
                log.write(f"\n{how}\n")
            if not partly:
                raise StepError(f"{how}: {last_lines(output)}")
        return output


def last_lines(output: str, number: int = _LAST_LINES) -> str:
    """Returns the last lines that have words in them, as one line, without those of the launcher."""
    lines = [line.strip() for line in output.splitlines() if any(map(str.isalnum, line))]
    told = [line for line in lines if not _LAUNCHER_LINE.match(line)]
    return " / ".join(told[-number:]) or "it printed nothing"


class Runner:
    """Runs steps one after the other.

    Attributes:
        results: the results of the steps so far.
    """

    def __init__(self, logs: Path, seconds: float, *, patience: float = 1.0, only: Sequence[str] = ()) -> None:
        """Sets the deadline.

        Args:
            logs: the directory for the output of the steps.
            seconds: the time from now in which all steps must end.
            patience: the factor by which all limits are longer.
            only: parts of the names of the steps that run, others being left out of the table too; empty: all run.
        """
        self.results: list[Result] = []
        self._logs = logs
        self._only = only
        self._patience = patience
        self._deadline = time.monotonic() + seconds * patience
        self._others = _children()
        logs.mkdir(parents=True, exist_ok=True)
        for log in logs.glob("*.txt"):  # of an earlier run, perhaps of other steps
            log.unlink()

    def left_s(self) -> float:
        """Returns the seconds until the deadline."""
        return self._deadline - time.monotonic()

    def wanted(self, name: str) -> bool:
        """Returns whether a step of this name is asked for."""
        return not self._only or any(part in name for part in self._only)

    def note(self, result: Result) -> bool:
        """Adds a line to the table. Returns whether the step went well."""
        self.results.append(result)
        took = "" if result.seconds is None else f" ({result.seconds:.0f} s)"
        sys.stderr.write(f"=== {result.name}: {result.status}{took}: {result.text}\n")
        return result.status == OK

    def skip(self, name: str, reason: str) -> None:
        """Notes that a step is not begun."""
        if self.wanted(name):
            self.note(Result(name, SKIPPED, reason))

    def step(self, name: str, limit_s: float, work: Callable[[Step], str], *, fraction: float = 0.0) -> bool:
        """Does the work of one step and notes its result, even if it fails. Returns whether it went well.

        Args:
            name: the name of the step.
            limit_s: the seconds that the step may take; fewer if the deadline is nearer.
            work: the function that does the work and returns the text for the table.
            fraction: the fraction of the time until the deadline that the step may take, if that is more.
        """
        if not self.wanted(name):
            return False
        limit_s = max(limit_s * self._patience, fraction * self.left_s())
        if self.left_s() < min(limit_s, _LEAST_S):
            self.skip(name, "out of time")
            return False
        began = time.monotonic()
        log = self._logs / f"{'-'.join(''.join(c if c.isalnum() else ' ' for c in name).split())}.txt"
        step = Step(log, min(limit_s, self.left_s()))
        try:
            sys.stderr.write(f"=== {name} ...\n")
            status, text = OK, work(step)
        except AbsentError as absent:
            status, text = SKIPPED, str(absent)
        except StepError as failure:
            status, text = FAILED, str(failure)
        except Exception as error:  # an error of this program: the other steps still run
            status, text = FAILED, f"error in gpu-check itself: {type(error).__name__}: {error}"
        except Interrupted as interrupted:
            self._end(name, FAILED, str(interrupted), began, log)
            raise
        return self._end(name, status, text, began, log)

    def _end(self, name: str, status: str, text: str, began: float, log: Path) -> bool:
        _end_orphans(self._others)
        return self.note(Result(name, status, text, time.monotonic() - began, log if log.stat().st_size else None))


# Processes ------------------------------------------------------------------------------------------------------


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all that is left of its session."""
    for sent, seconds in ((signal.SIGTERM, _KILL_AFTER_S), (signal.SIGKILL, 1.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with suppress(subprocess.TimeoutExpired):  # a process that hangs in a driver cannot be ended: it is left
            process.wait(seconds)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return


def adopt_orphans(adopt: bool = True) -> None:
    """Makes processes that a killed launcher leaves behind children of this process, so that a runner can end them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _end_orphans(others: Collection[int]) -> None:
    """Ends the processes that a step has left behind: all children of this process except ``others``."""
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
    """Returns the ids of the child processes of this process."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended meanwhile
            parent = stat.read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.add(int(stat.parent.name))
    return found
