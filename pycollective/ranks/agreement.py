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
from typing import Any, NamedTuple, NoReturn, TypeVar

from pycollective.config import config
from pycollective.errors import CollectiveMismatch, fail, message
from pycollective.faults import rank_exit
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.setup import timeout
from pycollective.transport.watch import waiting

T = TypeVar("T")

_LATER_S = 10.0
"""How much later than its limit a wait of this file raises. Before that the monitor reports the wait, with the ranks
that are missing, and ends the job (native/monitor/monitor.h)."""


class CollectiveLine(NamedTuple):
    """A collective of a program, as ranks compare it.

    Attributes:
        text: the collective, with the shapes and dtypes of its operands. It must be the same on all ranks.
        origin: of a reduction, how its operands come from the arguments of the program, as a number; else -1. Ranks may
            compute other operands, but not the same operands in another order.
    """

    text: str
    origin: int = -1


class TraceReport(NamedTuple):
    """What one rank found when it traced a function over named axes.

    Attributes:
        comm: the ranks of the axes.
        where: the operation, for messages.
        name: the name of the function, for messages. It may differ between ranks.
        outcome: the lines of the program; or the error that ended the trace.
    """

    comm: Communicator
    where: str
    name: str
    outcome: list[CollectiveLine] | str


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
    """Returns ``trace()``. If it raises, the error becomes a report for the call that collects reports.

    Args:
        comm: the ranks.
        where: the operation, for messages.
        fun: the function, whose name is for messages.
        trace: traces the function.

    Raises:
        ValueError: ``comm`` was freed.
    """
    comm._check_live(where)
    try:
        return trace()
    except Exception as error:
        if _collecting:
            _collecting[-1].append(TraceReport(comm, where, _name(fun), f"{type(error).__name__}: {error}"))
        raise


def report_program(
    where: str, fun: Callable[..., Any], lines: Callable[[], Mapping[Communicator, list[CollectiveLine]]]
) -> None:
    """Makes a report for each communicator of a program, if a call collects reports.

    Args:
        where: the operation, for messages.
        fun: the function, whose name is for messages.
        lines: returns for each communicator the lines of the program.
    """
    if _collecting:
        _collecting[-1].extend(TraceReport(comm, where, _name(fun), own) for comm, own in lines().items())


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", repr(fun))


def compare_reports(reports: list[TraceReport]) -> None:
    """Compares each report with those of the other ranks of its communicator, which must make this call as well.

    Raises:
        CollectiveMismatch: the trace of another rank differs.
        RuntimeError: the trace of another rank failed, or does not come within the timeout of ``init``.
    """
    for report in reports:
        if report.comm.size > 1 and config.check.when != 0:
            others = gather_from_all(report.comm, report.where, report.name, report.outcome)
            # If the trace of this rank failed, its error is raised already.
            if isinstance(report.outcome, list):
                _compare(report, report.outcome, others)


def _compare(report: TraceReport, own: list[CollectiveLine], others: list[Any]) -> None:
    for rank, other in enumerate(others):
        if other == own:
            continue
        if isinstance(other, str):
            _refuse(report, RuntimeError, rank, "no error", other, _ALIKE)
        here, there = ([_text(line) for line in lines] for lines in (own, other))
        if here != there:
            _refuse(report, CollectiveMismatch, rank, *_difference(here, there), _ALIKE)
        if (moved := _first_reordered(own, other)) is not None:
            number, place = moved
            _refuse(
                report,
                CollectiveMismatch,
                rank,
                f"{own[number].text} as collective {number}",
                f"its operands in collective {place}",
                "Sum in the same order on all ranks. A set of strings has another order in each process: sort it.",
            )


_ALIKE = "All ranks must call the same functions in the same order, with the same shapes and dtypes."


def _refuse(report: TraceReport, kind: type[RuntimeError], rank: int, here: str, there: str, remedy: str) -> NoReturn:
    expected = f"the same program on every rank, here with {here}"
    fail(kind, report.where, report.comm, expected, f"{there} on rank {rank}", remedy)


def _text(line: Any) -> str:
    """The text of a line that ranks compare. A rank in a call that is no function's first call sends other objects."""
    return line.text if isinstance(line, CollectiveLine) else str(line)


def _difference(own: list[str], other: list[str]) -> tuple[str, str]:
    """The first line that differs, here and on the other rank."""
    end = "no further collective"
    for i in range(max(len(own), len(other))):
        here, there = (lines[i] if i < len(lines) else end for lines in (own, other))
        if here != there:
            return here, there
    raise AssertionError("called for programs that differ")


def _first_reordered(own: list[CollectiveLine], other: list[CollectiveLine]) -> tuple[int, int] | None:
    """The place of the first reduction that the other rank makes at another place, and that place.

    It is None if there is no such reduction. The other rank's line at the first place must be at another place here,
    too: otherwise the ranks compute different operands, which is allowed.

    Example:
        >>> a, b, c = (CollectiveLine("psum", origin) for origin in (1, 2, 3))
        >>> _first_reordered([a, b], [b, a]), _first_reordered([a, b], [a, c]), _first_reordered([a, b, c], [a, c, b])
        ((0, 1), None, (1, 2))
    """
    differ = [i for i, (here, there) in enumerate(zip(own, other, strict=True)) if here != there]
    here, there = ({lines[i]: i for i in reversed(differ)} for lines in (own, other))
    return next(((i, there[own[i]]) for i in differ if own[i] in there and other[i] in here), None)


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
    comm._check_live(where)
    with waiting("the first call of a function", comm._identity):
        return comm._out_of_band.allgather(own, waiter(comm, where, f"call {name}"))


def waiter(comm: Communicator, where: str, what: str) -> Callable[[Callable[[], bool]], None]:
    """A function that sleeps until the function that it is given returns True. The caller records the wait.

    It raises RuntimeError when it has waited for longer than the timeout of ``init``, and no report has ended the job.

    Args:
        comm: the ranks, for messages.
        where: the operation, for messages.
        what: what the other ranks have to do, for messages.
    """
    missing = f"the other ranks to {what} too"
    remedy = "Look for a rank that calls something else, or has ended."
    limit = timeout()

    def wait(has_come: Callable[[], bool]) -> None:
        for waited in rank_exit.poll_until(has_come, 0.01):
            if limit is not None and waited > limit + _LATER_S:
                got = f"no call from some of them for {waited:.0f} s"
                raise RuntimeError(message(where, missing, got, remedy, rank=comm.rank, size=comm.size))

    return wait
