"""Measures how much of a collective passes while the devices compute what does not need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pycollective as pc
from pycollective.planning.profile import ARRAYS, AXES
from pycollective.planning.timing import settled_s, slowest_s

Array = Any

_SUMMED, _SIDE, _ROWS = 1 << 20, 256, 64  # elements of the sum, and the shape of the products beside it
_TURNS = 7


def measure_overlap(comm: pc.Communicator, devices: int) -> dict[str, float]:
    """Returns for each kind of program the share of the shorter one, of a sum and of products, that passes beside it.

    A sum of 4 MiB over all devices, a chain of products that takes about as long, and both in one program are timed in
    turns; the fastest turn of each counts. All ranks must make this call.

    Args:
        comm: all ranks.
        devices: the number of devices of each rank. With several, programs of global arrays are not measured.
    """
    if comm.size * devices == 1:
        return {}
    kinds = {AXES: _over_axes(devices)}
    if devices == 1:
        kinds[ARRAYS] = _of_global_arrays()
    return {kind: _share(comm, build, arguments) for kind, (build, arguments) in kinds.items()}


def share_beside(collective: float, computing: float, both: float) -> float:
    """The share of the shorter one of two times that is saved where both are in one program.

    Example:
        >>> share_beside(2.0, 4.0, 5.0), share_beside(2.0, 4.0, 6.5), share_beside(2.0, 4.0, 3.9)
        (0.5, 0.0, 1.0)
    """
    return min(max((collective + computing - both) / min(collective, computing), 0.0), 1.0)


_Build = Callable[[int, int], Callable[..., Any]]
"""Makes a program of so many sums, 0 or 1, and of so many products."""


def _share(comm: pc.Communicator, build: _Build, arguments: list[Array]) -> float:
    def timed(program: Callable[..., Any]) -> Callable[[], float]:
        return lambda: slowest_s(comm.mpi, lambda: jax.block_until_ready(program(*arguments)))

    alone, one = timed(build(1, 0)), timed(build(0, 8))
    count = max(1, round(8 * settled_s(alone) / settled_s(one)))
    programs = [alone, timed(build(0, count)), timed(build(1, count))]
    for program in programs:
        settled_s(program)
    times = [[program() for program in programs] for _ in range(_TURNS)]
    return share_beside(*map(min, zip(*times, strict=True)))


def _products(y: Array, w: Array, count: int) -> Array:
    for _ in range(count):
        y = y @ w
    return y


def _over_axes(devices: int) -> tuple[_Build, list[Array]]:
    def build(sums: int, products: int) -> Callable[..., Any]:
        def program(x: Array, y: Array, w: Array) -> Any:
            return jax.lax.psum(x, "devices") if sums else x[:1], _products(y, w, products)

        return pc.pmap(program, "devices")

    shapes = ((_SUMMED,), (_ROWS, _SIDE), (_SIDE, _SIDE))
    return build, [jnp.zeros((devices, *shape), jnp.float32) for shape in shapes]


def _of_global_arrays() -> tuple[_Build, list[Array]]:
    in_order = sorted(jax.devices(), key=lambda device: device.process_index)
    spread = NamedSharding(Mesh(np.array(in_order), ("devices",)), PartitionSpec("devices"))
    n = len(in_order)

    def build(sums: int, products: int) -> Callable[..., Any]:
        def program(x: Array, y: Array, w: Array) -> Any:
            return x.sum(0) if sums else x[:, :1], _products(y, w, products)

        return jax.jit(program, in_shardings=spread)

    shapes = ((n, _SUMMED), (n, _ROWS, _SIDE), (n, _SIDE, _SIDE))
    return build, [jax.jit(lambda s=shape: jnp.zeros(s, jnp.float32), out_shardings=spread)() for shape in shapes]
