"""Mixture of experts: the experts are cut along an axis, and each token is sent to the devices of its experts.

Each of N devices has E/N of the E experts, in order, and T tokens of its own. With p = softmax(logits):

    y_t = sum_j gate_tj expert_{e_tj}(x_t)           e_t1 ... e_tk: the k experts with the largest p
    gate_tj = p_{e_tj} / sum_i p_{e_ti}              for k = 1: p_{e_t1}
    C = ceil(capacity_factor k T / E)                capacity: places of an expert for the tokens of one device

First choices of all tokens get places before second choices, and earlier tokens before later ones. A choice without a
place is dropped: its term is missing in the sum. The balance loss is 1 if all experts get equally many tokens:

    loss = E sum_e f_e P_e           f_e: the share of tokens whose first choice is e;  P_e: the mean of p_e

Source: Lepikhin et al., "GShard", arXiv:2006.16668, section 2.2 and algorithm 1; Fedus, Zoph, Shazeer, "Switch
Transformers", arXiv:2101.03961, section 2.2 (capacity, balance loss, k = 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.errors import message
from pycollective.parallel.axes import AxisName, axis_size

Array = Any


class Routing(NamedTuple):
    """Where the tokens of one device go.

    Attributes:
        experts: the experts that each token chooses, the best first; int32 of shape (tokens, k).
        places: the number of each choice among the choices of the same expert, from 0; int32 of shape (tokens, k).
        kept: whether a choice has a place, ``places < capacity``; bool of shape (tokens, k).
        gates: the weights of all choices, dropped ones included; float32, or float64 for logits of float64, of shape
            (tokens, k).
        dropped: the number of dropped choices; an int32.
        balance_loss: the balance loss, in the dtype of ``gates``.
    """

    experts: Array
    places: Array
    kept: Array
    gates: Array
    dropped: Array
    balance_loss: Array


class Statistics(NamedTuple):
    """Statistics of :func:`experts` over the tokens of all devices along its axis.

    Attributes:
        dropped: the number of dropped choices, of ``k`` choices for each token; an int32.
        balance_loss: the balance loss; a float32, or float64 for logits of float64. Add it to the loss with a weight
            such as 0.01.
    """

    dropped: Array
    balance_loss: Array


def route(logits: Array, *, k: int, capacity: int, axis_name: AxisName | None = None) -> Routing:
    """Chooses ``k`` experts for each token, and a place for the token in the buffer of each of these experts.

    ``experts_t = argtop_k(p_t)`` and ``gates_t = p_t[experts_t]``, with ``p = softmax(logits)``. For ``k > 1`` the
    gates of a token are divided by their sum.

    Args:
        logits: an array of shape (tokens, experts) and a floating-point dtype. The probabilities are float32, or
            float64 for float64.
        k: the number of experts of a token, from 1 to the number of experts.
        capacity: the number of places of each expert, from 0.
        axis_name: the name of the axis, or a tuple of names, over whose devices ``dropped`` is summed and the balance
            loss is computed. All its devices must have equally many tokens. Default None: these tokens alone.

    Returns:
        The :class:`Routing` of these tokens.

    Raises:
        ValueError: ``logits`` is no matrix of floats with at least one token and ``k`` experts, ``k`` is less than 1,
            or ``capacity`` is negative.
        NameError: the axis is not bound.

    Differentiation:
        With respect to ``logits``, through ``gates`` and ``balance_loss``. The choices are constants.

    Order:
        Program order: with ``axis_name`` one sum of 2 E + 1 numbers.

    Source:
        Lepikhin et al., "GShard", arXiv:2006.16668, algorithm 1; Fedus et al., arXiv:2101.03961, section 2.2.

    Example:
        >>> import jax.numpy as jnp
        >>> logits = jnp.log(jnp.array([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]]))
        >>> routing = route(logits, k=1, capacity=1)
        >>> routing.experts.ravel(), routing.places.ravel(), routing.dropped
        (Array([0, 0, 1], dtype=int32), Array([0, 1, 0], dtype=int32), Array(1, dtype=int32))
    """
    _check_choices("route", logits, k)
    if logits.ndim != 2 or capacity < 0:
        remedy = "Reshape logits to (-1, experts)."
        got = f"shape {logits.shape} and capacity={capacity}"
        raise ValueError(message("parallel.route", "logits (tokens, experts) and a capacity from 0 on", got, remedy))
    devices = 1 if axis_name is None else axis_size("route", axis_name)
    tokens, count = logits.shape
    probabilities = jax.nn.softmax(logits.astype(np.promote_types(logits.dtype, np.float32)))
    gates, chosen = lax.top_k(probabilities, k)
    if k > 1:  # for k = 1 the gate would be 1, and the router would get no gradient through the results
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)

    in_order = chosen.T.ravel()  # first choices before second ones
    by_expert = jnp.argsort(in_order, stable=True)
    wanted = jnp.zeros(count, jnp.int32).at[in_order].add(1)
    starts = jnp.cumsum(wanted) - wanted
    of_sorted = jnp.arange(k * tokens, dtype=jnp.int32) - starts[in_order[by_expert]]
    places = jnp.zeros_like(in_order).at[by_expert].set(of_sorted, unique_indices=True).reshape(k, tokens).T

    first = jnp.zeros(count, jnp.int32).at[chosen[:, 0]].add(1).astype(probabilities.dtype)
    totals = first, jnp.sum(probabilities, axis=0), jnp.sum(jnp.maximum(wanted - capacity, 0))
    shares, means, dropped = totals if axis_name is None else lax.psum(totals, axis_name)
    loss = count * jnp.sum(shares * means) / (tokens * devices) ** 2
    return Routing(chosen, places, places < capacity, gates, dropped, loss)


def experts(
    apply: Callable[[Array], Array],
    x: Array,
    logits: Array,
    axis_name: AxisName,
    *,
    k: int = 2,
    capacity_factor: float = 1.25,
) -> tuple[Array, Statistics]:
    """Sends each token to the ``k`` experts that it chooses: ``y_t = sum_j gate_tj expert_{e_tj}(x_t)``.

    An expert has ``C = min(ceil(capacity_factor k T / E), T)`` places for the T tokens of each device. So the number of
    devices determines which choices are dropped. If no choice is dropped, the result does not depend on it.

    Args:
        apply: this device's experts, E/N in order along the axis. It maps the tokens of each expert, of shape
            (E/N, N C, width), to an array of shape (E/N, N C, ...). An example is
            ``lambda tokens: jax.vmap(mlp)(params, tokens)``. Places without a token are zeros: ``apply`` and its
            derivative must be finite there.
        x: this device's tokens, of shape (..., width).
        logits: the logits of the router, of shape (..., E) and a floating-point dtype. E is a multiple of N.
        axis_name: the name of the axis along which experts and tokens are cut, or a tuple of names.
        k: the number of experts of a token, from 1 to E. Default 2.
        capacity_factor: the capacity of an expert, as a multiple of the number of tokens that it gets if the tokens
            choose all experts equally often. Default 1.25. With ``math.inf`` no choice is dropped.

    Returns:
        The sum for each token, of shape (..., *result shape of ``apply`` for a token*) and the dtype of its result; and
        the :class:`Statistics`, the same on all devices. A token whose choices are all dropped has zeros: add the
        result to ``x``.

    Raises:
        ValueError: the shapes do not fit, there is no token, N does not divide E, ``k`` is not from 1 to E, or
            ``capacity_factor`` is not positive.
        NameError: the axis is not bound.

    Differentiation:
        Both modes. The gradient of a device's own experts is that of the sum of all devices' losses, since they get
        tokens of all devices. So do not sum or average it along this axis. Divide it by N if the loss is the mean.

    Order:
        Program order: a sum of 2 E + 1 numbers for the statistics, then two all-to-alls of ``E C width`` elements, for
        the tokens and for the results.

    Source:
        Lepikhin et al., "GShard", arXiv:2006.16668, section 2.2.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> def layer(scale, x, logits):  # two experts on two devices: each multiplies by a number
        ...     return experts(lambda tokens: scale[:, None, None] * tokens, x, logits, "experts", k=1)
        >>> logits = jnp.array([[[9.0, -9.0], [-9.0, 9.0]]] * 2)  # of each device's two tokens one chooses each expert
        >>> y, statistics = jax.vmap(layer, axis_name="experts")(jnp.array([[2.0], [5.0]]), jnp.ones((2, 2, 1)), logits)
        >>> y.ravel().round(3), statistics.dropped
        (Array([2., 5., 2., 5.], dtype=float32), Array([0, 0], dtype=int32))
    """
    check_tokens("experts", x, logits, axis_name, k)
    count = logits.shape[-1]
    if not capacity_factor > 0:
        remedy = "Pass e.g. 1.25, or math.inf to drop nothing."
        raise ValueError(message("parallel.experts", "a positive capacity_factor", f"{capacity_factor}", remedy))
    width = x.shape[-1]
    tokens = x.reshape(math.prod(x.shape[:-1]), width)
    capacity = math.ceil(min(capacity_factor * k * len(tokens) / count, len(tokens)))
    routing = route(logits.reshape(len(tokens), count), k=k, capacity=capacity, axis_name=axis_name)

    slots = jnp.where(routing.kept, routing.experts * capacity + routing.places, count * capacity)
    numbers = jnp.broadcast_to(jnp.arange(len(tokens), dtype=jnp.int32)[:, None], slots.shape)
    token_of_slot = jnp.full(count * capacity, len(tokens), jnp.int32).at[slots].set(numbers, mode="drop")
    buffers = _rows(tokens, token_of_slot).reshape(count, capacity, width)
    received = lax.all_to_all(buffers, axis_name, 0, 1, tiled=True)
    results = apply(received)
    if results.shape[:2] != received.shape[:2]:
        expected = f"a result of apply of shape {received.shape[:2]} + any"
        remedy = "Return one result for each of the tokens."
        raise ValueError(message("parallel.experts", expected, f"shape {results.shape}", remedy))
    returned = lax.all_to_all(results, axis_name, 1, 0, tiled=True)
    chosen = _rows(returned.reshape(count * capacity, *results.shape[2:]), slots)
    y = weighted_sum(routing.gates, chosen)
    return y.reshape(*x.shape[:-1], *results.shape[2:]), Statistics(routing.dropped, routing.balance_loss)


def weighted_sum(gates: Array, chosen: Array) -> Array:
    """Sums the results of a token's choices, of shape (tokens, k, ...), with gates of shape (tokens, k)."""
    wide = np.promote_types(gates.dtype, chosen.dtype)
    gates = gates.astype(wide).reshape(*gates.shape, *[1] * (chosen.ndim - 2))
    return jnp.sum(gates * chosen.astype(wide), axis=1).astype(chosen.dtype)


def _rows(x: Array, numbers: Array) -> Array:
    """Returns the rows of ``x`` with these numbers, and zeros for a number that is too large."""
    return x.at[numbers].get(mode="fill", fill_value=0)


def check_tokens(where: str, x: Array, logits: Array, axis_name: AxisName, k: int) -> int:
    """Checks tokens and logits, and returns the number of devices along the axis."""
    devices = axis_size(where, axis_name)
    _check_choices(where, logits, k)
    count = logits.shape[-1]
    if x.ndim < 1 or x.shape[:-1] != logits.shape[:-1]:
        got = f"shapes {x.shape} and {logits.shape}"
        remedy = "Compute the logits of this device's tokens alone."
        raise ValueError(message(f"parallel.{where}", "x (..., width) and logits (..., experts)", got, remedy))
    if count % devices:
        remedy = "Each device has as many experts: pass logits of all of them."
        expected = f"a multiple of {devices} experts: the size of the axis {axis_name!r}"
        raise ValueError(message(f"parallel.{where}", expected, f"logits of {count}", remedy))
    return devices


def _check_choices(where: str, logits: Array, k: int) -> None:
    fits = logits.ndim > 0 and logits.size > 0 and jnp.issubdtype(logits.dtype, jnp.floating)
    if not fits or not 1 <= k <= logits.shape[-1]:
        expected = "floating-point logits (..., experts) of some tokens, and k from 1 to experts"
        got = f"{logits.dtype}{list(logits.shape)} and k={k}"
        remedy = "A token cannot choose more experts than there are."
        raise ValueError(message(f"parallel.{where}", expected, got, remedy))
