"""Random streams along an axis: one that all devices share, and one of each device.

With tensor parallelism some activations are the same on all devices along the axis, and others are cut. Dropout of the
first must drop the same elements on all devices, else these go on with other values. Dropout of the second must draw
for each device anew, else each device drops the same places of its part.

Source: the tracker of random states of model parallelism in Megatron-LM (``tensor_parallel/random.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax

from pycollective.errors import message
from pycollective.parallel.axes import AxisName, axis_size, varies

Array = Any


class RandomStreams(NamedTuple):
    """Keys of :mod:`jax.random` for a device along an axis.

    Attributes:
        same: the key for what is the same on all devices along the axis; it is the same on all of them.
        own: the key for what is cut along the axis; it differs from device to device.
    """

    same: Array
    own: Array


def random_streams(key: Array, axis_name: AxisName) -> RandomStreams:
    """Makes two keys of one: ``same`` for values that all devices share, and ``own`` for values that are cut.

    ``same, base = split(key)`` and ``own = fold_in(base, r)`` on device r. All streams are independent. Along several
    axes call it again with one of the keys.

    Args:
        key: a key of :func:`jax.random.key`, the same on all devices along the axis. Use it for nothing else.
        axis_name: the name of the axis, or a tuple of names.

    Returns:
        The :class:`RandomStreams` of this device.

    Raises:
        ValueError: by JAX's types, the key varies along the axis.
        NameError: the axis is not bound.

    Differentiation:
        None: keys have no derivative.

    Order:
        No communication.

    Source:
        ``CudaRNGStatesTracker`` of Megatron-LM; :func:`jax.random.fold_in`.

    Example:
        >>> import jax
        >>> def bits(_):
        ...     same, own = random_streams(jax.random.key(0), "model")
        ...     return jax.random.bits(same), jax.random.bits(own)
        >>> same, own = jax.vmap(bits, axis_name="model")(jax.numpy.zeros(2))
        >>> bool(same[0] == same[1]), bool(own[0] == own[1])
        (True, False)
    """
    axis_size("random_streams", axis_name)
    if varies(key, axis_name):
        expected = f"a key that is the same on all devices along {axis_name!r}"
        remedy = "Pass it by an in_spec of P(), or make it of the same seed on all devices."
        raise ValueError(message("parallel.random_streams", expected, "one that varies by its type", remedy))
    same, base = jax.random.split(key)
    return RandomStreams(same, jax.random.fold_in(base, lax.axis_index(axis_name)))
