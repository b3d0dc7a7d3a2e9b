"""Times of contenders that take turns, so that a busy minute of the machine meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pycollective.bench.contenders import Contender, Program
from pycollective.bench.works import Work, count_wrong, expected, operands
from pycollective.mpi import MPI

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


def measure(
    comm: MPI.Intracomm,
    work: Work,
    contenders: Sequence[Contender],
    *,
    calls: int,
    warmup: int,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Checks and times all contenders that have such a work.

    Args:
        comm: the ranks.
        work: what to do.
        contenders: the same on all ranks.
        calls: timed calls of each.
        warmup: calls before, not timed.
        tick: called after each round of each contender.
    """
    able = {one.name: (one, program) for one in contenders if (program := one.program(work)) is not None}
    wrong = {name: _wrong(comm, work, one) for name, (one, _) in able.items()}
    runs = {name: _runner(comm, work, program) for name, (_, program) in able.items()}
    for run in runs.values():
        for _ in range(warmup):
            run()
    rounds = min(ROUNDS, calls)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name, run in runs.items():
            run()  # another contender's arrays were in the caches
            for _ in range(turn, calls, rounds):
                comm.Barrier()
                started = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - started)
            tick()
    return {
        name: _timing(comm, seconds[name], work.loop, wrong[name], program.participants)
        for name, (_, program) in able.items()
    }


def _rows(comm: MPI.Intracomm, work: Work, participants: int, *, zeros: bool = False) -> list[list[np.ndarray]]:
    n = comm.size * participants
    return [operands(work, comm.rank * participants + i, n, zeros=zeros) for i in range(participants)]


def _wrong(comm: MPI.Intracomm, work: Work, contender: Contender) -> int:
    """Of a loop, the same program with two turns is checked: the values of many would overflow."""
    work = replace(work, loop=min(work.loop, 2))
    program = contender.program(work)
    assert program is not None
    own = program.participants
    times = work.loop if program.chains else 1
    wrong = 0
    for i, got in enumerate(program.get(program.run(program.put(_rows(comm, work, own))))):
        wrong += count_wrong(work, got, expected(work, comm.rank * own + i, comm.size * own, times), program.tolerance)
    return int(comm.allreduce(wrong))


def _runner(comm: MPI.Intracomm, work: Work, program: Program) -> Callable[[], None]:
    operand = program.put(_rows(comm, work, program.participants, zeros=True))

    def run() -> None:
        nonlocal operand
        result = program.run(operand)
        if program.feeds:
            operand = result

    return run


def _timing(comm: MPI.Intracomm, seconds: list[float], loop: int, wrong: int, participants: int) -> Timing:
    slowest = np.empty(len(seconds))
    comm.Allreduce(np.array(seconds), slowest, MPI.MAX)
    us = slowest / loop * 1e6
    return Timing(float(np.median(us)), float(us.min()), float(np.percentile(us, 99)), wrong, participants)
