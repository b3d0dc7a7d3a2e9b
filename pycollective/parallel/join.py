"""Uneven inputs: a device without further batches takes part in the steps with weight zero until no device has any.

Device r has n_r examples, and g_r is the mean of their gradients. The mean gradient of all examples is

    g = sum over r of n_r g_r / sum over r of n_r

Both sums are made in one call, so a step has no additional call.

Source: PyTorch's ``torch.distributed.algorithms.Join`` and the ``join`` of its DistributedDataParallel. There a rank
without further batches answers the calls of the others with zeros, and each step has an additional call of one number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.errors import fail, message
from pycollective.parallel.axes import AxisName, name_of
from pycollective.parallel.per_device import as_varying, check_not_summed
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.meeting import complete, first_of, meet_or_fail
from pycollective.ranks.world import when_needed

Array = Any
Tree = Any

_WHERE = "parallel.join"


def join(loader: Iterable[Any], comm: Communicator | None = None) -> Iterator[tuple[Any, bool]]:
    """Yields equally many batches on all ranks: as many as the rank with the most batches has.

    All ranks must make this call. They exchange the numbers of their batches once, before the first batch. A rank
    without further batches yields its last batch again, so arrays keep their shapes and no function is compiled again.
    Pad a last batch that is smaller than the others, and count its examples (docs/parallel.md).

    Args:
        loader: the batches of this rank for one epoch. ``len(loader)`` is their number.
        comm: a communicator, the world by default.

    Yields:
        A batch, and whether it is a new batch of this rank. If it is not, pass the number zero to
        :func:`mean_over_examples`.

    Raises:
        TypeError: on all ranks: the loader of a rank has no length.
        ValueError: on all ranks: a rank has no batch, and another rank has one. On one rank: the loader's number of
            batches is not its length.
        RuntimeError: another rank does not make this call within the timeout of ``init``.

    Order:
        Outside programs: the ranks exchange their numbers when the first batch is read.

    Source:
        The ``join`` of PyTorch's DistributedDataParallel.

    Example:
        >>> import pycollective as pc
        >>> batches = range(1 + pc.world().rank)
        >>> list(join(batches))[:1], len(list(join(batches))) == pc.world().size
        ([(0, True)], True)
    """
    ranks = when_needed(_WHERE, comm)()
    try:
        own: int | str = len(loader)  # type: ignore[arg-type]
    except TypeError as error:
        own = str(error)
    of_this_rank = _Lengths.of(ranks.rank, own)
    steps = functools.partial(meet_or_fail, ranks, _WHERE, of_this_rank, _Lengths.followed_by)
    of_all = complete(ranks, _WHERE, _WHERE, (_WHERE, own), steps)
    if of_all.without is not None:
        rank, why = of_all.without
        remedy = "Pass a list of the batches, or a loader that knows their number."
        fail(TypeError, _WHERE, None, "loaders with a length on all ranks", f"none on rank {rank}: {why}", remedy)
    most, rank_with_most = of_all.most
    if most > 0 and of_all.empty is not None:
        got = f"none on rank {of_all.empty} and {most} on rank {rank_with_most}"
        fail(ValueError, _WHERE, None, "a batch or more on each rank", got, "Divide the examples otherwise.")

    assert isinstance(own, int)
    length = own
    batches = iter(loader)
    for i in range(length):
        batch = next(batches, _END)
        if batch is _END:
            _refuse(ranks, length, f"{i}")
        yield batch, True
    if next(batches, _END) is not _END:
        _refuse(ranks, length, "more")
    for _ in range(most - length):
        yield batch, False


class _Lengths(NamedTuple):
    """The lengths of the loaders of consecutive ranks.

    Attributes:
        most: the largest length, and the lowest rank that has it.
        empty: the lowest rank without a batch.
        without: the lowest rank whose loader has no length, and why.
    """

    most: tuple[int, int]
    empty: int | None
    without: tuple[int, str] | None

    @staticmethod
    def of(rank: int, length: int | str) -> _Lengths:
        """That of one rank. ``length``: why its loader has no length, if it has none."""
        if isinstance(length, str):
            return _Lengths((0, rank), None, (rank, length))
        return _Lengths((length, rank), rank if length == 0 else None, None)

    def followed_by(self, later: _Lengths) -> _Lengths:
        """That of these ranks and of those that follow them."""
        most = later.most if later.most[0] > self.most[0] else self.most
        return _Lengths(most, first_of(self.empty, later.empty), first_of(self.without, later.without))


_END = object()


def _refuse(ranks: Communicator, length: int, got: str) -> NoReturn:
    remedy = "Let len(loader) be the number of batches of one pass."
    fail(ValueError, _WHERE, ranks, f"{length} batches, the length of the loader", got, remedy)


def mean_over_examples(values: Tree, count: Array, axis_name: AxisName) -> tuple[Tree, Array]:
    """Averages each device's means over the examples of all devices: ``y = sum_r n_r x_r / sum_r n_r``.

    The number of examples is summed in the same call as the values, if sums are joined. Values narrower than float32
    are sent in float32, since their product with a number of examples may overflow.

    Args:
        values: a tree of floating-point arrays, each a mean over this device's examples: gradients, or gradients and
            the loss. If the number of examples is zero, they are not read.
        count: the number of this device's examples, a scalar; 0 for a batch without weight.
        axis_name: the name of the axis of data parallelism, or a tuple of names.

    Returns:
        The means, of the shapes and dtypes of ``values``, and the number of all examples, of the dtype of ``count``;
        both the same on all devices. If there are no examples at all, the means are zeros.

    Raises:
        ValueError: ``count`` is no scalar; a value is an integer; by JAX's types, values are summed already.
        NameError: the axis is not bound.

    Order:
        Program order: one sum.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> means, counts = jnp.array([1.0, 4.0, 9.0]), jnp.array([1, 2, 0])
        >>> jax.vmap(lambda x, n: mean_over_examples(x, n, "batch"), axis_name="batch")(means, counts)
        (Array([3., 3., 3.], dtype=float32), Array([3, 3, 3], dtype=int32))
    """
    where = "mean_over_examples"
    check_not_summed(where, values, axis_name)
    count = as_varying(jnp.asarray(count), axis_name)
    if count.shape:
        got = f"an array of shape {count.shape}"
        raise ValueError(message(f"parallel.{where}", "count to be a scalar", got, "Pass the sum of a mask, say."))
    for path, x in jax.tree_util.tree_leaves_with_path(values):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            got = f"{x.dtype} at {name_of(path)}"
            raise ValueError(message(f"parallel.{where}", "floating-point means", got, "Divide sums by the number."))

    def weighted(x: Array) -> Array:
        wide = np.promote_types(x.dtype, np.float32)
        # The mean over zero examples may be NaN, and so would be its product with zero.
        return jnp.where(count.astype(bool), x.astype(wide) * count.astype(wide), jnp.zeros((), wide))

    sums, total = lax.psum((jax.tree.map(weighted, values), count), axis_name)
    # Without examples the sums are zeros; the divisor must only be nonzero.
    divisor = jnp.where(total.astype(bool), total, jnp.ones_like(total))
    means = jax.tree.map(lambda s, x: (s / divisor.astype(s.dtype)).astype(x.dtype), sums, values)
    return means, total
