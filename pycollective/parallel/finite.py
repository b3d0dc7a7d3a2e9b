"""Updates that all devices skip if one device has a NaN or an Inf.

All devices that train one model must skip the same steps. Otherwise their parameters diverge, and if a device skips a
collective, the other devices wait for it without end. So the devices agree:

    ok             = minimum over devices of (all gradients are finite)        pmin of one number
    updates, state = inner.update(...)  if ok,  else  zeros, the old state

``inner.update`` is computed in each step, and its results are selected afterwards. So its collectives are not inside a
branch.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from pycollective.errors import integer, message
from pycollective.parallel.axes import AxisName, axis_size, has_types, names_of, vary

Array = Any
Tree = Any


def apply_if_finite(
    inner: optax.GradientTransformation, max_consecutive_errors: int, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    """Skips an update on all devices if a gradient of any device has a NaN or an Inf.

    It is :func:`optax.apply_if_finite` for the gradients of all devices. It may wrap :func:`zero`, or be an argument of
    it.

    Args:
        inner: the optimizer.
        max_consecutive_errors: the largest number of consecutive updates that are skipped. After these an update is
            applied even if it is not finite.
        axis_name: the name of the axis along which devices train one model, or a tuple of names: usually all axes of
            the mesh.

    Returns:
        The optimizer. Its updates have the shapes and dtypes that ``inner`` gives them. Its state is an
        :class:`optax.ApplyIfFiniteState`, whose counts are the same on all devices.

    Raises:
        TypeError: ``max_consecutive_errors`` is no integer.
        NameError: when ``init`` or ``update`` is called: the axis is not bound.

    Order:
        Program order: a minimum of one number before the calls of ``inner``, in each ``update``.

    Source:
        :func:`optax.apply_if_finite`.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> optimizer = apply_if_finite(optax.sgd(1.0), 5, "batch")
        >>> def step(grad):
        ...     updates, state = optimizer.update(grad, optimizer.init(grad))
        ...     return updates, state.total_notfinite
        >>> jax.vmap(step, axis_name="batch")(jnp.array([1.0, jnp.nan]))
        (Array([0., 0.], dtype=float32), Array([1, 1], dtype=int32))
    """
    where = "apply_if_finite"
    most = integer(f"parallel.{where}", None, "max_consecutive_errors", max_consecutive_errors)
    inner = optax.with_extra_args_support(inner)

    def init(params: Tree) -> optax.ApplyIfFiniteState:
        axis_size(where, axis_name)
        return optax.ApplyIfFiniteState(jnp.int32(0), jnp.array(True), jnp.int32(0), inner.init(params))

    def update(grads: Tree, state: Any, params: Tree | None = None, **extra_args: Any) -> tuple[Tree, Any]:
        finite = _all_finite(where, grads, axis_name)
        in_a_row = jnp.where(finite, 0, optax.safe_increment(state.notfinite_count))
        total = jnp.where(finite, state.total_notfinite, optax.safe_increment(state.total_notfinite))
        updates, inner_state = inner.update(grads, state.inner_state, params, **extra_args)
        apply = finite | (in_a_row > most)
        updates = _select(apply, updates, jax.tree.map(jnp.zeros_like, updates))
        return updates, optax.ApplyIfFiniteState(
            in_a_row, finite, total, _select(apply, inner_state, state.inner_state)
        )

    return optax.GradientTransformationExtraArgs(init, update)


class LossScaleState(NamedTuple):
    """The state of :func:`scaled_loss`. The scale and the number of steps are the same on all devices.

    Attributes:
        scale: the factor of the next loss; a float32.
        steps: the number of updates since the scale changed; an int32.
        inner: the state of the inner optimizer.
    """

    scale: Array
    steps: Array
    inner: Any


def scaled_loss(
    inner: optax.GradientTransformation, axis_name: AxisName, *, initial: float = 2.0**15, every: int = 2000
) -> optax.GradientTransformationExtraArgs:
    """Adapts the scale of a loss for gradients in float16, and divides the gradients by it: ``inner(g / scale)``.

    Multiply the loss by ``state.scale`` before it is differentiated. If a gradient of any device has a NaN or an Inf,
    all devices skip the update and halve the scale. After ``every`` finite updates in a row they double the scale.

    Args:
        inner: the optimizer. It gets the gradients without the scale, in float32 or their own wider dtype.
        axis_name: the name of the axis along which devices train one model, or a tuple of names.
        initial: the first scale. Default 2 ** 15.
        every: the number of finite updates after which the scale is doubled, from 1. Default 2000.

    Returns:
        The optimizer. It may wrap :func:`zero`. Its updates have the shapes and dtypes that ``inner`` gives them. Its
        state is a :class:`LossScaleState`.

    Raises:
        TypeError: ``every`` is no integer.
        ValueError: ``every`` is below 1.
        NameError: when ``init`` or ``update`` is called: the axis is not bound.

    Order:
        Program order: a minimum of one number before the calls of ``inner``, in each ``update``.

    Source:
        Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, section 3.2.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> optimizer = scaled_loss(optax.sgd(1.0), "batch", initial=8.0)
        >>> def step(x):
        ...     state = optimizer.init(x)
        ...     grad = jax.grad(lambda x: state.scale * x**2)(x)
        ...     updates, state = optimizer.update(grad, state)
        ...     return updates, state.scale
        >>> jax.vmap(step, axis_name="batch")(jnp.array([1.0, 2.0]))
        (Array([-2., -4.], dtype=float32), Array([8., 8.], dtype=float32))
        >>> jax.vmap(step, axis_name="batch")(jnp.array([1.0, jnp.inf]))
        (Array([0., 0.], dtype=float32), Array([4., 4.], dtype=float32))
    """
    where = "scaled_loss"
    every = integer(f"parallel.{where}", None, "every", every)
    if every < 1:
        error = message(f"parallel.{where}", "every to be at least 1", f"every={every}", "Choose a positive number.")
        raise ValueError(error)
    inner = optax.with_extra_args_support(inner)

    def init(params: Tree) -> LossScaleState:
        axis_size(where, axis_name)
        return LossScaleState(jnp.float32(initial), jnp.int32(0), inner.init(params))

    def update(
        grads: Tree, state: LossScaleState, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, LossScaleState]:
        grads = jax.tree.map(lambda g: _unscaled(g, state.scale), grads)
        finite = _all_finite(where, grads, axis_name)
        updates, inner_state = inner.update(grads, state.inner, params, **extra_args)
        updates = _select(finite, updates, jax.tree.map(jnp.zeros_like, updates))
        grows = state.steps + 1 >= every
        scale = jnp.where(finite, jnp.where(grows, 2 * state.scale, state.scale), state.scale / 2)
        steps = jnp.where(finite & ~grows, state.steps + 1, 0)
        return updates, LossScaleState(scale, steps, _select(finite, inner_state, state.inner))

    return optax.GradientTransformationExtraArgs(init, update)


def _unscaled(grad: Array, scale: Array) -> Array:
    """Returns ``grad / scale``, in float32 or the wider dtype of the gradient."""
    wide = grad.astype(np.promote_types(grad.dtype, np.float32))  # jnp's refuses two dtypes under strict promotion
    return wide / scale.astype(wide.dtype)


def _all_finite(where: str, tree: Tree, axis_name: AxisName) -> Array:
    """Returns whether all numbers of all devices are finite."""
    axis_size(where, axis_name)
    own = functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)], True)
    ok = jnp.asarray(own).astype(jnp.int32)
    return lax.pmin(vary(ok, [name for name in names_of(axis_name) if has_types(name)]), axis_name) == 1


def _select(condition: Array, of_true: Tree, of_false: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), of_true, of_false)
