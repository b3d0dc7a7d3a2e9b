"""A collective over local accelerators x ranks: local steps by XLA, with the vendor's library, around one on the lanes.

Each device calls MPI on its own lane, all at once, for its part of the array alone where it can: so a reduction moves
``2 (R - 1) / R`` of the array between ranks, whatever the number of local devices is (Traeff's multi-lane
decomposition). CPU devices do the same through shared memory instead (``native/team_collectives.h``).

Each function has the meaning of the primitive of its name over ranks x devices in row-major order. ``bind`` is that
primitive over the ranks, from each device to its like. They are traced when a program is lowered, after differentiation
and batching, so they need no rules of their own. For empty arrays there is nothing to do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

_SMALL_BYTES = 64 << 10
"""Up to this size cutting an array up and putting it together again costs more than moving it whole on every lane."""


class LocalDevices(NamedTuple):
    """The local devices that take part.

    Attributes:
        axes: names and sizes of the axes along which they lie, in the program that XLA runs on them.
        ranks: how many ranks take part, each with as many.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """Their number."""
        return math.prod(size for _, size in self.axes)

    def member(self) -> Array:
        """Which of them this one is; a scalar."""
        index = jnp.int32(0)
        for name, size in self.axes:
            index = index * size + lax.axis_index(name)
        return index


def _total(local: LocalDevices, x: Array, op: str) -> Array:
    """``op`` over the local devices."""
    assert op in ("sum", "sum_bfloat16", "min", "max"), op
    if op in ("min", "max"):
        reduce = lax.pmin if op == "min" else lax.pmax
        if x.dtype == jnp.bool_:  # bytes 0 and 1
            return reduce(x.astype(jnp.uint8), local.names).astype(jnp.bool_)
        return reduce(x, local.names)
    return lax.psum(x, local.names)


def _in_slices(local: LocalDevices, x: Array, op: str, between: Callable[[Array], Array]) -> Array:
    """``op`` over the local devices of the vector ``x``, then ``between`` ranks, each device for its slice."""
    padded = jnp.pad(x, (0, -x.size % local.size)).reshape(local.size, -1)
    scatters = op not in ("min", "max")  # XLA's reduce-scatter of other reductions is not in jax.lax
    own = lax.psum_scatter(padded, local.names) if scatters else _total(local, padded, op)[local.member()]
    return lax.all_gather(between(own), local.names).reshape(-1)[: x.size]


def allreduce(bind: Callable[..., list[Array]], local: LocalDevices, *xs: Array, op: str, **_: Any) -> list[Array]:
    """``op`` over all devices of each of ``xs``: those of a dtype as one array."""
    ys = list(xs)
    for dtype in dict.fromkeys(x.dtype for x in xs if x.size > 0):
        places = [i for i, x in enumerate(xs) if x.dtype == dtype]
        flat = jnp.concatenate([xs[i].reshape(-1) for i in places])

        def between(part: Array) -> Array:
            return bind(part, op=op, in_place=(True,))[0]

        if flat.nbytes <= _SMALL_BYTES:
            total = between(_total(local, flat, op))
        else:
            total = _in_slices(local, flat, op, between)
        ends = list(itertools.accumulate(xs[i].size for i in places))
        for i, part in zip(places, jnp.split(total, ends[:-1]), strict=True):
            ys[i] = part.reshape(xs[i].shape)
    return ys


def reduce(bind: Callable[..., Array], local: LocalDevices, x: Array, *, op: str, root: int, **_: Any) -> Array:
    """``op`` over all devices at the root, zeros on the others."""
    if x.size == 0:
        return x

    def between(part: Array) -> Array:
        return bind(part, op=op, root=root // local.size, in_place=(True,))

    total = _in_slices(local, x.reshape(-1), op, between).reshape(x.shape)
    return jnp.where(local.member() == root % local.size, total, jnp.zeros_like(total))


def bcast(bind: Callable[..., Array], local: LocalDevices, x: Array, *, root: int, **_: Any) -> Array:
    """The root's ``x``: a sum of its bits and of zeros, exact for every value."""
    if x.size == 0:
        return x
    bits = _bits(x)
    own = jnp.where(local.member() == root % local.size, bits, jnp.zeros_like(bits))

    def between(part: Array) -> Array:
        return bind(part, root=root // local.size, in_place=(True,))

    return _from_bits(_in_slices(local, own.reshape(-1), "sum", between).reshape(bits.shape), x)


def allgather(bind: Callable[..., Array], local: LocalDevices, x: Array, **_: Any) -> Array:
    """All devices' ``x``; shape ``(ranks * devices, *x.shape)``."""
    result = (local.ranks * local.size, *x.shape)
    if x.size == 0:
        return jnp.zeros(result, x.dtype)
    return lax.all_gather(bind(x), local.names, axis=1).reshape(result)  # (ranks, devices, ...)


def reduce_scatter(bind: Callable[..., Array], local: LocalDevices, x: Array, *, op: str, **_: Any) -> Array:
    """This device's block of the sum of ``x``, of shape ``(ranks * devices, ...)``."""
    if x.size == 0:
        return x[0]
    return bind(lax.psum_scatter(_by_rank(local, x), local.names, scatter_dimension=1), op=op)


def alltoall(bind: Callable[..., Array], local: LocalDevices, x: Array, **_: Any) -> Array:
    """Block ``d`` of ``x``, of shape ``(ranks * devices, ...)``, to device ``d``."""
    if x.size == 0:
        return x
    return bind(lax.all_to_all(_by_rank(local, x), local.names, 1, 1, tiled=True)).reshape(x.shape)


def _by_rank(local: LocalDevices, x: Array) -> Array:
    """Blocks of all devices as ``(ranks, devices, ...)``."""
    return x.reshape(local.ranks, local.size, *x.shape[1:])


def _bits(x: Array) -> Array:
    """``x`` as unsigned integers, which XLA moves and adds to zeros unchanged: values like -0.0 and NaN too.

    Complex numbers have two, along a new last axis.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _bits(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{x.dtype.itemsize * 8}"))


def _from_bits(bits: Array, like: Any) -> Array:
    """The inverse of :func:`_bits`, for what is of the dtype of ``like``."""
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        parts = lax.bitcast_convert_type(bits, jnp.finfo(like.dtype).dtype)
        return lax.complex(parts[..., 0], parts[..., 1])
    if like.dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    return lax.bitcast_convert_type(bits, like.dtype)


STEPS: dict[str, Callable[..., Array | Sequence[Array]]] = {
    function.__name__: function for function in (allreduce, reduce, bcast, allgather, reduce_scatter, alltoall)
}
"""By the name of the primitive. ``ppermute`` is not among them: devices exchange directly, whatever their lanes."""
