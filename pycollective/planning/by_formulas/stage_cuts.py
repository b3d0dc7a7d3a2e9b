"""Where to cut a network into the stages of a pipeline, so that the slowest one is as fast as can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def cut_evenly(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Returns the number of parts of each stage; each has one at least.

    By dynamic programming: the best bottleneck of the first j parts in s stages is the least, over the place i of the
    last cut, of the larger of the best of the first i parts in s - 1 stages and the time of the parts from i to j.

    Args:
        seconds: the time of each part.
        stages: the number of stages, at most that of the parts.

    Source: the linear partition problem, S. Skiena, "The Algorithm Design Manual", section 10.7.

    Example:
        >>> cut_evenly([1, 1, 1, 1, 4], 2), cut_evenly([5, 1, 1, 1], 3)
        ((4, 1), (1, 1, 2))
    """
    sums = [0.0, *itertools.accumulate(seconds)]
    count = len(seconds)
    best = sums[:]  # of the first j parts in one stage
    cuts: list[list[int]] = []
    for stage in range(2, stages + 1):
        row, places = [float("inf")] * (count + 1), [0] * (count + 1)
        low = stage - 1
        for j in range(stage, count + 1):
            # The first term rises with i, the second one falls: the best place is where they cross. It rises with j.
            while low < j - 1 and best[low] < sums[j] - sums[low]:
                low += 1
            row[j], places[j] = max(best[low], sums[j] - sums[low]), low
            before = sums[j] - sums[low - 1]  # there the second term is the larger one
            if low >= stage and before <= row[j]:
                row[j], places[j] = before, low - 1
        best = row
        cuts.append(places)
    ends = [count]
    for places in reversed(cuts):
        ends.append(places[ends[-1]])
    ends.append(0)
    return tuple(high - low for high, low in itertools.pairwise(ends))[::-1]
