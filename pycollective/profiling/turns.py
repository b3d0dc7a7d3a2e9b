"""Times programs in turns, so that what disturbs the machine for a second meets one time of each program at most."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

import pycollective as pc
from pycollective.planning.curves import Curve
from pycollective.planning.timing import settled_s, slowest_s

Array = Any
Key = TypeVar("Key", bound=Hashable)

TURNS = 5

_SERIES_S, _MOST_CALLS = 0.006, 1000  # of the timed calls of a program in a turn
_LONGEST_S = 0.05  # a call that takes longer is the last one of its curve
_LARGE, _CACHES = 1 << 20, 128 << 20  # bytes: of arguments that are in turns others, and of these together


class Programs(NamedTuple):
    """Programs of rising sizes, whose times are a curve.

    Attributes:
        sizes: the sizes.
        program: returns for a size a function, and its arguments.
    """

    sizes: Sequence[int]
    program: Callable[[int], tuple[Callable[..., Any], list[Array]]]


def measure_curves(
    comm: pc.Communicator, curves: Mapping[Key, Programs], tick: Callable[[int], None]
) -> tuple[dict[Key, Curve], float]:
    """Measures curves on all ranks at once, and how much the machine was disturbed. All ranks must make this call.

    In a first turn programs are compiled and get as fast as they can. Then come :data:`TURNS` turns of all programs, of
    which a program's median counts.

    Args:
        comm: the ranks.
        curves: the programs of each curve.
        tick: a function to call with the number of curves that have had a turn, 1 + :data:`TURNS` times each.

    Returns:
        The curves, and :attr:`Noise.computing <pycollective.planning.profile.Noise.computing>`.
    """
    timed: dict[Key, dict[int, _Timed]] = {}
    for key, (sizes, program) in curves.items():
        timed[key] = {}
        for size in sizes:
            one = timed[key][size] = _Timed(comm, *program(size))
            if one.call_s > _LONGEST_S:
                break
        tick(1)
    for _ in range(TURNS):
        for key, programs in timed.items():
            for size, one in programs.items():
                one.turn(curves[key].program(size)[1])
            tick(1)
    every = [one.seconds for programs in timed.values() for one in programs.values()]
    noise = statistics.median(statistics.mean(seconds) / min(seconds) for seconds in every)
    found = {
        key: Curve.measured({size: statistics.median(one.seconds) for size, one in programs.items()})
        for key, programs in timed.items()
    }
    return found, noise


class _Timed:
    """A program. Its calls come one after the other as in a step.

    Where ranks share a core, a call after a meeting would have to wait for the other ranks' calls as well, and for the
    core to change hands, which takes longer than a small program.

    Attributes:
        call_s: the time of a call in the first turn, in seconds.
        seconds: the times of a call in the others, until all ranks are done.
    """

    def __init__(self, comm: pc.Communicator, function: Callable[..., Any], arguments: list[Array]) -> None:
        self._comm = comm
        self._run = jax.jit(function)
        self.seconds: list[float] = []
        turns = _in_turns(arguments)
        jax.block_until_ready(self._run(*next(turns)))  # compiles it
        # The memory of large results may come from the system in each of some calls, until enough is kept.
        self.call_s = settled_s(lambda: self._series_s(turns, 1), least=6 if _is_large(arguments) else 2)
        self._calls, series_s = 1, self.call_s
        while series_s < _SERIES_S and self._calls < _MOST_CALLS:
            # The ranks' meetings are a part of short series, so the next one may still be too short.
            self._calls = min(self._calls * math.ceil(_SERIES_S / series_s), _MOST_CALLS)
            series_s = self._calls * self._series_s(turns, self._calls)

    def turn(self, arguments: list[Array]) -> None:
        """Two series of calls, of which the second one counts: the first one has others' programs in the caches."""
        turns = _in_turns(arguments)
        self._series_s(turns, self._calls)
        self.seconds.append(self._series_s(turns, self._calls))

    def _series_s(self, turns: Iterator[list[Array]], calls: int) -> float:
        def series() -> None:
            for _ in range(calls):
                jax.block_until_ready(self._run(*next(turns)))

        return slowest_s(self._comm.mpi, series) / calls


def _in_turns(arguments: list[Array]) -> Iterator[list[Array]]:
    """The arguments of one call after the other.

    Large ones are other ones in each call. In a step, parameters are not in the caches either: between two uses of one
    the others come by.
    """
    nbytes = sum(x.nbytes for x in arguments)
    copies = max(1, min(32, _CACHES // nbytes)) if _is_large(arguments) else 1
    return itertools.cycle([[x + 0 for x in arguments] for _ in range(copies)])


def _is_large(arguments: list[Array]) -> bool:
    return sum(x.nbytes for x in arguments) >= _LARGE
