"""At a function's first call the ranks compare what they traced: a difference is an error on all ranks, not a hang.

Only calls communicate with other ranks. Tracing, lowering and compiling do not, since a rank may trace alone: for an
uneven batch, after ``jax.clear_caches()``, for ``jax.eval_shape`` or ``lower``. So a trace makes a report
(:func:`report_program`), and the call that caused the trace compares it (:func:`compare_reports`): once, when all ranks
make the first call. A report is about the whole program, and not about a function inside it: on some ranks JAX may have
traced such a function before, and does not trace it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from pycollective.config import config
from pycollective.errors import message
from pycollective.faults import rank_exit
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.setup import timeout
from pycollective.transport.watch import waiting

T = TypeVar("T")

_NOTICE_S = 30.0
"""How long a rank waits for the first calls of other ranks before it prints a notice."""


class TraceReport(NamedTuple):
    """What one rank found when it traced a function over named axes.

    Attributes:
        comm: the ranks of the axes.
        where: the operation, for messages.
        name: the name of the function, for messages. It may differ between ranks.
        outcome: the lines of the program that must be the same on all ranks; or the error that ended the trace.
    """

    comm: Communicator
    where: str
    name: str
    outcome: list[str] | str


_collecting: list[list[TraceReport]] = []
"""The reports of each first call that is under way, the innermost call last."""


@contextlib.contextmanager
def collect_reports() -> Iterator[list[TraceReport]]:
    """Collects the reports of the traces inside."""
    reports: list[TraceReport] = []
    _collecting.append(reports)
    try:
        yield reports
    finally:
        _collecting.pop()


def report_errors(comm: Communicator, where: str, fun: Callable[..., Any], trace: Callable[[], T]) -> T:
    """Returns ``trace()``. If it raises, the call that collects reports gets one of the error.

    Args:
        comm: the ranks.
        where: the operation, for messages.
        fun: the function, whose name is for messages.
        trace: traces the function.

    Raises:
        ValueError: ``comm`` was freed.
    """
    comm.check_live(where)
    try:
        return trace()
    except Exception as error:
        if _collecting:
            _collecting[-1].append(TraceReport(comm, where, _name(fun), f"{type(error).__name__}: {error}"))
        raise


def report_program(where: str, fun: Callable[..., Any], lines: Callable[[], Mapping[Communicator, list[str]]]) -> None:
    """Makes a report for each communicator of a program, if a call collects reports.

    Args:
        where: the operation, for messages.
        fun: the function, whose name is for messages.
        lines: returns for each communicator the lines of the program that must be the same on its ranks.
    """
    if _collecting:
        _collecting[-1].extend(TraceReport(comm, where, _name(fun), own) for comm, own in lines().items())


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", repr(fun))


def compare_reports(reports: list[TraceReport]) -> None:
    """Compares each report with those of the other ranks of its communicator, which must make this call as well.

    Raises:
        RuntimeError: the trace of another rank failed, or differs, or does not come within the timeout of ``init``.
    """
    for report in reports:
        if report.comm.size > 1 and config.check.when != 0:
            others = gather_from_all(report.comm, report.where, report.name, report.outcome)
            # If the trace of this rank failed, its error is raised already.
            if isinstance(report.outcome, list):
                _compare(report, report.outcome, others)


def _compare(report: TraceReport, own: list[str], others: list[Any]) -> None:
    for rank, other in enumerate(others):
        if other != own:
            here, there = _difference(own, other)
            raise RuntimeError(
                message(
                    report.where,
                    f"the same program on every rank, here with {here}",
                    f"{there} on rank {rank}",
                    "All ranks must call the same functions in the same order, with the same shapes and dtypes.",
                    rank=report.comm.rank,
                    size=report.comm.size,
                )
            )


def _difference(own: list[str], other: list[str] | str) -> tuple[str, str]:
    """The first line that differs, here and on the other rank."""
    if isinstance(other, str):
        return "no error", other
    end = "no further collective"
    for i in range(max(len(own), len(other))):
        here, there = (lines[i] if i < len(lines) else end for lines in (own, other))
        if here != there:
            return here, there
    raise AssertionError("called for programs that differ")


def gather_from_all(comm: Communicator, where: str, name: str, own: Any) -> list[Any]:
    """Returns ``own`` of every rank. All ranks must make this call; it sleeps until they do, since tracing takes long.

    Args:
        comm: the ranks.
        where: the operation, for messages.
        name: the function that is called, for messages.
        own: an object that can be pickled.

    Raises:
        RuntimeError: another rank does not make this call within the timeout of ``init``.
    """
    missing = f"the other ranks to call {name} too"
    remedy = "Look for a rank that calls something else, or has ended."
    limit = timeout()
    notice = f"rank {comm.rank} of {comm.size} waits for {missing}. {remedy}"

    def wait(has_come: Callable[[], bool]) -> None:
        for waited in rank_exit.poll_until(has_come, 0.01, _NOTICE_S, notice):
            if limit is not None and waited > limit:
                got = f"no call from some of them for {waited:.0f} s"
                raise RuntimeError(message(where, missing, got, remedy, rank=comm.rank, size=comm.size))

    comm.check_live(where)
    with waiting("the first call of a function", comm.identity):
        return comm.out_of_band.allgather(own, wait)
