"""Mixture of experts that drops no token: each device sends each expert as many tokens as choose it.

Each of N devices has E/N of the E experts, in order, and T tokens of its own. The choices are those of ``experts.py``:

    y_t = sum_j gate_tj expert_{e_tj}(x_t)           e_t1 ... e_tk: the k experts with the largest p

A device sorts its k T choices by expert and sends the rows of each expert to the device that has it. The counts are
data: an all-gather tells all devices all counts, and a ragged exchange moves only the rows that are in use. The rows
arrive sorted by expert, as a grouped matrix product takes them (:func:`jax.lax.ragged_dot`).

Source: Gale, Narayanan, Young, Zaharia, "MegaBlocks", arXiv:2211.15841, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pycollective.errors import message
from pycollective.jax_support import jax_internals
from pycollective.parallel.axes import AxisName, vary
from pycollective.parallel.experts import Statistics, check_tokens, route, weighted_sum

Array = Any


def dropless_experts(
    apply: Callable[[Array, Array], Array],
    x: Array,
    logits: Array,
    axis_name: AxisName,
    *,
    k: int = 2,
) -> tuple[Array, Statistics]:
    """Sends each token to its ``k`` experts and drops none: ``y_t = sum_j gate_tj expert_{e_tj}(x_t)``.

    The result is that of :func:`experts` with ``capacity_factor=math.inf``, and does not depend on the number of
    devices. A device has room for ``R = N T min(k, E/N)`` rows, the most that can arrive. Only the rows in use travel.

    Args:
        apply: this device's experts, E/N in order along the axis. It maps the rows of all of them, of shape (R,
            width), sorted by expert, and the number of rows of each expert, int32 of shape (E/N,), to an array of
            shape (R, ...). An example is ``lambda rows, sizes: jax.lax.ragged_dot(rows, w, sizes)``. Rows behind those
            of the last expert are zeros, and their results are not used: ``apply`` and its derivative must be finite
            there.
        x: this device's tokens, of shape (..., width).
        logits: the logits of the router, of shape (..., E) and a floating-point dtype. E is a multiple of N.
        axis_name: the name of the axis along which experts and tokens are cut, or a tuple of names. This package must
            bind it: JAX has no ragged exchange in ``jax.vmap``, and none on CPUs.
        k: the number of experts of a token, from 1 to E. Default 2.

    Returns:
        The sum for each token, of shape (..., *result shape of ``apply`` for a row*) and the dtype of its result; and
        the :class:`Statistics`, the same on all devices. No choice is dropped.

    Raises:
        ValueError: the shapes do not fit, there is no token, N does not divide E, or ``k`` is not from 1 to E.
        NameError: the axis is not bound.

    Differentiation:
        Both modes, once ``apply`` has them. The gradient of a device's own experts is that of the sum of all devices'
        losses, as for :func:`experts`.

    Order:
        Program order: a sum of 2 E + 1 numbers for the statistics, an all-gather of E counts, then two ragged
        exchanges, of the tokens and of the results.

    Source:
        Gale et al., "MegaBlocks", arXiv:2211.15841, section 3; :func:`jax.lax.ragged_all_to_all`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import pycollective as pc
        >>> size = pc.world().size
        >>> scale = jnp.full((1, 1, 1), pc.world().rank + 1.0)  # one expert on each rank: it multiplies by a number
        >>> def layer(scale, x, logits):
        ...     return dropless_experts(lambda rows, sizes: jax.lax.ragged_dot(rows, scale, sizes), x, logits, "i", k=1)
        >>> logits = jnp.zeros((3, size)).at[:, size - 1].set(99.0)  # all tokens choose the last expert
        >>> y, statistics = pc.jit(layer, axis_name="i")(scale, jnp.ones((3, 1)), logits)
        >>> y.ravel().tolist() == [size, size, size], int(statistics.dropped)
        (True, 0)
    """
    devices = check_tokens("dropless_experts", x, logits, axis_name, k)
    width, count = x.shape[-1], logits.shape[-1]
    tokens = x.reshape(math.prod(x.shape[:-1]), width)
    routing = route(logits.reshape(len(tokens), count), k=k, capacity=len(tokens), axis_name=axis_name)

    wanted = jnp.zeros(count, jnp.int32).at[routing.experts.ravel()].add(1)
    sizes = _sizes(wanted, axis_name, devices)
    slots = sizes.starts[routing.experts] + routing.places  # choices of one token have different experts
    numbers = jnp.broadcast_to(jnp.arange(len(tokens), dtype=jnp.int32)[:, None], slots.shape)
    token_of_slot = jnp.zeros(slots.size, jnp.int32).at[slots].set(numbers, unique_indices=True)
    room = devices * len(tokens) * min(k, count // devices)
    arrived = _exchange(tokens[token_of_slot], room, sizes.sent, axis_name)
    results = apply(arrived, sizes.of_experts)
    if results.shape[:1] != arrived.shape[:1]:
        expected = f"a result of apply of shape {arrived.shape[:1]} + any"
        remedy = "Return one result for each row."
        raise ValueError(message("parallel.dropless_experts", expected, f"shape {results.shape}", remedy))
    chosen = _exchange(results, slots.size, sizes.returned, axis_name)[slots]
    y = weighted_sum(routing.gates, chosen)
    return y.reshape(*x.shape[:-1], *results.shape[1:]), Statistics(routing.dropped, routing.balance_loss)


class _Sizes(NamedTuple):
    """Where rows lie, as int32 arrays.

    Attributes:
        starts: where the rows of each expert begin among the choices of this device, of shape (E,).
        of_experts: how many rows each expert of this device gets, of shape (E/N,).
        sent: the offsets and sizes of the exchange of tokens, as :func:`jax.lax.ragged_all_to_all` takes them.
        returned: those of the exchange of results.
    """

    starts: Array
    of_experts: Array
    sent: tuple[Array, Array, Array, Array]
    returned: tuple[Array, Array, Array, Array]


def _sizes(wanted: Array, axis_name: AxisName, devices: int) -> _Sizes:
    """Computes where rows lie, from the number of this device's choices of each expert, ``wanted`` of shape (E,)."""
    each = wanted.shape[0] // devices
    device = lax.axis_index(axis_name)
    wanted_by = lax.all_gather(wanted, axis_name)  # (devices, E)

    def starts(sizes: Array, axis: int) -> Array:
        return jnp.cumsum(sizes, axis=axis, dtype=jnp.int32) - sizes

    def of_this_device(x: Array) -> Array:
        """Returns the part of this device's experts, of shape (..., E/N)."""
        return lax.dynamic_slice_in_dim(x, device * each, each, axis=-1)

    totals = jnp.sum(wanted_by, axis=0, dtype=jnp.int32)
    of_experts = starts(totals.reshape(devices, each), 1).reshape(-1)  # where an expert's rows begin on its device
    places = of_experts[None, :] + starts(wanted_by, 0)  # where a device's rows begin among those of an expert
    by_sender = starts(wanted_by, 1)  # where an expert's rows begin on the device that sends them
    own = starts(wanted, 0)
    to_experts, from_devices = places[device], of_this_device(wanted_by).reshape(-1)
    return _Sizes(
        starts=own,
        of_experts=of_this_device(totals),
        sent=(own, wanted, to_experts, from_devices),
        returned=(of_this_device(places).reshape(-1), from_devices, of_this_device(by_sender).reshape(-1), wanted),
    )


def _exchange(rows: Array, length: int, sizes: tuple[Array, Array, Array, Array], axis_name: AxisName) -> Array:
    """Sends rows to the devices of their experts, or back. Rows of the result that no row reaches are zeros."""
    axes = frozenset().union(*map(jax_internals.varying_axes, (rows, *sizes)))
    output = jnp.zeros((length, *rows.shape[1:]), rows.dtype)
    return lax.ragged_all_to_all(
        vary(rows, axes), vary(output, axes), *(vary(x, axes) for x in sizes), axis_name=axis_name
    )
