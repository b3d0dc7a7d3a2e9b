"""Zigzag order: a cut of a sequence by which a causal mask gives each device the same work.

The sequence is cut into 2P chunks, and device r of P has the chunks r and 2P - 1 - r. Under a causal mask the queries
of chunk c see the keys of c + 1 chunks, so the queries of each device see 2P + 1 chunks together.

Source: the "zigzag" of ring-flash-attention (Zhu); "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2
(context parallelism). Brandon et al., "Striped Attention", arXiv:2311.09431, has another order with the same aim.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.errors import message
from pycollective.parallel.axes import AxisName, axis_size

Array = Any


def zigzag(x: Array, devices: int, axis: int = 0) -> Array:
    """Reorders a whole sequence, so that equal blocks of the result are the devices' parts in zigzag order.

    Args:
        x: an array with a whole sequence along ``axis``, whose length is a multiple of ``2 * devices``.
        devices: the number of devices, P.
        axis: the axis of the sequence. Default 0.

    Returns:
        The array of the shape and dtype of ``x``. Block r of P along ``axis`` has the chunks r and 2P - 1 - r of 2P.

    Raises:
        ValueError: the length is no multiple of ``2 * devices``, or ``devices`` is less than 1.

    Differentiation:
        Both modes. The transpose is :func:`unzigzag`.

    Order:
        No communication.

    Source:
        ring-flash-attention; arXiv:2407.21783, section 3.3.2.

    Example:
        >>> import jax.numpy as jnp
        >>> zigzag(jnp.arange(8), 2)
        Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    return _reordered("zigzag", x, devices, axis, _order(devices))


def unzigzag(x: Array, devices: int, axis: int = 0) -> Array:
    """Restores the order of a sequence in zigzag order, the inverse of :func:`zigzag`.

    Args:
        x: an array with the devices' parts in zigzag order along ``axis``, device after device.
        devices: the number of devices, P.
        axis: the axis of the sequence. Default 0.

    Returns:
        The array of the shape and dtype of ``x``, in the order of positions.

    Raises:
        ValueError: the length is no multiple of ``2 * devices``, or ``devices`` is less than 1.

    Differentiation:
        Both modes. The transpose is :func:`zigzag`.

    Order:
        No communication.

    Source:
        As for :func:`zigzag`.

    Example:
        >>> import jax.numpy as jnp
        >>> unzigzag(jnp.array([0, 1, 6, 7, 2, 3, 4, 5]), 2)
        Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    return _reordered("unzigzag", x, devices, axis, np.argsort(_order(devices)))


def zigzag_positions(length: int, axis_name: AxisName) -> Array:
    """Returns the positions of this device's part of a sequence in zigzag order, for embeddings of positions.

    Args:
        length: the number of positions of this device, T/P. It is even.
        axis_name: the name of the axis along which the sequence is cut, or a tuple of names.

    Returns:
        The positions in the whole sequence, an int32 array of shape (length,).

    Raises:
        ValueError: ``length`` is odd or negative.
        NameError: the axis is not bound.

    Differentiation:
        None: the result is of integers.

    Order:
        No communication.

    Source:
        As for :func:`zigzag`.

    Example:
        >>> import jax
        >>> jax.vmap(lambda _: zigzag_positions(4, "seq"), axis_name="seq")(jnp.zeros(2))
        Array([[0, 1, 6, 7],
               [2, 3, 4, 5]], dtype=int32)
    """
    devices = axis_size("zigzag_positions", axis_name)
    if length % 2 or length < 0:
        remedy = "A device has two chunks of equal lengths."
        raise ValueError(message("parallel.zigzag_positions", "an even length, from 0", f"{length}", remedy))
    device = lax.axis_index(axis_name)
    chunk = jnp.arange(length // 2, dtype=jnp.int32)
    return jnp.concatenate([chunk_number(device, half, devices) * (length // 2) + chunk for half in (0, 1)])


def chunk_number(device: Any, half: Any, devices: int) -> Any:
    """Returns which of the 2P chunks is the first (0) or second (1) half of a device's part. For numbers and arrays."""
    return device + half * (2 * devices - 1 - 2 * device)


def _order(devices: int) -> np.ndarray:
    """Returns the numbers of the chunks in zigzag order."""
    return np.array([chunk_number(device, half, devices) for device in range(devices) for half in (0, 1)], np.int32)


def _reordered(where: str, x: Array, devices: int, axis: int, order: np.ndarray) -> Array:
    if devices < 1 or x.shape[axis] % (2 * devices):
        expected = f"a sequence of a multiple of 2 * devices positions along axis {axis}, for at least 1 device"
        got = f"shape {x.shape} and {devices} devices"
        raise ValueError(message(f"parallel.{where}", expected, got, "Fill the sequence up."))
    axis %= x.ndim
    chunks = x.reshape(*x.shape[:axis], 2 * devices, x.shape[axis] // (2 * devices), *x.shape[axis + 1 :])
    return jnp.take(chunks, order, axis=axis, unique_indices=True).reshape(x.shape)
