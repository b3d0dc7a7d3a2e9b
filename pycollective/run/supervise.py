"""A launcher as a child of this process: signals go on to it, and nothing of it is left running afterwards.

This process blocks the signals that it passes on, and asks for them. So none of them can end it while a launcher runs,
or get lost between the end of one launcher and the start of the next.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals by which a user or a batch system ends a job."""

_FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Launchers pass these on to the ranks, which may save a checkpoint, for example."""

_SI_KERNEL = 0x80
"""SI_KERNEL: a terminal has sent the signal, to all processes of its foreground group."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_GRACE_S, _KILL_TIMEOUT_S, _STEP_S = 2.0, 10.0, 0.05
"""How long processes may take to end by themselves, how long to go when they are killed, and how often to look."""

_LAUNCHER_TIMEOUT_S = 5.0
"""How long a launcher may take to end when its job has ended by a fault."""

_libc = ctypes.CDLL(None)


class Ended(NamedTuple):
    """How a launcher ended.

    Attributes:
        status: its exit status, as a shell has it: 128 and the number of the signal that ended it. 1 if the launcher
            ended with 0 after it had said that a host has gone.
        stopped: whether this process got a signal that ends a job.
        seconds: how long it ran.
        launcher: its process number.
    """

    status: int
    stopped: bool
    seconds: float
    launcher: int


class FaultPatterns(NamedTuple):
    """What stands on the standard error of a launcher whose exit status does not tell each fault.

    Attributes:
        lost_host: a regular expression of what the launcher prints when a host has gone away.
        job_failure: a regular expression of what the launcher or a rank prints when a job ends by a fault. The launcher
            may wait for ever then, for a host that it cannot reach.
    """

    lost_host: str
    job_failure: str


class _LauncherStderr:
    """The standard error of a launcher, which this process passes on and reads.

    Attributes:
        lost_host: whether the launcher has printed that a host has gone away.
        ended: when the text of a fault was read; None: not yet.
    """

    lost_host = False
    ended: float | None = None

    def __init__(self, pipe: int, patterns: FaultPatterns) -> None:
        self._pipe = pipe
        self._lost_host = re.compile(patterns.lost_host.encode())
        self._job_failure = re.compile(patterns.job_failure.encode())
        self._line = b""

    def forward(self, seconds: float) -> None:
        """Passes on what comes within some seconds, and then what there is without waiting."""
        while select.select([self._pipe], [], [], seconds)[0]:
            part = os.read(self._pipe, 1 << 16)
            if not part:  # nobody writes to it any more
                time.sleep(seconds)
                return
            os.write(sys.stderr.fileno(), part)
            *lines, self._line = (self._line + part).split(b"\n")
            self.lost_host = self.lost_host or any(self._lost_host.search(line) for line in lines)
            if self.ended is None and any(self._job_failure.search(line) for line in lines):
                self.ended = time.monotonic()
            seconds = 0


class Supervisor:
    """Starts launchers, one after another. What they leave running becomes a child of this process.

    It needs a process with one thread, whose signals it blocks for good.
    """

    def __init__(self) -> None:
        # What nohup or a shell lets this process ignore, the launcher ignores, too.
        self._stop_signals = {number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
        self._signals = {signal.SIGCHLD, *_FORWARDED_SIGNALS, *self._stop_signals}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(self, command: Sequence[str], environ: Mapping[str, str], patterns: FaultPatterns | None = None) -> Ended:
        """Runs a launcher to its end. Signals that this process gets go on to it.

        Args:
            command: its command line.
            environ: its variables.
            patterns: what stands on its standard error after a fault; None if its exit status tells each fault. A
                launcher that does not end soon after ``patterns.job_failure`` is killed.

        Raises:
            OSError: there is no such launcher.
        """
        started, stopped = time.monotonic(), False
        launcher = self._start(command, environ, errors=subprocess.PIPE if patterns else None)
        errors = _LauncherStderr(launcher.stderr.fileno(), patterns) if patterns and launcher.stderr else None
        while launcher.poll() is None:
            if errors is None:
                got: signal.struct_siginfo | None = signal.sigwaitinfo(self._signals)
            else:
                errors.forward(_STEP_S)
                got = signal.sigtimedwait(self._signals, 0)
                if errors.ended is not None and time.monotonic() - errors.ended > _LAUNCHER_TIMEOUT_S:
                    launcher.kill()
                    sys.stderr.write(
                        f"pycollective: the launcher has not ended {_LAUNCHER_TIMEOUT_S:.0f} s after its job, as when "
                        "it cannot reach a host; killed it.\n"
                    )
                    launcher.wait()
            if got is None or got.si_signo == signal.SIGCHLD:
                continue
            stopped = stopped or got.si_signo in self._stop_signals
            if got.si_code != _SI_KERNEL:  # else the launcher, which is in the same group, has got it already
                launcher.send_signal(got.si_signo)
        seconds = time.monotonic() - started
        if errors is not None:
            errors.forward(0)
        status = launcher.returncode if launcher.returncode >= 0 else 128 - launcher.returncode
        if errors is not None and errors.lost_host:
            status = status or 1
        return Ended(status, stopped or self.pending_stop_signal() is not None, seconds, launcher.pid)

    def pending_stop_signal(self) -> int | None:
        """The signal that has told this process to end while no launcher ran, if there is one."""
        return min(signal.sigpending() & self._stop_signals, default=None)

    def run_side_by_side(
        self, commands: Mapping[str, Sequence[str]], environ: Mapping[str, str], seconds: float
    ) -> dict[str, bool]:
        """Runs commands side by side. Which of them end with status 0 in time?

        A signal that tells this process to end ends them, too.
        """
        deadline = time.monotonic() + seconds
        running = {name: self._start(command, environ, silent=True) for name, command in commands.items()}
        while any(process.poll() is None for process in running.values()) and self.pending_stop_signal() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            signal.sigtimedwait({signal.SIGCHLD}, min(left, 10 * _STEP_S))
        for process in running.values():
            process.terminate()  # of those that still run
        for process in running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            process.kill()
            process.wait()
        end_children()
        return {name: process.returncode == 0 for name, process in running.items()}

    def _start(
        self, command: Sequence[str], environ: Mapping[str, str], *, silent: bool = False, errors: int | None = None
    ) -> subprocess.Popen[bytes]:
        def become_child() -> None:
            # A launcher that is terminated ends its ranks. It must not go on when this process has been killed.
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

        files = subprocess.DEVNULL if silent else None
        # A function may run between fork and exec because this process has one thread.
        return subprocess.Popen(
            command, env=dict(environ), stdin=files, stdout=files, stderr=errors or files, preexec_fn=become_child
        )


def end_children() -> None:
    """Waits until this process has no children. Those that do not end by themselves are killed."""
    started = time.monotonic()
    while (waited := time.monotonic() - started) < _GRACE_S + _KILL_TIMEOUT_S:
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return
        if waited > _GRACE_S:
            for pid in _children():  # their numbers belong to them until this process has waited for them
                os.kill(pid, signal.SIGKILL)
        time.sleep(_STEP_S)


def _children() -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(process.name))
    return found
