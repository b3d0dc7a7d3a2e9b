"""One table of operations: how to call each, and what it means.

A reference maps the ranks' operands, stacked along a new first axis, to their results, stacked likewise. It is
``jax.vmap(axis_name=...)`` of :mod:`jax.lax`'s own function where JAX has one, else a definition in :mod:`jax.numpy`;
either way JAX can differentiate and batch it, so one reference serves every transform.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pycollective as pc

Array = Any


@dataclass(frozen=True)
class Case:
    """One operation.

    Attributes:
        id: for pytest.
        call: ``call(x, comm)`` on one rank.
        reference: stacked operands to stacked results.
        shape: of one rank's operand, given the number of ranks.
        linear: in the operand, so that it can be transposed.
        kind: "move" takes every dtype and returns it bit by bit; otherwise the reduction, "sum" or "max", say.
    """

    id: str
    call: Callable[[Array, pc.Communicator], Array]
    reference: Callable[[Array], Array]
    shape: Callable[[int], tuple[int, ...]] = lambda size: (2, 3)
    linear: bool = True
    kind: str = "move"


def _lax(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return jax.vmap(function, axis_name="ranks")


def _everywhere(reduction: Callable[..., Array]) -> Callable[[Array], Array]:
    """The reduction over ranks, on every rank."""
    return lambda xs: jnp.broadcast_to(reduction(xs, axis=0), xs.shape)


def _at(root: int, values: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """``values`` on the root, zeros elsewhere. A negative root counts from the last rank."""

    def reference(xs: Array) -> Array:
        result = values(xs)
        return jnp.zeros((len(xs), *result.shape), result.dtype).at[root].set(result)

    return reference


def _inclusive(xs: Array) -> Array:
    return jnp.stack([xs[: rank + 1].sum(axis=0) for rank in range(len(xs))])


def _exclusive(xs: Array) -> Array:
    return jnp.stack([xs[:rank].sum(axis=0) for rank in range(len(xs))])


def _turned(size: int) -> list[int]:
    """A permutation that, from three on, is not its own inverse."""
    return [(i + 1) % size for i in range(size)]


def _shift(size: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % size) for rank in range(size)]


def _chain(size: int) -> list[tuple[int, int]]:
    """Nobody sends to rank 0."""
    return [(rank, rank + 1) for rank in range(size - 1)]


def _chained(xs: Array) -> Array:
    return jnp.concatenate([jnp.zeros_like(xs[:1]), xs[:-1]])


def _per_rank(size: int) -> tuple[int, ...]:
    return (size, 3)


def _per_rank_second(size: int) -> tuple[int, ...]:
    return (2, size, 3)


def _divisible(size: int) -> tuple[int, ...]:
    return (2, 2 * size, 3)


def _untiled_exchange(xs: Array) -> Array:
    """``y_r[:, :, s] = x_s[:, r, :]`` for operands ``(2, size, 3)``."""
    return jnp.transpose(xs, (2, 1, 3, 0))


def _both_divisible(size: int) -> tuple[int, ...]:
    return (2 * size, 3)


def _neighbours(x: Array, comm: pc.Communicator) -> Array:
    return pc.sendrecv(x, comm, source=(comm.rank - 1) % comm.size, dest=(comm.rank + 1) % comm.size)


CASES = (
    Case("psum", pc.psum, _lax(lambda x: lax.psum(x, "ranks")), kind="sum"),
    Case("psum_scalar", pc.psum, _lax(lambda x: lax.psum(x, "ranks")), lambda size: (), kind="sum"),
    Case("psum_empty", pc.psum, _lax(lambda x: lax.psum(x, "ranks")), lambda size: (0, 3), kind="sum"),
    Case("pmean", pc.pmean, _lax(lambda x: lax.pmean(x, "ranks")), kind="mean"),
    Case("pmax", pc.pmax, _everywhere(jnp.max), linear=False, kind="max"),
    Case("pmin", pc.pmin, _everywhere(jnp.min), linear=False, kind="min"),
    Case("all_gather", pc.all_gather, _lax(lambda x: lax.all_gather(x, "ranks"))),
    Case("all_gather_last", partial(pc.all_gather, axis=-1), _lax(lambda x: lax.all_gather(x, "ranks", axis=x.ndim))),
    Case(
        "all_gather_tiled",
        partial(pc.all_gather, axis=1, tiled=True),
        _lax(lambda x: lax.all_gather(x, "ranks", axis=1, tiled=True)),
    ),
    Case("psum_scatter", pc.psum_scatter, _lax(lambda x: lax.psum_scatter(x, "ranks")), _per_rank, kind="sum"),
    Case(
        "psum_scatter_tiled",
        partial(pc.psum_scatter, scatter_dimension=1, tiled=True),
        _lax(lambda x: lax.psum_scatter(x, "ranks", scatter_dimension=1, tiled=True)),
        _divisible,
        kind="sum",
    ),
    Case("all_to_all", lambda x, comm: pc.all_to_all(x, comm, 1, 2), _untiled_exchange, _per_rank_second),
    Case(
        "all_to_all_tiled",
        lambda x, comm: pc.all_to_all(x, comm, 0, 1, tiled=True),
        _lax(lambda x: lax.all_to_all(x, "ranks", 0, 1, tiled=True)),
        _both_divisible,
    ),
    Case("pswapaxes", pc.pswapaxes, _lax(lambda x: lax.pswapaxes(x, "ranks", 0)), _per_rank),
    Case(
        "ppermute",
        lambda x, comm: pc.ppermute(x, comm, _shift(comm.size)),
        lambda xs: _lax(lambda x: lax.ppermute(x, "ranks", _shift(len(xs))))(xs),
    ),
    Case("ppermute_partial", lambda x, comm: pc.ppermute(x, comm, _chain(comm.size)), _chained),
    Case(
        "pshuffle",
        lambda x, comm: pc.pshuffle(x, comm, _turned(comm.size)),
        lambda xs: _lax(lambda x: lax.pshuffle(x, "ranks", _turned(len(xs))))(xs),
    ),
    Case(
        "pbroadcast",
        lambda x, comm: pc.pbroadcast(x, comm, comm.size - 1),
        lambda xs: jnp.broadcast_to(xs[-1], xs.shape),
    ),
    Case("broadcast", pc.broadcast, lambda xs: jnp.broadcast_to(xs[0], xs.shape)),
    Case("reduce", pc.reduce, _at(0, lambda xs: xs.sum(axis=0)), kind="sum"),
    Case(
        "reduce_last",
        lambda x, comm: pc.reduce(x, comm, root=comm.size - 1),
        _at(-1, lambda xs: xs.sum(axis=0)),
        kind="sum",
    ),
    Case("gather", lambda x, comm: pc.gather(x, comm, root=comm.size - 1), _at(-1, lambda xs: xs)),
    Case("scatter", lambda x, comm: pc.scatter(x, comm, root=comm.size - 1), lambda xs: xs[-1], _per_rank),
    Case("scan", pc.scan, _inclusive, kind="sum"),
    Case("exscan", pc.exscan, _exclusive, kind="sum"),
    Case("sendrecv", _neighbours, lambda xs: jnp.roll(xs, 1, axis=0)),
)

by_id = {case.id: case for case in CASES}

_EACH = ("psum", "pmax", "all_gather", "psum_scatter", "all_to_all_tiled", "ppermute_partial", "broadcast")
_EACH += ("reduce_last", "gather", "scatter", "scan", "exscan", "sendrecv")  # type: ignore[assignment]
EACH_PRIMITIVE = tuple(by_id[id_] for id_ in _EACH)
"""One operation of each primitive: enough where a test is about what is around a call, not about its options."""


def operands(
    case: Case, comm: pc.Communicator, dtype: Any = np.float32, seed: int = 0, extra: tuple[int, ...] = ()
) -> Any:
    """All ranks' operands, stacked: the same on every rank, distinct in every entry and rank.

    Args:
        extra: further leading axes of each operand.
    """
    return values((comm.size, *extra, *case.shape(comm.size)), dtype, seed)


def values(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Any:
    """Numbers that ``dtype`` holds, from about -4 to 4, or from 0 for unsigned ones."""
    generator = np.random.default_rng((seed, *shape))
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return generator.integers(0, 2, shape).astype(bool)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return generator.integers(max(-4, int(info.min)), min(4, int(info.max)) + 1, shape).astype(dtype)
    real = generator.uniform(-4, 4, shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (real + 1j * generator.uniform(-4, 4, shape)).astype(dtype)
    return real.astype(dtype)
