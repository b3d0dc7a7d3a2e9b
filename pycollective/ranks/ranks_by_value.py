"""Which ranks have which value, as they combine it: a value that neighbouring ranks have travels once.

Up to a few values travel in a few bytes, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

RanksByValue = dict[K, list[range]]
"""For each value the ranks that have it, as runs. The value of the lowest rank comes first."""


def of_rank(rank: int, value: K) -> RanksByValue[K]:
    """The value of one rank."""
    return {value: [range(rank, rank + 1)]}


def together(lower: Mapping[K, Sequence[range]], higher: Mapping[K, Sequence[range]]) -> RanksByValue[K]:
    """The values of some ranks and of ranks with higher numbers.

    Example:
        >>> together(together(of_rank(0, "a"), of_rank(1, "b")), of_rank(2, "b"))
        {'a': [range(0, 1)], 'b': [range(1, 3)]}
        >>> together(together(of_rank(0, "a"), of_rank(1, "b")), of_rank(2, "a"))
        {'a': [range(0, 1), range(2, 3)], 'b': [range(1, 2)]}
    """
    found = {value: list(runs) for value, runs in lower.items()}
    for value, runs in higher.items():
        known = found.setdefault(value, [])
        if known and known[-1].stop == runs[0].start:
            runs = [range(known.pop().start, runs[0].stop), *runs[1:]]
        known += runs
    return found


def ranks_in(runs: Sequence[range]) -> list[int]:
    """The ranks of some runs.

    Example:
        >>> ranks_in([range(2), range(5, 6)])
        [0, 1, 5]
    """
    return [rank for run in runs for rank in run]
