"""Which dimension of each array is cut along which axis of a mesh, by rules over the arrays' paths in a tree."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from pycollective.errors import fail

T = TypeVar("T")
_WHERE = "parallel.match_partition_rules"


def match_partition_rules(rules: Sequence[tuple[str, jax.P]], tree: Any) -> Any:
    """The partition of each array of a tree: that of the first rule whose pattern occurs in the array's path.

    The path of an array is its keys with "/" between them, such as ``params/Block_0/up/kernel``. The state of an
    optimizer has the paths of the parameters in its own (``0/mu/params/Block_0/up/kernel``), so the same rules cut it.
    Arrays of one element are never cut: scalars, and the placeholders in the state of Adafactor.

    Args:
        rules: pairs of a regular expression, for :func:`re.search`, and a partition. A partition names for the first
            dimensions of an array the axis along which each is cut, or None.
        tree: arrays, or their shapes (:func:`jax.eval_shape`), in a tree of any kind: of Flax linen, Flax NNX, Equinox.

    Returns:
        A tree of partitions, for ``out_shardings`` of :func:`jax.jit` inside :func:`jax.set_mesh`, for ``in_specs`` of
        ``pc.shard_map``, and for :func:`for_parts`.

    Raises:
        ValueError: no rule fits the path of an array, or a partition has more dimensions than its array.

    Source:
        The rules of EasyLM and of the language models in JAX that follow it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pycollective import parallel
        >>> params = {"up": {"kernel": jnp.ones((4, 16)), "bias": jnp.ones(16)}, "scale": jnp.ones(4)}
        >>> rules = [("up/kernel", jax.P(None, "model")), ("up/bias", jax.P("model")), ("", jax.P())]
        >>> parallel.match_partition_rules(rules, params)["up"]
        {'bias': P('model',), 'kernel': P(None, 'model')}
    """

    def partition(path: Any, leaf: Any) -> jax.P:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shape = np.shape(leaf)
        if math.prod(shape) <= 1:
            return jax.P()
        found = next((spec for pattern, spec in rules if re.search(pattern, name)), None)
        if found is None:
            got = f"{name!r} of shape {shape}"
            fail(ValueError, _WHERE, None, "a rule for each array", got, 'End the rules with ("", jax.P()).')
        if len(found) > len(shape):
            got = f"{found} for {name!r} of shape {shape}"
            expected = "a partition of no more dimensions than the array has"
            fail(ValueError, _WHERE, None, expected, got, "Change the rule.")
        return found

    return jax.tree_util.tree_map_with_path(partition, tree)


def init_by_rules(rules: Sequence[tuple[str, jax.P]], init: Callable[..., T], *args: Any) -> T:
    """The result of ``init(*args)`` as global arrays, cut as the rules say; each device computes its own part alone.

    No device needs memory for a whole array that is cut. The values are those of ``init(*args)`` on one device.

    Args:
        rules: as in :func:`match_partition_rules`.
        init: a function that :func:`jax.jit` can compile: ``model.init`` of Flax, ``optimizer.init`` of optax, or a
            function that returns the state of a new ``nnx`` module. Its result is a tree of arrays.
        *args: its arguments: keys, arrays, and trees of them, that all processes have.

    Returns:
        The result of ``init``; its arrays are cut over the mesh of :func:`jax.set_mesh`.

    Raises:
        ValueError: as :func:`match_partition_rules`.
        RuntimeError: no mesh was set.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pycollective import parallel
        >>> mesh = jax.make_mesh((2,), ("model",), (jax.sharding.AxisType.Auto,), devices=jax.local_devices()[:2])
        >>> with jax.set_mesh(mesh):
        ...     params = parallel.init_by_rules([("kernel", jax.P("model"))], lambda: {"kernel": jnp.ones((4, 3))})
        >>> [part.data.shape for part in params["kernel"].addressable_shards]
        [(2, 3), (2, 3)]
    """
    if jax.sharding.get_abstract_mesh().empty:
        remedy = "Call jax.set_mesh(jax.make_mesh(...)) first."
        fail(RuntimeError, "parallel.init_by_rules", None, "a mesh", "none", remedy)
    partitions = match_partition_rules(rules, jax.eval_shape(init, *args))
    return jax.jit(init, out_shardings=partitions)(*args)
