"""Measures each collective for each kind of group, within a host and between hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import numpy as np

import pycollective as pc
from pycollective.bench.implementations import GlobalArrays, Implementation, Pycollective
from pycollective.bench.measure import InProcess, measure
from pycollective.bench.workloads import make_workload
from pycollective.planning.curves import Curve
from pycollective.planning.profile import ARRAYS, AXES, NARROW, OPERATIONS, Group
from pycollective.planning.timing import meet

SIZES = (512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20)
"""Bytes of operand or result, the larger of both."""

_SECONDS = 0.05  # for the timed calls of one size
_LONGEST_S = 0.1  # a call that takes longer is the last one of its curve

Curves = dict[str, dict[str, dict[Group, Curve]]]


def groups_in(hosts: int, per_host: int) -> list[Group]:
    """The kinds of groups that divide the devices of a cluster, from small to large.

    Example:
        >>> groups_in(2, 2)
        [Group(per_host=1, hosts=2), Group(per_host=2, hosts=1), Group(per_host=2, hosts=2)]
    """
    return [
        Group(inside, across)
        for inside in range(1, per_host + 1)
        for across in range(1, hosts + 1)
        if per_host % inside == 0 and hosts % across == 0 and inside * across > 1
    ]


def count_turns(hosts: int, ranks_per_host: int) -> int:
    """The number of calls of ``tick`` in :func:`measure_collectives`, if all sizes are measured."""
    return len(groups_in(hosts, ranks_per_host)) * len(OPERATIONS) * len(SIZES)


def measure_collectives(comm: pc.Communicator, devices: int, tick: Callable[[int], None]) -> tuple[Curves, float]:
    """Measures collectives over ranks that make them in groups at the same time. All ranks must make this call.

    Each is measured twice, some seconds apart. The faster one counts, since what disturbs a measurement adds time.

    Args:
        comm: all ranks, as many on each host.
        devices: the number of devices of each rank. With several, programs of global arrays are not measured.
        tick: a function to call with the number of sizes that are done.

    Returns:
        The curves, and :attr:`Noise.collectives <pycollective.planning.profile.Noise.collectives>`.
    """
    ratios: list[float] = []
    curves: Curves = {kind: {} for kind in ((AXES, NARROW, ARRAYS) if devices == 1 else (AXES, NARROW))}
    places = comm.mpi.allgather((comm.host_index, comm.local_rank))
    for ranks in groups_in(comm.host_count, comm.local_size):
        colors = [(host // ranks.hosts, local // ranks.per_host) for host, local in places]
        members = sorted(range(comm.size), key=lambda rank: (colors[rank], places[rank]))
        color = sorted({*colors}).index(colors[comm.rank])
        part = comm.split(color, key=members.index(comm.rank))
        assert part is not None
        programs: dict[str, Implementation] = {
            AXES: Pycollective(part, devices),
            NARROW: Pycollective(part, devices, "bfloat16"),
        }
        if devices == 1:
            in_order = sorted(jax.devices(), key=lambda device: device.process_index)
            table = np.array([in_order[rank] for rank in members]).reshape(-1, part.size)
            programs[ARRAYS] = GlobalArrays(ARRAYS, table)
        group = Group(ranks.per_host * devices, ranks.hosts)
        for operation in OPERATIONS:
            of_operation = {kind: one for kind, one in programs.items() if kind != NARROW or operation == "psum"}
            for kind, curve in _curves(comm, part, operation, of_operation, group, tick, ratios):
                curves[kind].setdefault(operation, {})[group] = curve
        part.free()
    return curves, float(np.quantile(ratios, 0.9)) if ratios else 1.0


def _curves(
    comm: pc.Communicator,
    part: pc.Communicator,
    operation: str,
    programs: dict[str, Implementation],
    group: Group,
    tick: Callable[[int], None],
    ratios: list[float],
) -> Iterator[tuple[str, Curve]]:
    """The curve of an operation for each kind of program. It adds the ratios of two measurements to a list."""
    runners = {kind: InProcess(one, part.rank, part.size, partial(meet, comm.mpi)) for kind, one in programs.items()}
    points: dict[str, dict[int, float]] = {kind: {} for kind in runners}

    def seconds(nbytes: int, kind: str, calls: int) -> tuple[int, float]:
        workload = make_workload(operation, nbytes, np.float32, group.size)
        timing = measure(comm.mpi, workload, [runners[kind]], calls=calls, warmup=2)[runners[kind].name]
        if timing.wrong:
            raise RuntimeError(f"{operation} of {nbytes} B in {kind} gave {timing.wrong} wrong elements")
        return workload.nbytes, timing.median_us * 1e-6

    calls = 20
    done: list[tuple[int, int]] = []
    for left, nbytes in zip(range(len(SIZES), 0, -1), SIZES, strict=True):
        slowest = 0.0
        for kind, of_kind in points.items():
            size, took = seconds(nbytes, kind, calls)
            of_kind[size] = took
            slowest = max(slowest, took)
        done.append((nbytes, calls))
        if slowest > _LONGEST_S:
            tick(left)
            break
        tick(1)
        calls = int(min(max(_SECONDS / (8 * slowest), 3), 20))  # the next size has eight times the bytes
    for nbytes, calls in done:
        for kind, of_kind in points.items():
            size, again = seconds(nbytes, kind, calls)
            ratios.append(max(again, of_kind[size]) / min(again, of_kind[size]))
            of_kind[size] = min(again, of_kind[size])
    return ((kind, Curve.measured(at)) for kind, at in points.items())
