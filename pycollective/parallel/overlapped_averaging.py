"""Data parallelism whose averages overlap with the computation of a step: delayed gradients, and gossip.

Plain data parallelism averages the gradients at the end of a step, so a step takes the time of the computation plus
most of the time of the communication. Here the operand of each collective is known before the step begins, so the
communication overlaps with the computation.

    delayed      x <- x + inner(mean over r of g_r(previous x))     the gradients of the previous step
    gossip       x_r <- (x_r + x_s) / 2 + inner(g_r(x_r))           s = r - 2^k modulo N, k = 0, 1, ... in turn

In gossip a device waits for one other device, not for all. It receives P bytes of parameters instead of about 2 P.

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
        begun: whether ``update`` was called at least once; a bool.
        pending: this device's gradients of the last step, in their shapes and dtypes.
        inner: the state of the inner optimizer, the same on all devices.
    """

    begun: Array
    pending: Tree
    inner: Any


def delayed(inner: optax.GradientTransformation, axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    """Applies the mean gradients of the previous step, which are summed while the current gradients are computed.

    Step t: ``x_{t+1} = x_t + inner(mean_r g_r(x_{t-1}))``. The first step changes neither the parameters nor the state
    of ``inner``, and the gradients of the last step are never applied. Call ``init`` and ``update`` where the axis is
    bound.

    Args:
        inner: an optimizer. It gets the mean of the gradients of all devices, one step late.
        axis_name: the name of the axis of data parallelism, or a tuple of names.

    Returns:
        The optimizer. Its ``update`` takes the gradients of this device's own examples, not averaged. It returns
        updates of their shapes, the same on all devices. The state is a :class:`DelayedState`, with one copy of the
        gradients more than that of ``inner``.

    Raises:
        ValueError: by JAX's types, the gradients are summed already.
        NameError: the axis is not bound.

    Order:
        Program order: one mean of the previous gradients in each ``update``.

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
        if not has_types(axis_name):  # with JAX's types the result would vary along the axis
            mean = _depending_on(mean, grads)
        updates, inner_state = inner.update(mean, state.inner, params, **extra_args)
        # The first step has no gradients yet. Zeros instead would advance Adam's step count, and weights would decay.
        updates = jax.tree.map(lambda u: jnp.where(state.begun, u, jnp.zeros_like(u)), updates)
        inner_state = jax.tree.map(lambda new, old: jnp.where(state.begun, new, old), inner_state, state.inner)
        return updates, DelayedState(jnp.ones((), bool), grads, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


class GossipState(NamedTuple):
    """The state of :func:`gossip` on one device.

    Attributes:
        round: the number k of the next step's partner, at distance ``2 ** k``; an int32.
        inner: the state of the inner optimizer. The devices' states differ.
    """

    round: Array
    inner: Any


def gossip(inner: optax.GradientTransformation, axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    """Averages the parameters with those of one partner in each step: ``x_r <- (x_r + x_s) / 2 + inner(g_r(x_r))``.

    The partner is the device ``s = r - 2^k`` modulo N, with k = 0, 1, 2, ... in turn. The parameters are those at the
    beginning of the step, so the messages do not depend on its gradients and overlap with their computation. Averaging
    does not change the mean over all devices. Without gradients, all N devices have this mean after log2 N steps if N
    is a power of two; for other N each pass through all k reduces the distance from the mean by a factor. Call ``init``
    and ``update`` where the axis is bound.

    Args:
        inner: an optimizer. It gets the gradients and the parameters of this device alone.
        axis_name: the name of the axis of data parallelism, or a tuple of names.

    Returns:
        The optimizer. Its ``update`` takes the gradients of this device's own examples, and the parameters. It returns
        this device's updates, of the shapes and dtypes that ``inner`` gives them. The parameters of the devices differ;
        take their mean at the end. The state is a :class:`GossipState`.

    Raises:
        ValueError: ``update`` gets no parameters; by JAX's types, the gradients are summed already.
        NameError: the axis is not bound.

    Order:
        Program order: one exchange with the partner in each ``update``. In the papers a partner may be some steps
        behind; here a device waits for its partner.

    Source:
        Lian et al., arXiv:1705.09056, algorithm 1, with the exponential graph of Assran et al., arXiv:1811.10792.

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
        # The round is the same on all devices, so all of them take the same branch and make the same call.
        received = lax.switch(state.round, [_receive_from(2**k, devices, axis_name) for k in range(rounds)], leaves)
        others = structure.unflatten(_depending_on(received, grads))
        updates, inner_state = inner.update(grads, state.inner, params, **extra_args)
        updates = jax.tree.map(lambda u, own, other: u + ((other - own) / 2).astype(u.dtype), updates, params, others)
        return as_varying((updates, GossipState((state.round + 1) % rounds, inner_state)), axis_name)

    return optax.GradientTransformationExtraArgs(init, update)


def _receive_from(distance: int, devices: int, axis_name: AxisName) -> Callable[[list[Array]], list[Array]]:
    """Returns a function by which device r receives the arrays of device ``r - distance`` modulo ``devices``."""
    perm = [(r, (r + distance) % devices) for r in range(devices)]

    def receive(arrays: list[Array]) -> list[Array]:
        received = in_buckets(lambda x: lax.ppermute(x, axis_name, perm), [jnp.ravel(x) for x in arrays])
        return [x.reshape(like.shape) for x, like in zip(received, arrays, strict=True)]

    return receive


def _depending_on(arrays: Tree, others: Tree) -> Tree:
    """Returns ``arrays`` with a dependency on ``others``: XLA computes all of ``others`` before it reads the result.

    Without the dependency XLA would place the readers of a received array early in the program, and reuse the memory of
    the array for the gradients. Then the gradients would wait for the message. ``optimization_barrier`` is not enough:
    on CPU devices XLA removes it before it schedules the program. So the result depends on a comparison of ``others``
    with infinity, which is always false and which XLA does not simplify.
    """
    first = [jnp.any(jnp.abs(jnp.ravel(x)[:1]) > jnp.inf) for x in jax.tree.leaves(others)]
    never = functools.reduce(jnp.logical_or, first, jnp.zeros((), bool))
    return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), arrays)
