"""ZeRO: each device along an axis keeps, and updates, one slice of an optimizer's state.

In plain data parallelism each of N devices has the whole state of the optimizer and computes the whole update. Here the
parameters are cut into N slices, and each device has the state of its slice:

    g_r = slice r of the mean over devices of their gradients     reduce_scatter
    u_r, s_r = inner.update(g_r, s_r, slice r of the parameters)
    updates = [u_0 u_1 ...]                                       all_gather

The result is that of the inner optimizer for the mean of the gradients: its program for whole arrays is computed in
slices (:mod:`~pycollective.parallel.partitioned`). For P parameters in float32 Adam keeps 8 P / N bytes on each device
instead of 8 P. The number of bytes on the wire is that of an allreduce.

Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054, sections 5.1 (stage 1) and 5.2 (stage 2).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from pycollective.errors import message
from pycollective.jax_support.jaxprs import replaced
from pycollective.parallel.axes import (
    AxisName,
    Sliced,
    axis_size,
    own_slice,
    shapes_of,
)
from pycollective.parallel.buckets import gather_whole
from pycollective.parallel.elementwise import check_numbers
from pycollective.parallel.per_device import check_not_summed
from pycollective.parallel.sliced_optimizer import SlicedOptimizer, belongs_to_parameters, fail_for_params, is_slice
from pycollective.parallel.wire import checked_wire_dtype, mean_slices

Array = Any
Tree = Any


def zero(
    inner: optax.GradientTransformation, axis_name: AxisName, *, stage: int = 2, wire_dtype: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Lets each device along an axis keep and update the state of ``inner`` for its own slice of the parameters.

    The updates are those of ``inner`` for the mean of the gradients. A parameter is cut as by :func:`shard`, so the
    leaves of the state that belong to parameters are vectors. Call ``init`` and ``update`` where the axis is bound.

    Args:
        inner: an optimizer. It sees whole arrays. What it computes of several elements, such as norms and products of
            matrices, devices compute together: sums by a collective, other operations by one device for each array.
            An optimizer whose ``init`` or ``update`` computes collectives over the axis, as with
            :func:`clip_by_global_norm` and :func:`apply_if_finite`, sees slices in both; the rest of it must update
            each element by itself.
        axis_name: the name of the axis of data parallelism, or a tuple of names.
        stage: the stage of ZeRO. 2, the default: a reduce-scatter gives each device its slice of the mean gradients.
            1: an allreduce gives each device all mean gradients, with 1.5 times as many bytes on the wire. The results
            are the same.
        wire_dtype: the floating-point dtype in which gradients are sent, such as ``jnp.bfloat16``. Default None: their
            own dtype. With a wire dtype the gradients are added in float32, and both stages send slices only.

    Returns:
        The optimizer. Its ``update`` takes the gradients of this device's own examples, not averaged. It returns the
        updates of all parameters, with the shapes of the gradients, the same on all devices.

    Raises:
        TypeError: ``wire_dtype`` is no floating-point dtype; a parameter is not an array of numbers: a key of
            :mod:`jax.random`, for example.
        ValueError: the stage is neither 1 nor 2; ``inner`` computes with arrays from outside, which may differ between
            devices; it computes collectives over the axis, and mixes elements otherwise; it computes with several
            elements where other axes are bound along which leaves may be cut, and is not :func:`for_parts`; the state
            is not one of ``init``; by JAX's types, the gradients are averaged already.
        NameError: the axis is not bound.

    Differentiation:
        Derivatives of ``update`` do not use the rules of :func:`jax.custom_jvp` and :func:`jax.custom_vjp` in
        ``inner``.

    Order:
        Program order. In ``init``: what ``inner.init`` needs of other devices' slices; usually nothing. In ``update``:
        the gradients' reduce-scatter, or allreduce for stage 1; the calls for ``inner``; the updates' all-gather.

    Source:
        Rajbhandari et al., "ZeRO", arXiv:1910.02054, sections 5.1 and 5.2.

    Example:
        >>> import jax, optax
        >>> import jax.numpy as jnp
        >>> optimizer = zero(optax.sgd(0.1, momentum=0.9), "batch")
        >>> def step(w, x):
        ...     state = optimizer.init(w)
        ...     grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        ...     updates, state = optimizer.update(grads, state, w)
        ...     return optax.apply_updates(w, updates), state[0].trace
        >>> w, momentum = jax.vmap(step, (None, 0), axis_name="batch")(jnp.ones(6), jnp.ones((2, 5, 6)))
        >>> w.shape, momentum.shape  # on each of two devices: all parameters, and a half of the state
        ((2, 6), (2, 3))
    """
    if stage not in (1, 2):
        remedy = "Stage 3 of ZeRO cuts the parameters as well, which an optimizer alone cannot."
        error = message("parallel.zero", "stage=1 or stage=2", f"stage={stage!r}", remedy)
        raise ValueError(error)
    wire = checked_wire_dtype("zero", wire_dtype)
    sliced = SlicedOptimizer("zero", inner, axis_name)

    def cuts(params: Tree) -> list[Sliced]:
        check_numbers("zero", params)
        return [Sliced(jnp.shape(x)) for x in jax.tree.leaves(params)]

    def init(params: Tree) -> Any:
        devices = axis_size("zero", axis_name)
        of_params = cuts(params)
        return sliced.init(jax.tree.map(lambda x: own_slice(x, axis_name, devices), params), of_params)

    def update(grads: Tree, state: Any, params: Tree | None = None, **extra_args: Any) -> tuple[Tree, Any]:
        devices = axis_size("zero", axis_name)
        check_not_summed("zero", grads, axis_name)
        of_params = cuts(grads)
        of_grads, tree = jax.tree.flatten(grads)
        means = mean_slices("zero", of_grads, axis_name, wire, by_psum=stage == 1)
        slices = tree.unflatten([x.astype(like.dtype) for x, like in zip(means, of_grads, strict=True)])
        own = None if params is None else jax.tree.map(lambda x: own_slice(x, axis_name, devices), params)
        updates, state = sliced.update(slices, state, own, extra_args, of_params)
        leaves, tree = jax.tree.flatten(updates)
        return tree.unflatten(gather_whole(leaves, of_params, axis_name)), state

    return optax.GradientTransformationExtraArgs(init, update)


def unshard_state(inner: optax.GradientTransformation, state: Any, params: Tree, axis_name: AxisName) -> Any:
    """Gathers the state that ``inner`` would have without :func:`zero`, for a checkpoint.

    Args:
        inner: the optimizer inside :func:`zero`.
        state: the state of :func:`zero` on this device.
        params: the parameters, or a tree of :class:`jax.ShapeDtypeStruct` with their shapes.
        axis_name: the axis of :func:`zero`.

    Returns:
        A state with the tree, shapes and dtypes of ``inner.init(params)``, the same on all devices. Slices of stacked
        layers may keep first dimensions. A parameter that
        :func:`optax.masked` or :func:`optax.multi_transform` leaves out has no leaf in it.

    Raises:
        ValueError: a leaf has neither the shape of a slice nor that of the whole leaf.
        NameError: the axis is not bound.

    Order:
        Program order: all-gathers of the slices.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> params = {"w": jnp.ones(3), "b": jnp.ones(2)}
        >>> inner = optax.masked(optax.trace(0.9), {"w": True, "b": False})
        >>> def save(params):
        ...     return unshard_state(inner, zero(inner, "batch").init(params), params, "batch")
        >>> state = jax.vmap(save, None, None, axis_name="batch", axis_size=2)(params)
        >>> jax.tree.map(jnp.shape, state.inner_state.trace)
        {'b': MaskedNode(), 'w': (3,)}
    """
    where = "unshard_state"
    devices = axis_size(where, axis_name)
    shapes = shapes_of(params)
    started = jax.eval_shape(inner.init, shapes)
    leaves, tree = jax.tree.flatten(state)
    belongs = belongs_to_parameters(inner, started, [x.shape for x in jax.tree.leaves(shapes)])
    assert belongs is not None
    # Slices of stacked layers keep their first dimensions.
    cuts = [Sliced(like.shape, max(x.ndim - 1, 0)) for like, x in zip(jax.tree.leaves(started), leaves, strict=True)]
    places = [
        i
        for i, (x, cut, yes) in enumerate(zip(leaves, cuts, belongs, strict=True))
        if is_slice(where, x.shape, cut, devices, belongs=yes)
    ]
    wholes = gather_whole([leaves[i] for i in places], [cuts[i] for i in places], axis_name)
    return tree.unflatten(replaced(leaves, places, wholes))


def shard_state(
    inner: optax.GradientTransformation, state: Any, axis_name: AxisName, *, like: Any = None, params: Tree = None
) -> Any:
    """Cuts a whole state into the state of :func:`zero` on this device, the inverse of :func:`unshard_state`.

    The axis may have another number of devices than when the state was gathered.

    Args:
        inner: the optimizer inside :func:`zero`.
        state: a state as ``inner.init(params)`` makes it, the same on all devices.
        axis_name: the axis of :func:`zero`.
        like: a state of :func:`zero` or :func:`sliced` on this device, or its shapes. Stacked layers need it: their
            slices keep first dimensions. So does an ``inner`` with collectives over the axis whose state has a number
            for each parameter, which is not cut. Default None: all slices are vectors.
        params: the parameters, or their shapes. An ``inner`` whose ``init`` :func:`optax.tree.map_params` cannot call,
            such as :func:`optax.flatten`, needs them: leaves with the shape of a parameter are cut. Default None.

    Returns:
        The state of :func:`zero` on this device: a vector of length ``ceil(size / N)`` for each leaf that is cut, in
        the dtype of the leaf.

    Raises:
        ValueError: ``params`` is needed; a leaf of ``like`` has neither the shape of a slice nor that of the whole.
        NameError: the axis is not bound.

    Order:
        No communication.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> inner = optax.trace(0.9)
        >>> state = inner.init(jnp.ones(3))
        >>> own = jax.vmap(lambda s: shard_state(inner, s, "batch"), None, axis_name="batch", axis_size=2)(state)
        >>> own.trace.shape  # on each of two devices: two of the three elements, the last one is padding
        (2, 2)
    """
    where = "shard_state"
    devices = axis_size(where, axis_name)
    leaves, tree = jax.tree.flatten(state)
    shapes = None if params is None else [x.shape for x in jax.tree.leaves(shapes_of(params))]
    belongs = belongs_to_parameters(inner, state, shapes)
    if like is not None:
        known: list[bool | None] = [None] * len(leaves) if belongs is None else [*belongs]
        cuts = [Sliced(x.shape, max(own.ndim - 1, 0)) for x, own in zip(leaves, jax.tree.leaves(like), strict=True)]
        cut = [
            is_slice(where, own.shape, cut, devices, belongs=yes)
            for own, cut, yes in zip(jax.tree.leaves(like), cuts, known, strict=True)
        ]
    elif belongs is None:
        fail_for_params(where)
    else:
        cuts, cut = [Sliced(jnp.shape(x)) for x in leaves], belongs
    return tree.unflatten(
        c.own(x, axis_name, devices) if yes else x for x, c, yes in zip(leaves, cuts, cut, strict=True)
    )
