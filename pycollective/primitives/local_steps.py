"""Collectives over several accelerators of each rank: XLA's collectives between local devices, MPI's on each lane.

All local devices call MPI at once, each on its own lane. Where possible a device sends only its part of the array: so a
reduction moves ``2 (R - 1) / R`` of the array between ranks, for any number of local devices (Traeff's multi-lane
decomposition). CPU devices use shared memory instead (``native/devices/team_collectives.h``).

Each function computes what the primitive of its name means over ranks x devices in row-major order. Its argument
``bind`` is that primitive over the ranks of one lane. The functions are traced when a program is lowered, after
differentiation and batching, so they need no rules of their own. Empty arrays need no communication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pycollective.primitives import dtypes

Array = jax.Array

_SMALL_BYTES = 64 << 10
"""Up to this size it costs less to move a whole array on each lane than to cut it into parts and join them again."""


class LocalDevices(NamedTuple):
    """The local devices that take part.

    Attributes:
        axes: names and sizes of the axes along which they lie in the program that XLA runs on them.
        ranks: the number of ranks that take part; each has the same number of devices.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """The number of these devices."""
        return math.prod(size for _, size in self.axes)

    def local_index(self) -> Array:
        """The number of the calling device among them; a scalar."""
        index = jnp.int32(0)
        for name, size in self.axes:
            index = index * size + lax.axis_index(name)
        return index


def _reduced_locally(local: LocalDevices, x: Array, op: str) -> Array:
    """Reduces ``x`` over the local devices."""
    assert op in ("sum", "sum_bfloat16", "min", "max"), op
    if op in ("min", "max"):
        reduce = lax.pmin if op == "min" else lax.pmax
        if x.dtype == jnp.bool_:  # bytes 0 and 1
            return reduce(x.astype(jnp.uint8), local.names).astype(jnp.bool_)
        return reduce(x, local.names)
    return lax.psum(x, local.names)


def _in_slices(local: LocalDevices, x: Array, op: str, over_ranks: Callable[[Array], Array]) -> Array:
    """Reduces the vector ``x`` over the local devices, then each device its slice over ranks, and joins the slices."""
    padded = jnp.pad(x, (0, -x.size % local.size)).reshape(local.size, -1)
    scatters = op not in ("min", "max")  # jax.lax has no reduce-scatter of other reductions
    own = (
        lax.psum_scatter(padded, local.names) if scatters else _reduced_locally(local, padded, op)[local.local_index()]
    )
    return lax.all_gather(over_ranks(own), local.names).reshape(-1)[: x.size]


def allreduce(bind: Callable[..., list[Array]], local: LocalDevices, *xs: Array, op: str, **_: Any) -> list[Array]:
    """Reduces each of ``xs`` over all devices; the arrays of one dtype travel as one array."""
    ys = list(xs)
    for dtype in dict.fromkeys(x.dtype for x in xs if x.size > 0):
        places = [i for i, x in enumerate(xs) if x.dtype == dtype]
        flat = jnp.concatenate([xs[i].reshape(-1) for i in places])

        def over_ranks(part: Array) -> Array:
            return bind(part, op=op, in_place=(True,))[0]

        if flat.nbytes <= _SMALL_BYTES:
            total = over_ranks(_reduced_locally(local, flat, op))
        else:
            total = _in_slices(local, flat, op, over_ranks)
        ends = list(itertools.accumulate(xs[i].size for i in places))
        for i, part in zip(places, jnp.split(total, ends[:-1]), strict=True):
            ys[i] = part.reshape(xs[i].shape)
    return ys


def reduce(bind: Callable[..., Array], local: LocalDevices, x: Array, *, op: str, root: int, **_: Any) -> Array:
    """Reduces ``x`` over all devices to the root; zeros on the other devices."""
    if x.size == 0:
        return x

    def over_ranks(part: Array) -> Array:
        return bind(part, op=op, root=root // local.size, in_place=(True,))

    total = _in_slices(local, x.reshape(-1), op, over_ranks).reshape(x.shape)
    return jnp.where(local.local_index() == root % local.size, total, jnp.zeros_like(total))


def bcast(bind: Callable[..., Array], local: LocalDevices, x: Array, *, root: int, **_: Any) -> Array:
    """The root's ``x`` on all devices: the sum of its bits and of zeros, which is exact for every value."""
    if x.size == 0:
        return x
    bits = dtypes.bits(x)
    own = jnp.where(local.local_index() == root % local.size, bits, jnp.zeros_like(bits))

    def over_ranks(part: Array) -> Array:
        return bind(part, root=root // local.size, in_place=(True,))

    return dtypes.from_bits(_in_slices(local, own.reshape(-1), "sum", over_ranks).reshape(bits.shape), x)


def allgather(bind: Callable[..., Array], local: LocalDevices, x: Array, **_: Any) -> Array:
    """The ``x`` of all devices; shape ``(ranks * devices, *x.shape)``."""
    result = (local.ranks * local.size, *x.shape)
    if x.size == 0:
        return jnp.zeros(result, x.dtype)
    return lax.all_gather(bind(x), local.names, axis=1).reshape(result)  # (ranks, devices, ...)


def reduce_scatter(bind: Callable[..., Array], local: LocalDevices, x: Array, *, op: str, **_: Any) -> Array:
    """This device's block of the reduction of ``x``, which has the shape ``(ranks * devices, ...)``."""
    if x.size == 0:
        return x[0]
    return bind(lax.psum_scatter(_by_rank(local, x), local.names, scatter_dimension=1), op=op)


def alltoall(bind: Callable[..., Array], local: LocalDevices, x: Array, **_: Any) -> Array:
    """Sends block ``d`` of ``x``, which has the shape ``(ranks * devices, ...)``, to device ``d``."""
    if x.size == 0:
        return x
    return bind(lax.all_to_all(_by_rank(local, x), local.names, 1, 1, tiled=True)).reshape(x.shape)


def _by_rank(local: LocalDevices, x: Array) -> Array:
    """Reshapes ``(ranks * devices, ...)`` to ``(ranks, devices, ...)``."""
    return x.reshape(local.ranks, local.size, *x.shape[1:])


STEPS: dict[str, Callable[..., Array | Sequence[Array]]] = {
    function.__name__: function for function in (allreduce, reduce, bcast, allgather, reduce_scatter, alltoall)
}
"""The functions by the names of their primitives. ``ppermute`` needs none: devices exchange directly across lanes."""
