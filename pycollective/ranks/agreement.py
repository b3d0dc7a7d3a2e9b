"""At a function's first call the ranks compare what they traced: a difference is an error on all ranks, not a hang.

Only calls communicate with other ranks. Tracing, lowering and compiling do not, since a rank may trace alone: for an
uneven batch, after ``jax.clear_caches()``, for ``jax.eval_shape`` or ``lower``. So a trace makes a report
(:func:`report_program`), and the call that caused the trace compares it (:func:`compare_reports`): once, when all ranks
make the first call. A report is about the whole program, and not about a function inside it: on some ranks JAX may have
traced such a function before, and does not trace it again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from pycollective.config import config
from pycollective.errors import CollectiveMismatch, fail
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.meeting import FIRST_CALL, OtherCall, Sameness, complete, digest_of, meet
from pycollective.ranks.out_of_band import Steps

T = TypeVar("T")


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
            key = FIRST_CALL, report.name, digest_of(report.outcome)
            complete(report.comm, report.where, report.name, key, functools.partial(compare, report))


_Texts = list[str] | str
"""The texts of a program's lines, or an error."""


def compare(report: TraceReport) -> Steps[None]:
    """The comparison of a report with those of the other ranks; docs/design.md has its invariants.

    Where all programs are equal, only their digests travel.
    """
    comm, own = report.comm, report.outcome
    texts: _Texts = own if isinstance(own, str) else [line.text for line in own]
    digests = _Digests(Sameness.of(comm, texts), Sameness.of(comm, own))
    met = yield from meet(comm, FIRST_CALL, digests, _Digests.followed_by)
    if isinstance(met, OtherCall):
        if isinstance(own, list):  # if the trace of this rank failed, its error is raised already
            _refuse(report, CollectiveMismatch, [*texts, _END][0], f"{met.what} on rank {met.rank}", _ALIKE)
    elif met.texts.other is not None:
        yield from _compare_texts(report, texts, met.texts)
    elif met.whole.other is not None and isinstance(own, list):
        yield from _compare_origins(report, own)


class _Digests(NamedTuple):
    texts: Sameness
    whole: Sameness  # with the origins of operands

    def followed_by(self, later: _Digests) -> _Digests:
        return _Digests(self.texts.followed_by(later.texts), self.whole.followed_by(later.whole))


class _Difference(NamedTuple):
    """The first difference between the programs of two ranks, as the first of them sees it."""

    here: str
    there: str
    is_error: bool


def _compare_texts(report: TraceReport, own: _Texts, found: Sameness) -> Steps[None]:
    """Raises an error on each rank whose trace has not failed. The texts of the program of some rank differ."""
    out, other = report.comm._out_of_band, found.other
    assert other is not None
    of_other = yield from out.hand(own, other)
    told = None if of_other is None else (own, _difference(own, of_other))
    first, difference = yield from out.tell(told)
    if isinstance(own, str):
        return
    rank = other
    if digest_of(own) != found.digest:
        rank, difference = 0, _difference(own, first)
    kind = RuntimeError if difference.is_error else CollectiveMismatch
    _refuse(report, kind, difference.here, f"{difference.there} on rank {rank}", _ALIKE)


def _compare_origins(report: TraceReport, own: list[CollectiveLine]) -> Steps[None]:
    """Raises an error on all ranks if two of them make the same reductions in another order. The texts are equal."""
    comm, out = report.comm, report.comm._out_of_band
    mine = {tuple(line.origin for line in own): comm.rank}
    lists = yield from out.reduce(mine, lambda lower, higher: {**higher, **lower})
    told = _reordered_pair([line.text for line in own], lists) if comm.rank == 0 else None
    pair = yield from out.tell(told)
    if pair is None:
        return
    remedy = "Sum in the same order on all ranks. A set of strings has another order in each process: sort it."
    programs = [
        (rank, [line._replace(origin=origin) for line, origin in zip(own, origins, strict=True)])
        for rank, origins in pair
    ]
    for rank, other in programs:
        if (moved := _first_reordered(own, other)) is not None:
            number, place = moved
            here = f"{own[number].text} as collective {number}"
            _refuse(report, CollectiveMismatch, here, f"its operands in collective {place} on rank {rank}", remedy)
    (rank, one), (other_rank, other) = programs
    moved = _first_reordered(one, other)
    assert moved is not None
    number, place = moved
    expected = f"the same program on every rank, on rank {rank} with {own[number].text} as collective {number}"
    got = f"its operands in collective {place} on rank {other_rank}"
    fail(CollectiveMismatch, report.where, comm, expected, got, remedy)


_ALIKE = "All ranks must call the same functions in the same order, with the same shapes and dtypes."

_END = "no further collective"


def _refuse(report: TraceReport, kind: type[RuntimeError], here: str, there: str, remedy: str) -> NoReturn:
    fail(kind, report.where, report.comm, f"the same program on every rank, here with {here}", there, remedy)


def _difference(own: _Texts, other: _Texts) -> _Difference:
    """The first difference between two programs whose texts differ."""
    if isinstance(other, str):
        return _Difference("no error", other, is_error=True)
    for here, there in itertools.zip_longest([own] if isinstance(own, str) else own, other, fillvalue=_END):
        if here != there:
            return _Difference(here, there, is_error=False)
    raise AssertionError("called for programs that differ")


def _first_reordered(own: Sequence[Hashable], other: Sequence[Hashable]) -> tuple[int, int] | None:
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


_Origins = tuple[int, ...]


def _reordered_pair(
    texts: Sequence[str], lists: Mapping[_Origins, int]
) -> tuple[tuple[int, _Origins], tuple[int, _Origins]] | None:
    """The first two ranks that make the same reductions in another order, with the origins of their operands.

    Args:
        texts: the texts of the lines, the same on all ranks.
        lists: the lowest rank that has a list of origins, for each list.

    Example:
        >>> _reordered_pair(["psum"] * 3, {(1, 2, 3): 0, (1, 4, 3): 1, (3, 4, 1): 5, (3, 5, 1): 6})
        ((0, (1, 2, 3)), (5, (3, 4, 1)))
        >>> _reordered_pair(["psum", "psum", "pmax"], {(1, 2, 3): 0, (1, 3, 2): 1, (4, 1, 3): 2})
    """
    # An operand is a text and an origin. Of two ranks that reduce in another order, each has two operands of the other
    # one at another place. So an operand that all ranks have at one and the same place, if they have it, takes no part.
    by_rank = sorted(lists, key=lists.__getitem__)
    differ = [i for i, origins in enumerate(zip(*by_rank, strict=True)) if len(set(origins)) > 1]
    places: dict[tuple[str, int], int | None] = {}
    for origins in by_rank:
        for i in differ:
            operand = texts[i], origins[i]
            if places.setdefault(operand, i) != i:
                places[operand] = None  # several places
    of_several: dict[tuple[Hashable, ...], _Origins] = {}
    for origins in by_rank:
        operands = [(texts[i], origins[i]) for i in differ]
        short = tuple(place if (place := places[operand]) is not None else operand for operand in operands)
        of_several.setdefault(short, origins)
    for one, other in itertools.combinations(of_several, 2):
        if _first_reordered(one, other) is not None:
            first, second = of_several[one], of_several[other]
            return (lists[first], first), (lists[second], second)
    return None
