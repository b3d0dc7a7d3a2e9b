"""Measured times as functions of a size: interpolated between the sizes that were measured, never fitted."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Curve(NamedTuple):
    """Seconds over a size, from measurements.

    Attributes:
        sizes: what was measured, rising, each above 0.
        seconds: the time of each.

    Example:
        >>> curve = Curve((1024, 4096), (1e-5, 2e-5))
        >>> curve(1024), round(curve(2048) * 1e6, 2), curve(8192), curve(1)
        (1e-05, 14.14, 4e-05, 1e-05)
    """

    sizes: Sequence[float]
    seconds: Sequence[float]

    @classmethod
    def measured(cls, seconds: Mapping[int, float]) -> Curve:
        """Returns the curve of measurements, rising sizes with their seconds.

        No size takes longer than a larger one. Where one did, something else had disturbed it: the larger one's time
        counts for both.

        Example:
            >>> Curve.measured({1024: 3.0, 2048: 5.0, 4096: 4.0})
            Curve(sizes=(1024, 2048, 4096), seconds=(3.0, 4.0, 4.0))
        """
        least = itertools.accumulate(reversed(list(seconds.values())), min)
        return cls(tuple(seconds), tuple(reversed(list(least))))

    def __call__(self, size: float) -> float:
        """Returns the seconds of ``size``.

        Between two measured sizes the logarithm of the time is linear in that of the size. A size below the
        smallest takes as long as the smallest, since latency is left. A larger size than the largest has its rate.
        """
        sizes, seconds = self
        if size <= sizes[0]:
            return seconds[0]
        if size >= sizes[-1]:
            return seconds[-1] * size / sizes[-1]
        right = bisect.bisect_right(sizes, size)
        return _between(size, sizes[right - 1], sizes[right], seconds[right - 1], seconds[right])


def _between(at: float, low: float, high: float, low_s: float, high_s: float) -> float:
    """The time at a size, where the logarithm of the time is linear in the logarithm of the size."""
    share = math.log(at / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(low_s) + share * math.log(high_s))


def across(curves: Mapping[int, Curve], narrow: float, size: float) -> float:
    """Returns the seconds of a size, interpolated between curves for several values of another number.

    Where the wider curve begins at a larger size, its smallest size's rate counts: what is narrower can be smaller.

    Args:
        curves: the curve of each measured value; at least one.
        narrow: the value; beyond the measured ones the nearest counts.
        size: the size.

    Example:
        >>> curves = {8: Curve((100,), (1.0,)), 32: Curve((100,), (4.0,))}
        >>> across(curves, 8, 100), round(across(curves, 16, 100), 3), across(curves, 64, 100)
        (1.0, 2.0, 4.0)
    """
    values = sorted(curves)
    narrow = min(max(narrow, values[0]), values[-1])
    if narrow in curves:
        return curves[int(narrow)](size)
    right = bisect.bisect_right(values, narrow)
    low, high = values[right - 1], values[right]
    return _between(narrow, low, high, curves[low](size), _at_its_rate(curves[high], size))


def _at_its_rate(curve: Curve, size: float) -> float:
    return curve(size) * min(1.0, size / curve.sizes[0])
