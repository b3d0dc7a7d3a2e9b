"""Data parallelism whose averages overlap with the computation of a step: delayed gradients, and gossip.

Plain data parallelism averages the gradients of a step at its end, so a step takes the time of the computation and most
of the time of the communication. Here the operand of each collective is known before the step begins.

Delayed:      x <- x + inner(mean over r of g_r(previous x))     the gradients of the step before
Gossip:       x_r <- (x_r + x_s) / 2 + inner(g_r(x_r))           s = r - 2^k modulo N, k = 0, 1, ... in turn

In gossip a device waits for one other device, not for all, and receives P bytes instead of about 2 P.

Source: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", arXiv:1705.09056, algorithm 1;
Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", arXiv:1811.10792, section 3 and appendix A: the
exponential graph; Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", arXiv:1710.06952.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from pycollective.parallel.axes import AxisName, axis_size, has_types
from pycollective.parallel.buckets import in_buckets
from pycollective.parallel.per_device import as_varying, check_not_summed, check_params_given

Array = Any
Tree = Any


class DelayedState(NamedTuple):
    """The state of :func:`delayed` on one device.

    Attributes:
        begun: whether at least one step was made.
        pending: this device's gradients of the last step.
        inner: the state of the inner optimizer, the same on all devices.
    """

    begun: Array
    pending: Tree
    inner: Any


def delayed(inner: optax.GradientTransformation, axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    """Steps by the mean of the gradients of the step before, which is communicated while this step computes its own.

    The first step changes neither the parameters nor the state of ``inner``; the last gradients are never applied.
    ``init`` and ``update`` are called where the axis is bound.

    Args:
        inner: an optimizer. It sees the mean of the gradients of all devices, one step late.
        axis_name: the axis, or a tuple of axes, of data parallelism.

    Returns:
        The optimizer. Its ``update`` takes the gradients of this device's own examples, not averaged, and returns
        updates that are the same on all devices. The state has P bytes more than that of ``inner``.

    Raises:
        ValueError: the gradients are summed already, by JAX's types.
        NameError: the axis is not bound.

    Example:
        >>> import jax, optax
        >>> import jax.numpy as jnp
        >>> optimizer = delayed(optax.sgd(1.0), "batch")
        >>> def two_steps(x):
        ...     state = optimizer.init(jnp.float32(0))
        ...     first, state = optimizer.update(x, state)
        ...     second, state = optimizer.update(10 * x, state)
        ...     return first, second
        >>> jax.vmap(two_steps, axis_name="batch")(jnp.array([1.0, 3.0]))
        (Array([0., 0.], dtype=float32), Array([-2., -2.], dtype=float32))
    """
    where = "delayed"
    inner = optax.with_extra_args_support(inner)

    def init(params: Tree) -> DelayedState:
        axis_size(where, axis_name)
        pending = as_varying(jax.tree.map(jnp.zeros_like, params), axis_name)
        return DelayedState(jnp.zeros((), bool), pending, inner.init(params))

    def update(
        grads: Tree, state: DelayedState, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, DelayedState]:
        check_not_summed(where, grads, axis_name)
        mean = lax.pmean(state.pending, axis_name)
        if not has_types(axis_name):  # else the mean would vary along the axis
            mean = _after(mean, grads)
        updates, inner_state = inner.update(mean, state.inner, params, **extra_args)
        # In the first step there is no mean yet. A step by zeros would count in Adam, and would decay weights.
        updates = jax.tree.map(lambda u: jnp.where(state.begun, u, jnp.zeros_like(u)), updates)
        inner_state = jax.tree.map(lambda new, old: jnp.where(state.begun, new, old), inner_state, state.inner)
        return updates, DelayedState(jnp.ones((), bool), grads, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


class GossipState(NamedTuple):
    """The state of :func:`gossip` on one device.

    Attributes:
        round: which partner is next: that at distance 2 ** ``round``.
        inner: the state of the inner optimizer, each device's own.
    """

    round: Array
    inner: Any


def gossip(inner: optax.GradientTransformation, axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    """Averages the parameters with those of one partner in each step, while the step computes.

    In turn a device receives the parameters of the device at distance 1, 2, 4, ... before it. The parameters at the
    begin of the step are averaged, so the messages depend on no gradient of the step. Each average keeps the mean over
    all devices. Without gradients, N devices all have the mean after log2 N steps if N is a power of two; for other N
    each round reduces the distance to the mean by a factor. ``init`` and ``update`` are called where the axis is bound.

    Args:
        inner: an optimizer. It sees the gradients and parameters of this device alone.
        axis_name: the axis, or a tuple of axes, of data parallelism.

    Returns:
        The optimizer. Its ``update`` takes the gradients of this device's own examples, and the parameters; it returns
        the updates of this device. The parameters of the devices differ; take their mean at the end.

    Raises:
        ValueError: ``update`` has no parameters; the gradients are summed already, by JAX's types.
        NameError: the axis is not bound.

    Source: arXiv:1705.09056, algorithm 1, with the exponential graph of arXiv:1811.10792. In the papers the partner
    may be some steps behind; here all ranks make the same calls, and a device waits for its partner.

    Example:
        >>> import jax, optax
        >>> import jax.numpy as jnp
        >>> optimizer = gossip(optax.sgd(0.1), "batch")
        >>> def two_steps(w):
        ...     state = optimizer.init(w)
        ...     for _ in range(2):
        ...         updates, state = optimizer.update(jnp.zeros_like(w), state, w)
        ...         w = optax.apply_updates(w, updates)
        ...     return w
        >>> jax.vmap(two_steps, axis_name="batch")(jnp.array([0.0, 1.0, 2.0, 5.0]))
        Array([2., 2., 2., 2.], dtype=float32)
    """
    where = "gossip"
    inner = optax.with_extra_args_support(inner)

    def init(params: Tree) -> GossipState:
        axis_size(where, axis_name)
        return as_varying(GossipState(jnp.int32(0), inner.init(params)), axis_name)

    def update(
        grads: Tree, state: GossipState, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, GossipState]:
        check_not_summed(where, grads, axis_name)
        check_params_given(where, params)
        devices = axis_size(where, axis_name)
        rounds = max(1, (devices - 1).bit_length())
        leaves, structure = jax.tree.flatten(as_varying(params, axis_name))
        # All devices have the same round, so all of them make the same call.
        received = lax.switch(state.round, [_from(2**k, devices, axis_name) for k in range(rounds)], leaves)
        others = structure.unflatten(_after(received, grads))
        updates, inner_state = inner.update(grads, state.inner, params, **extra_args)
        updates = jax.tree.map(lambda u, own, other: u + ((other - own) / 2).astype(u.dtype), updates, params, others)
        return as_varying((updates, GossipState((state.round + 1) % rounds, inner_state)), axis_name)

    return optax.GradientTransformationExtraArgs(init, update)


def _from(distance: int, devices: int, axis_name: AxisName) -> Callable[[list[Array]], list[Array]]:
    """Returns a function by which each device receives the arrays of the device at this distance before it."""
    perm = [(r, (r + distance) % devices) for r in range(devices)]

    def receive(arrays: list[Array]) -> list[Array]:
        received = in_buckets(lambda x: lax.ppermute(x, axis_name, perm), [jnp.ravel(x) for x in arrays])
        return [x.reshape(like.shape) for x, like in zip(received, arrays, strict=True)]

    return receive


def _after(arrays: Tree, others: Tree) -> Tree:
    """Returns ``arrays`` with a dependency on ``others``: XLA computes all of ``others`` before it reads the result.

    Without it XLA would place the readers of a received array early in the program and reuse the array's memory for
    the gradients, which would then wait for the message. On CPU devices XLA removes ``optimization_barrier`` before it
    schedules a program. So the arrays depend on a comparison that is always false, which XLA cannot know: that a number
    is larger than infinity.
    """
    first = [jnp.any(jnp.abs(jnp.ravel(x)[:1]) > jnp.inf) for x in jax.tree.leaves(others)]
    never = functools.reduce(jnp.logical_or, first, jnp.zeros((), bool))
    return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), arrays)
