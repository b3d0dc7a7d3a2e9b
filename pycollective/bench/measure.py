"""Measures implementations in turns, so that a busy minute of the machine meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from pycollective.bench.implementations import Implementation, Program
from pycollective.bench.workloads import Workload, count_wrong, expected, operands
from pycollective.transport.mpi import MPI

ROUNDS = 5
"""How many turns each implementation gets."""


@dataclass(frozen=True)
class Timing:
    """The times of one implementation for one workload. The time of a call is that of its slowest rank.

    Attributes:
        median_us: the median time of a call, in microseconds.
        min_us: the time of the fastest call.
        p99_us: the time that 99 of 100 calls did not exceed.
        wrong: the number of wrong elements of all participants.
        participants: the number of participants of each rank.
    """

    median_us: float
    min_us: float
    p99_us: float
    wrong: int
    participants: int


@dataclass(frozen=True)
class Validation:
    """What a runner finds when it checks the results of a workload.

    Attributes:
        wrong: the number of wrong elements in this process.
        participants: the number of participants of this process.
    """

    wrong: int
    participants: int


class Runner(Protocol):
    """Runs an implementation, in this process or in a subprocess.

    Attributes:
        name: the implementation's name.
    """

    name: str

    def prepare(self, workload: Workload, warmup: int) -> Validation | None:
        """Validates the results, and makes ``warmup`` calls; None where the implementation has no such program."""

    def time_calls(self, calls: int) -> list[float]:
        """The time of each of ``calls`` calls in this process, in seconds."""


class InProcess:
    """Runs an implementation in this process."""

    def __init__(self, implementation: Implementation, rank: int, size: int, barrier: Callable[[], Any]) -> None:
        """Takes an implementation.

        Args:
            implementation: the implementation, the same on all ranks.
            rank: the number of this process among those that run it.
            size: the number of these processes.
            barrier: makes these processes wait for each other, by the implementation's own means. It comes before each
                timed call.
        """
        self.name = implementation.name
        self._implementation = implementation
        self._rank = rank
        self._size = size
        self._barrier = barrier
        self._run: Callable[[], None] = lambda: None

    def prepare(self, workload: Workload, warmup: int) -> Validation | None:
        self._run = lambda: None  # frees the arrays of the last workload
        program = self._implementation.program(workload)
        if program is None:
            return None
        wrong = self._count_wrong(workload, program)
        self._run = self._runner(workload, program)
        for _ in range(warmup):
            self._run()
        return Validation(wrong, program.participants)

    def time_calls(self, calls: int) -> list[float]:
        self._run()  # brings these arrays into the caches, where another implementation's were
        seconds = []
        for _ in range(calls):
            self._barrier()
            started = time.perf_counter()
            self._run()
            seconds.append(time.perf_counter() - started)
        self._barrier()  # a rank that went on would poll while another still measures
        return seconds

    def _operands(self, workload: Workload, participants: int, *, zeros: bool = False) -> list[list[np.ndarray]]:
        n, first = self._size * participants, self._rank * participants
        return [operands(workload, first + i, n, zeros=zeros) for i in range(participants)]

    def _count_wrong(self, workload: Workload, program: Program) -> int:
        """The number of wrong elements. A longer loop is checked with two calls: many would overflow the values."""
        if not program.checked:
            return 0
        if workload.loop > 2:
            workload = replace(workload, loop=2)
            shorter = self._implementation.program(workload)
            assert shorter is not None
            program = shorter
        own = program.participants
        times = workload.loop if program.chained and workload.is_chained else 1
        results = program.get(program.run(program.put(self._operands(workload, own))))
        wrong = 0
        for i, got in enumerate(results):
            want = expected(workload, self._rank * own + i, self._size * own, times)
            wrong += count_wrong(workload, got, want, program.tolerance)
        return wrong

    def _runner(self, workload: Workload, program: Program) -> Callable[[], None]:
        operand = program.put(self._operands(workload, program.participants, zeros=True))

        def run() -> None:
            nonlocal operand
            result = program.run(operand)
            if program.feeds_back:
                operand = result

        return run


def measure(
    comm: MPI.Intracomm,
    workload: Workload,
    runners: Sequence[Runner],
    *,
    calls: int,
    warmup: int,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Validates and times all implementations that have a program for a workload. All ranks must make this call.

    Args:
        comm: the ranks.
        workload: what to run.
        runners: the runners of the same implementations on all ranks.
        calls: the number of timed calls of each implementation.
        warmup: the number of calls before them, which are not timed.
        tick: a function to call after each turn.
    """
    prepared = ((runner, runner.prepare(workload, warmup)) for runner in runners)
    able = {runner.name: (runner, validation) for runner, validation in prepared if validation is not None}
    rounds = min(ROUNDS, calls)
    seconds: dict[str, list[float]] = {name: [] for name in able}
    for i in range(rounds):
        for name, (runner, _) in able.items():
            seconds[name] += runner.time_calls(calls // rounds + (i < calls % rounds))
            tick()
    return {name: _timing(comm, seconds[name], workload.loop, validation) for name, (_, validation) in able.items()}


def _timing(comm: MPI.Intracomm, seconds: list[float], loop: int, validation: Validation) -> Timing:
    slowest = np.empty(len(seconds))
    comm.Allreduce(np.array(seconds), slowest, MPI.MAX)
    us = slowest / loop * 1e6
    wrong = int(comm.allreduce(validation.wrong))
    return Timing(float(np.median(us)), float(us.min()), float(np.percentile(us, 99)), wrong, validation.participants)
