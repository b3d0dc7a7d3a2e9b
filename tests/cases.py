"""One table of operations: how to call each operation, and what it means.

A reference maps the operands of all ranks, stacked along a new first axis, to the results of all ranks, stacked in the
same way. It is ``jax.vmap(axis_name=...)`` of :mod:`jax.lax`'s own function where JAX has one, and a definition in
:mod:`jax.numpy` where it has none. JAX can differentiate and batch both, so one reference serves every transform.
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
from pycollective.transport.chosen import transport

Array = Any


@dataclass(frozen=True)
class Case:
    """One operation.

    Attributes:
        id: its name in pytest's reports.
        call: the call on one rank: ``call(x, comm)``.
        reference: the function from stacked operands to stacked results.
        shape: the shape of one rank's operand, as a function of the number of ranks.
        linear: whether the operation is linear in its operand, so that it has a transpose.
        native: whether only the native transport has the operation.
        kind: "move" if it takes every dtype and returns the bits as they are; else its reduction, such as "sum".
    """

    id: str
    call: Callable[[Array, pc.Communicator], Array]
    reference: Callable[[Array], Array]
    shape: Callable[[int], tuple[int, ...]] = lambda size: (2, 3)
    linear: bool = True
    kind: str = "move"
    native: bool = False


def _lax(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return jax.vmap(function, axis_name="ranks")


def _everywhere(reduction: Callable[..., Array]) -> Callable[[Array], Array]:
    """Returns the reduction over ranks, with its result on every rank."""
    return lambda xs: jnp.broadcast_to(reduction(xs, axis=0), xs.shape)


def _at(root: int, values: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Returns ``values`` on the root, and zeros on the other ranks. A negative root counts from the last rank."""

    def reference(xs: Array) -> Array:
        result = values(xs)
        return jnp.zeros((len(xs), *result.shape), result.dtype).at[root].set(result)

    return reference


def _inclusive(xs: Array) -> Array:
    return jnp.stack([xs[: rank + 1].sum(axis=0) for rank in range(len(xs))])


def _exclusive(xs: Array) -> Array:
    return jnp.stack([xs[:rank].sum(axis=0) for rank in range(len(xs))])


def _turned(size: int) -> list[int]:
    """Returns a permutation that is not its own inverse, for three ranks or more."""
    return [(i + 1) % size for i in range(size)]


def _shift(size: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % size) for rank in range(size)]


def _chain(size: int) -> list[tuple[int, int]]:
    """Each rank sends to the next; no rank sends to rank 0."""
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


def _neighbours_by_requests(x: Array, comm: pc.Communicator) -> Array:
    source, dest = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    return pc.wait(pc.isendrecv(x, comm, source=source, dest=dest))


def _some(rank: int, other: int = 0) -> int:
    """A number of rows, from 0 to 2."""
    return (rank + other) % 3


def _some_for_each(rank: int, size: int) -> Array:
    return (rank + jnp.arange(size)) % 3


def _two_for_each(size: int) -> tuple[int, ...]:
    return (2 * size, 3)


def _packed(rows: list[Array], capacity: int) -> Array:
    """The rows, one array's behind the other's, and zeros."""
    joined = jnp.concatenate(rows)
    return jnp.zeros((capacity, *joined.shape[1:]), joined.dtype).at[: len(joined)].set(joined)


def _own_rows(xs: Array) -> Array:
    return _packed([x[: _some(rank)] for rank, x in enumerate(xs)], len(xs) * xs.shape[1])


def _exchanged_rows(xs: Array) -> Array:
    starts = np.cumsum([[0] + [_some(rank, other) for other in range(len(xs))] for rank in range(len(xs))], axis=1)

    def of(rank: int) -> list[Array]:
        return [x[start[rank] : start[rank + 1]] for x, start in zip(xs, starts, strict=True)]

    return jnp.stack([_packed(of(rank), xs.shape[1]) for rank in range(len(xs))])


def _scattered_rows(xs: Array) -> Array:
    root = len(xs) - 1
    ends = np.cumsum([_some(root, rank) for rank in range(len(xs))])
    rows = [xs[root, end - _some(root, rank) : end] for rank, end in enumerate(ends)]
    return jnp.stack([_packed([each], 2) for each in rows])


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
    Case(
        "ragged_exchange",
        lambda x, comm: pc.ragged_exchange(x, _some_for_each(comm.rank, comm.size), comm, capacity=x.shape[0])[0],
        _exchanged_rows,
        _two_for_each,
    ),
    Case(
        "ragged_all_gather",
        lambda x, comm: pc.ragged_all_gather(x, _some(comm.rank), comm)[0],
        lambda xs: jnp.broadcast_to(_own_rows(xs), (len(xs), *_own_rows(xs).shape)),
    ),
    Case(
        "ragged_gather",
        lambda x, comm: pc.ragged_gather(x, _some(comm.rank), comm, root=comm.size - 1)[0],
        _at(-1, _own_rows),
    ),
    Case(
        "ragged_scatter",
        lambda x, comm: pc.ragged_scatter(
            x, _some_for_each(comm.rank, comm.size), comm, root=comm.size - 1, capacity=2
        )[0],
        _scattered_rows,
        _two_for_each,
    ),
    Case("sendrecv", _neighbours, lambda xs: jnp.roll(xs, 1, axis=0)),
    Case("isendrecv", _neighbours_by_requests, lambda xs: jnp.roll(xs, 1, axis=0), native=True),
)

by_id = {case.id: case for case in CASES}

EACH_PRIMITIVE = tuple(
    by_id[id_]
    for id_ in (
        *("psum", "pmax", "all_gather", "psum_scatter", "all_to_all_tiled", "ppermute_partial", "broadcast"),
        *("reduce_last", "gather", "scatter", "scan", "exscan", "ragged_exchange", "sendrecv", "isendrecv"),
    )
)
"""One operation of each primitive, for tests of what is around a call. The others differ in the call's options."""


def supported(case: Case) -> bool:
    """Whether the transport of this process has the operation."""
    return not case.native or transport().name == "native"


def operands(
    case: Case, comm: pc.Communicator, dtype: Any = np.float32, seed: int = 0, extra: tuple[int, ...] = ()
) -> Any:
    """Returns the operands of all ranks, stacked. Every rank gets the same numbers; each operand has its own.

    Args:
        extra: further axes in front of each operand's own.
    """
    return values((comm.size, *extra, *case.shape(comm.size)), dtype, seed)


def values(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Any:
    """Returns random numbers of ``dtype``, from about -4 to 4; unsigned ones from 0."""
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


def special_floats(dtype: Any) -> Any:
    """Returns zeros and infinities of both signs, NaNs of several payloads and signs, and two other numbers."""
    dtype = jnp.dtype(dtype)
    bits = np.dtype(f"u{dtype.itemsize}")
    nan = np.full(4, np.nan, dtype).view(bits) | np.array([0, 1, 2, 3], bits)
    nan[2:] |= np.array(-0.0, dtype).view(bits)
    return np.concatenate([np.array([0.0, -0.0, np.inf, -np.inf, 1.5, -1.5], dtype), nan.view(dtype)])


def check_extrema(operands: list[Any], results: list[Any]) -> None:
    """Checks a maximum and a minimum over operands: NaN wins, and 0 is larger than -0."""
    stacked = np.stack(operands).astype(np.float64)
    for got, of_numpy, zero_is_negative in zip(results, (np.max, np.min), (np.all, np.any), strict=True):
        want = of_numpy(stacked, axis=0)
        np.testing.assert_array_equal(got.astype(np.float64), want)
        zeros = want == 0
        is_negative = (stacked == 0) & np.signbit(stacked) | (stacked != 0) & (zero_is_negative is np.all)
        np.testing.assert_array_equal(np.signbit(got)[zeros], zero_is_negative(is_negative, axis=0)[zeros])
