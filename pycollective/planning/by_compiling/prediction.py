"""How long a program takes, from what its devices do and how fast they are."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from pycollective.planning.by_compiling.program_work import (
    LOOPS,
    Beside,
    Communication,
    Convolution,
    Product,
    Stream,
    Work,
)
from pycollective.planning.profile import ARRAYS, Profile, group_of

_MOST = 1.1
"""How many times the predicted memory was needed at most: docs/plan.md has what was measured."""

_SHORT_S = 50e-6  # of an instruction in a loop: below, what it takes beside computing is a large part


class Prediction(NamedTuple):
    """What a step takes.

    Attributes:
        computing_s: seconds of computation.
        communication_s: seconds of collectives.
        memory: bytes that a device needs at its peak.
        doubtful_s: seconds of computation, by the reason why they may be far off; these are part of ``computing_s``.
        beside_s: seconds in which computation and collectives are under way at the same time.
    """

    computing_s: float
    communication_s: float
    memory: int
    doubtful_s: tuple[tuple[str, float], ...] = ()
    beside_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self.computing_s + self.communication_s - self.beside_s

    @property
    def at_most(self) -> int:
        """The bytes that a device has to have, since the prediction may be too small."""
        return math.ceil(self.memory * _MOST)


def predict(work: Work, memory: int, profile: Profile) -> Prediction:
    """Predicts a step.

    Each instruction takes the time that was measured for a program of its kind and size, less that of a program that
    does nothing, which counts once, and what an instruction takes more in a program of many.

    Args:
        work: what each device does.
        memory: the bytes that a device needs at most, by XLA's account.
        profile: the speed of the devices and of what connects them.
    """
    computing = profile.call + sum(
        count * (_computing_s(item, profile) + profile.instruction) for item, count in work.computing.items()
    )
    communication = sum(
        count * (_communication_s(item, profile) + profile.instruction) for item, count in work.communication.items()
    )
    doubtful = tuple((why, _doubtful_s(why, items, profile)) for why, items in sorted(work.doubtful.items()))
    beside = (work.scratch, *(_buffer_of(item, profile) for item in work.communication))  # one at a time
    both = min(sum(_beside_s(one, profile) for one in work.beside), computing) if profile.overlap.get(ARRAYS) else 0.0
    return Prediction(computing, communication, memory + max(beside), doubtful, both)


def _beside_s(one: Beside, profile: Profile) -> float:
    """The seconds of a collective and of what may be computed during it that pass at the same time."""
    communication = one.times * (_communication_s(one.communication, profile) + profile.instruction)
    computing = sum(
        count * (_computing_s(item, profile) + profile.instruction) for item, count in one.computing.items()
    )
    return profile.beside_s(communication, computing, ARRAYS)


def _doubtful_s(why: str, items: Counter[Product | Convolution | Stream], profile: Profile) -> float:
    """The seconds of what may be far off. Of loops what is long by itself is as it was measured."""
    each = ((_computing_s(item, profile) + profile.instruction, count) for item, count in items.items())
    return sum(seconds * count for seconds, count in each if why != LOOPS or seconds < _SHORT_S)


def _computing_s(item: Product | Convolution | Stream, profile: Profile) -> float:
    if isinstance(item, Product):
        return profile.part_s(profile.product_s(item.dtype, item.m, item.k, item.n, item.batch, item.form))
    if isinstance(item, Convolution):
        return profile.part_s(profile.convolution_s(item.dtype, item.smallest, item.operations))
    return profile.part_s(profile.stream_s(item.nbytes, item.functions, item.transposed))


def _communication_s(item: Communication, profile: Profile) -> float:
    group = group_of(item.group, profile.per_host)
    if group.size == 1:
        return 0.0
    return profile.part_s(profile.collective_s(item.operation, item.nbytes, group, ARRAYS))


def _buffer_of(item: Communication, profile: Profile) -> int:
    """The bytes that a collective takes while it runs: MPI adds up each array between hosts in a buffer."""
    group = group_of(item.group, profile.per_host)
    if item.operation != "psum" or group.hosts == 1:
        return 0
    return (item.largest or item.nbytes) // group.per_host  # a rank's share
