"""Uneven inputs: devices that have run out of batches continue with weight zero until all devices have.

With a number of examples n_r and gradients g_r, the means over the examples of device r, the gradient of all examples:

    g = sum over r of n_r g_r / sum over r of n_r

The sum of the numbers is in the same call as that of the gradients, so a step has no additional call.

Source: PyTorch's ``torch.distributed.algorithms.Join`` and the ``join`` of its DistributedDataParallel. There a rank
that has run out answers the calls of the others with zeros, and each step has one more call, of one number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.errors import fail, message
from pycollective.parallel.axes import AxisName, name_of
from pycollective.parallel.per_device import as_varying, check_not_summed
from pycollective.ranks.agreement import gather_from_all
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.world import when_needed

Array = Any
Tree = Any

_WHERE = "parallel.join"


def join(loader: Iterable[Any], comm: Communicator | None = None) -> Iterator[tuple[Any, bool]]:
    """Yields as many batches on each rank as the rank with most of them has.

    All ranks make this call, and compare the numbers of their batches once, before the first batch. A rank that has run
    out yields its last batch again, so arrays keep their shapes and no function is compiled anew. A last batch that is
    smaller than others has another shape; fill it up, and count its examples (docs/parallel.md).

    Args:
        loader: the batches of this rank for one pass. ``len(loader)`` is their number.
        comm: the ranks; by default the world.

    Yields:
        A batch, and whether it is a new one of this rank: False when the rank has run out. Give
        :func:`mean_over_examples` the number zero then.

    Raises:
        TypeError: the loader of a rank has no length.
        ValueError: a rank has no batch, and another one has; or, on its own rank only, a loader does not have as many
            batches as its length says.
        RuntimeError: another rank does not make this call within the timeout of ``init``.

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
    lengths = gather_from_all(ranks, _WHERE, _WHERE, own)
    for rank, length in enumerate(lengths):
        if isinstance(length, str):
            remedy = "Pass a list of the batches, or a loader that knows their number."
            fail(
                TypeError, _WHERE, None, "loaders with a length on all ranks", f"none on rank {rank}: {length}", remedy
            )
    most = max(lengths)
    if most > 0 and 0 in lengths:
        got = f"none on rank {lengths.index(0)} and {most} on rank {lengths.index(most)}"
        fail(ValueError, _WHERE, None, "a batch or more on each rank", got, "Divide the examples otherwise.")

    length = lengths[ranks.rank]
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


_END = object()


def _refuse(ranks: Communicator, length: int, got: str) -> NoReturn:
    remedy = "Let len(loader) be the number of batches of one pass."
    fail(ValueError, _WHERE, ranks, f"{length} batches, the length of the loader", got, remedy)


def mean_over_examples(values: Tree, count: Array, axis_name: AxisName) -> tuple[Tree, Array]:
    """Returns the means over the examples of all devices, from each device's means over its own; and their number.

    The numbers of examples travel with the values: in one call, where sums are joined. Values narrower than float32
    travel in float32, since a product with a number of examples may leave their range.

    Args:
        values: gradients, or a loss with them: each a mean over this device's examples. Where the number is zero they
            may be anything.
        count: the number of this device's examples, a scalar; 0 for a batch that counts for nothing.
        axis_name: the axis, or a tuple of axes, of data parallelism.

    Returns:
        The means, of the shapes and dtypes of ``values``, and the number of examples, of the dtype of ``count``; the
        same on all devices. Without any examples the means are zeros.

    Raises:
        ValueError: ``count`` is no scalar; a value is an integer; values are summed already, by JAX's types.
        NameError: the axis is not bound.

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
        # A mean over no examples may be NaN, which a product with zero does not remove.
        return jnp.where(count.astype(bool), x.astype(wide) * count.astype(wide), jnp.zeros((), wide))

    sums, total = lax.psum((jax.tree.map(weighted, values), count), axis_name)
    # Without examples the sums are zeros, whatever they are divided by.
    divisor = jnp.where(total.astype(bool), total, jnp.ones_like(total))
    means = jax.tree.map(lambda s, x: (s / divisor.astype(s.dtype)).astype(x.dtype), sums, values)
    return means, total
