"""Times of contenders that take turns, so that a busy minute of the machine meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from pycollective.bench.contenders import Contender, Program
from pycollective.bench.workloads import Workload, count_wrong, expected, operands
from pycollective.transport.mpi import MPI

ROUNDS = 5


@dataclass(frozen=True)
class Timing:
    """Of one contender at one work.

    Attributes:
        median_us: of all calls, each as its slowest rank saw it, in microseconds.
        min_us: the fastest call.
        p99_us: 99 of 100 calls were faster.
        wrong: results that differed, over all participants.
        participants: of each rank.
    """

    median_us: float
    min_us: float
    p99_us: float
    wrong: int
    participants: int


@dataclass(frozen=True)
class Prepared:
    """What a runner says of a work before it takes times.

    Attributes:
        wrong: results of this process that differed.
        participants: of this process.
    """

    wrong: int
    participants: int


class Runner(Protocol):
    """Runs a contender: in this process, or in one beside it.

    Attributes:
        name: of the contender.
    """

    name: str

    def prepare(self, work: Workload, warmup: int) -> Prepared | None:
        """Checks what a call gives and makes ``warmup`` more; None where the contender has no such work."""

    def turn(self, calls: int) -> list[float]:
        """The seconds that each of ``calls`` calls takes here."""


class InProcess:
    """Runs a contender in this process."""

    def __init__(self, contender: Contender, rank: int, size: int, barrier: Callable[[], Any]) -> None:
        """Keeps a contender.

        Args:
            contender: the same on all ranks.
            rank: of this process, among those that run it.
            size: their number.
            barrier: lets them wait for each other, by the contender's own means; comes before each call.
        """
        self.name = contender.name
        self._contender = contender
        self._rank = rank
        self._size = size
        self._barrier = barrier
        self._run: Callable[[], None] = lambda: None

    def prepare(self, work: Workload, warmup: int) -> Prepared | None:
        self._run = lambda: None  # the arrays of the last work may go
        program = self._contender.program(work)
        if program is None:
            return None
        wrong = self._wrong(work, program)
        self._run = self._runner(work, program)
        for _ in range(warmup):
            self._run()
        return Prepared(wrong, program.participants)

    def turn(self, calls: int) -> list[float]:
        self._run()  # another contender's arrays were in the caches
        seconds = []
        for _ in range(calls):
            self._barrier()
            started = time.perf_counter()
            self._run()
            seconds.append(time.perf_counter() - started)
        self._barrier()  # no rank goes on, and polls, while another still measures
        return seconds

    def _rows(self, work: Workload, participants: int, *, zeros: bool = False) -> list[list[np.ndarray]]:
        n, first = self._size * participants, self._rank * participants
        return [operands(work, first + i, n, zeros=zeros) for i in range(participants)]

    def _wrong(self, work: Workload, program: Program) -> int:
        """Of a longer loop, the same program with two turns is checked: the values of many would overflow."""
        if not program.checked:
            return 0
        if work.loop > 2:
            work = replace(work, loop=2)
            shorter = self._contender.program(work)
            assert shorter is not None
            program = shorter
        own = program.participants
        times = work.loop if program.chains else 1
        wrong = 0
        for i, got in enumerate(program.get(program.run(program.put(self._rows(work, own))))):
            want = expected(work, self._rank * own + i, self._size * own, times)
            wrong += count_wrong(work, got, want, program.tolerance)
        return wrong

    def _runner(self, work: Workload, program: Program) -> Callable[[], None]:
        operand = program.put(self._rows(work, program.participants, zeros=True))

        def run() -> None:
            nonlocal operand
            result = program.run(operand)
            if program.feeds:
                operand = result

        return run


def measure(
    comm: MPI.Intracomm,
    work: Workload,
    runners: Sequence[Runner],
    *,
    calls: int,
    warmup: int,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Checks and times all contenders that have such a work.

    Args:
        comm: the ranks.
        work: what to do.
        runners: of the same contenders on all ranks.
        calls: timed calls of each.
        warmup: calls before, not timed.
        tick: called after each turn.
    """
    able = {one.name: (one, prepared) for one in runners if (prepared := one.prepare(work, warmup)) is not None}
    rounds = min(ROUNDS, calls)
    seconds: dict[str, list[float]] = {name: [] for name in able}
    for turn in range(rounds):
        for name, (one, _) in able.items():
            seconds[name] += one.turn(calls // rounds + (turn < calls % rounds))
            tick()
    return {name: _timing(comm, seconds[name], work.loop, prepared) for name, (_, prepared) in able.items()}


def _timing(comm: MPI.Intracomm, seconds: list[float], loop: int, prepared: Prepared) -> Timing:
    slowest = np.empty(len(seconds))
    comm.Allreduce(np.array(seconds), slowest, MPI.MAX)
    us = slowest / loop * 1e6
    wrong = int(comm.allreduce(prepared.wrong))
    return Timing(float(np.median(us)), float(us.min()), float(np.percentile(us, 99)), wrong, prepared.participants)
