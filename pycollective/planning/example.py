"""An invented cluster, for examples and tests: 2 hosts with 2 ranks, whose speeds are round numbers."""

from __future__ import annotations

from pycollective.planning.curves import Curve
from pycollective.planning.profile import ARRAYS, AXES, OPERATIONS, Group, Profile


def _line(latency_s: float, bytes_per_s: float) -> Curve:
    sizes = [2.0**power for power in range(3, 27)]
    return Curve(tuple(sizes), tuple(latency_s + size / bytes_per_s for size in sizes))


_WITHIN, _BETWEEN = _line(1e-5, 4e9), _line(1e-4, 1e8)
_COLLECTIVE = {Group(2, 1): _WITHIN, Group(1, 2): _BETWEEN, Group(2, 2): _BETWEEN}
_COMPUTING = {"float32": {64: _line(1e-5, 1e11)}}

profile = Profile(
    source="invented: 2 hosts with 2 ranks; 4 GB/s within a host, 0.1 GB/s between them, 100 Gflop/s on each",
    hosts=2,
    ranks=4,
    devices=1,
    memory=1 << 30,
    collectives={kind: dict.fromkeys(OPERATIONS, _COLLECTIVE) for kind in (AXES, ARRAYS)},
    products=_COMPUTING,
    convolutions=_COMPUTING,
    streams=_line(1e-5, 1e10),
    tanh=_line(1e-5, 1e9),
    call=1e-5,
)
