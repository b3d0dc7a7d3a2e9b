"""Fully sharded data parallelism: each device along an axis keeps a slice of each parameter between its uses.

A layer's parameters are gathered right before the layer is computed, and again in the backward pass:

    w = s_0, s_1, ... of all devices                              all_gather, forward and backward
    h = f(w, h)
    g_r = slice r of mean over devices of the gradients by w      reduce_scatter, backward

Of P parameters in float32, with gradients and two moments of Adam, each of N devices keeps 16 P / N bytes, and those of
one gathered layer and of its gradient for a while. Plain data parallelism keeps 16 P, ZeRO's stage 2
(``parallel.zero``) 8 P + 8 P / N. A step moves 1.5 times as many bytes as an allreduce of the gradients.

Sources: Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054, section 5.3 (stage 3); Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel", arXiv:2304.11277.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from pycollective.collectives.replicated import with_transpose
from pycollective.errors import message
from pycollective.parallel.axes import (
    AxisName,
    axis_size,
    has_types,
    name_of,
    own_slice,
    shapes_of,
    slice_length,
    varies,
    whole,
)
from pycollective.parallel.buckets import gather_whole, in_buckets
from pycollective.parallel.elementwise import Check, Cutting, check_numbers, cut_in_slices
from pycollective.parallel.marked import mark

Array = Any
Tree = Any


def shard(params: Tree, axis_name: AxisName) -> Tree:
    """Returns this device's slices of parameters.

    The elements of each array are cut in their order into one vector for each device. The vectors have equal lengths,
    ``ceil(size / N)``, so the last ones end with zeros. An optimizer that treats each element by itself can be given
    slices as its parameters.

    Args:
        params: arrays, the same on all devices. Where the model is cut along other axes, they are this device's part.
        axis_name: the axis, or a tuple of axes, of data parallelism.

    Returns:
        A tree like ``params`` of vectors.

    Raises:
        TypeError: a leaf has no numbers, such as a key of ``jax.random``.
        NameError: the axis is not bound.

    For layers that are stacked along a first axis, for :func:`jax.lax.scan`, use ``jax.vmap(lambda p: shard(p,
    axis_name))(params)``: it keeps that axis in front of the slices.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jax.vmap(lambda w: shard(w, "data"), None, axis_name="data", axis_size=2)(jnp.array([1, 2, 3]))
        Array([[1, 2],
               [3, 0]], dtype=int32)
    """
    devices = axis_size("shard", axis_name)
    check_numbers("shard", params)
    return jax.tree.map(lambda x: own_slice(x, axis_name, devices), params)


def unshard(slices: Tree, shapes: Tree, axis_name: AxisName) -> Tree:
    """The inverse of :func:`shard`: returns whole arrays, to save them.

    Args:
        slices: this device's slices of parameters, or of gradients or moments.
        shapes: the parameters, or what has their shapes, such as :class:`jax.ShapeDtypeStruct`.
        axis_name: the axis of :func:`shard`, which is bound.

    Returns:
        A tree like ``shapes`` of arrays with the dtypes of the slices, the same on all devices.

    Raises:
        ValueError: the slices are none of arrays with these shapes.
        NameError: the axis is not bound.

    Slices go to another number of devices as whole arrays: :func:`shard` cuts them again. For stacked layers use
    ``jax.vmap(lambda s: unshard(s, shapes_of_a_layer, axis_name))(slices)``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w = jnp.arange(3.0)
        >>> jax.vmap(lambda w: unshard(shard(w, "i"), w, "i"), None, axis_name="i", axis_size=2)(w)[0]
        Array([0., 1., 2.], dtype=float32)
    """
    shapes = shapes_of(shapes)
    leaves = _checked("unshard", slices, shapes, axis_name)
    of_shapes, tree = jax.tree.flatten(shapes)
    return tree.unflatten(gather_whole(leaves, [x.shape for x in of_shapes], axis_name))


def gathered(
    fun: Callable[..., Any],
    shapes: Tree,
    axis_name: AxisName,
    *,
    wire_dtype: Any = None,
    policy: Callable[..., Any] | None = jax.checkpoint_policies.dots_saveable,
) -> Callable[..., Any]:
    """Lets a function take this device's slices in the place of its first argument, whole parameters.

    The parameters are gathered for a call, and not kept for the backward pass, which gathers them again. Memory is
    saved where ``fun`` is a part of the model: a layer, in :func:`jax.lax.scan` best, or an embedding.

    Args:
        fun: a function of parameters and other arrays. Its results are those of the device's own examples.
        shapes: the parameters, or what has their shapes, such as :class:`jax.ShapeDtypeStruct`.
        axis_name: the axis, or a tuple of axes, of :func:`shard`.
        wire_dtype: the floating-point dtype in which parameters travel, such as ``jnp.bfloat16``; None: that of the
            slices. Gradients are rounded to it as well, but their sums travel in float32.
        policy: of :func:`jax.checkpoint`, which says what the backward pass does not compute again. By default these
            are the products of matrices. With None there are none, and only the arguments are kept.
            ``jax.checkpoint_policies.everything_saveable`` keeps the parameters as well, and they travel once less.

    Returns:
        A function of slices and of the other arguments of ``fun``, which are arrays. The parameters have the dtypes of
        the slices.

    Raises:
        ValueError: the slices are none of parameters with these shapes; the wire's dtype has no fractions; by JAX's
            types, all results are the same on all devices.
        NameError: the axis is not bound.

    Differentiation: take gradients where the axis is bound. The gradient by the slices is this device's slice of the
    *mean* over devices of the gradients that each has for its own examples, as in :func:`~pycollective.parallel.zero`.
    So differentiate the loss of the device's own examples, and average the loss afterwards: where JAX's types say what
    varies, a loss that is averaged before counts 1 / N on each device. In forward mode the tangents of the slices are
    gathered.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> def step(w, x):
        ...     s = shard(w, "data")
        ...     return s - 0.125 * jax.grad(gathered(loss, w, "data"))(s, x)
        >>> jax.vmap(step, (None, 0), axis_name="data")(jnp.ones(3), jnp.ones((2, 5, 3)))
        Array([[0.25, 0.25],
               [0.25, 0.  ]], dtype=float32)
    """
    shapes = shapes_of(shapes)  # not the arrays, which would be kept
    if wire_dtype is not None and not jnp.issubdtype(wire_dtype, jnp.floating):
        got, remedy = f"{jnp.dtype(wire_dtype)}", "Pass jnp.bfloat16, or None for that of the slices."
        raise ValueError(message("parallel.gathered", "a floating-point wire_dtype", got, remedy))

    @functools.wraps(fun)
    def of_slices(slices: Tree, *args: Any, **kwargs: Any) -> Any:
        leaves = _checked("gathered", slices, shapes, axis_name)
        results = checkpointed(leaves, *args, **kwargs)
        if has_types(axis_name) and not any(varies(x, axis_name) for x in jax.tree.leaves(results)):
            error = message(
                "parallel.gathered",
                "a function whose results are those of the device's own examples",
                f"one whose results are the same along {axis_name!r}, by JAX's types",
                "Reduce the loss over the axis after its gradient is taken, which is a mean by itself.",
            )
            raise ValueError(error)
        return results

    def of_leaves(leaves: list[Array], *args: Any, **kwargs: Any) -> Any:
        return fun(_joined(_gathered_rows(leaves, axis_name, wire_dtype), shapes), *args, **kwargs)

    checkpointed = jax.checkpoint(of_leaves, policy=policy)
    return of_slices


def sliced(
    inner: optax.GradientTransformation, shapes: Tree, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    """Returns ``inner`` for slices. It refuses an optimizer whose updates of slices would be wrong.

    Args:
        inner: an optimizer that updates each element by its own gradient, state and value. Norms over all elements are
            for :func:`~pycollective.parallel.clip_by_global_norm`.
        shapes: the parameters, or what has their shapes.
        axis_name: the axis of :func:`shard`, which is bound where ``init`` and ``update`` are called.

    Raises:
        ValueError: an update of an element depends on other elements, as in LAMB, Adafactor and Muon, or on the shapes
            of leaves; the slices are in another tree than the shapes.

    Example:
        >>> import jax, optax
        >>> import jax.numpy as jnp
        >>> w = jnp.ones(3)
        >>> optimizer = sliced(optax.sgd(0.1, momentum=0.9), w, "data")
        >>> state = jax.vmap(lambda w: optimizer.init(shard(w, "data")), None, axis_name="data", axis_size=2)(w)
        >>> state[0].trace.shape  # on each of two devices: the momentum of two elements
        (2, 2)
    """
    inner, shapes = optax.with_extra_args_support(inner), shapes_of(shapes)
    check = Check("sliced", inner)

    def cutting(slices: Tree) -> Cutting:
        axis_size("sliced", axis_name)
        if jax.tree.structure(slices) != jax.tree.structure(shapes):
            got, remedy = f"{jax.tree.structure(slices)}", "Pass the shapes of the parameters that were cut."
            expected = f"slices in a tree like the shapes, {jax.tree.structure(shapes)}"
            raise ValueError(message("parallel.sliced", expected, got, remedy))
        own = [jnp.shape(x) for x in jax.tree.leaves(slices)]
        return cut_in_slices([x.shape for x in jax.tree.leaves(shapes)], axis_name, own)

    def init(slices: Tree) -> Any:
        check.at_init(cutting(slices), slices)
        return inner.init(slices)

    def update(grads: Tree, state: Any, params: Tree | None = None, **extra_args: Any) -> tuple[Tree, Any]:
        check.at_update(cutting(grads), grads, params, extra_args)
        return inner.update(grads, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _gathered_rows(leaves: list[Array], axis_name: AxisName, wire_dtype: Any) -> list[Array]:
    """Returns the slices of all devices. A cotangent of the own slice is the mean of what all devices have for it."""
    devices = axis_size("gathered", axis_name)

    def as_mean(x: Array) -> Array:  # in front of the sum over devices, which all_gather has as its transpose
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        x = mark(x, axis_name, [0], "sliced(optimizer, shapes, axis_name)")
        return with_transpose(lambda x: x, lambda ct: ct / devices, x)

    def on_wire(x: Array) -> Array:
        narrow = wire_dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(wire_dtype) if narrow else x

    # By JAX's types what is gathered varies: then each device has a gradient of its own, and the transpose adds and
    # cuts them in one call.
    rows = in_buckets(lambda x: lax.all_gather(x, axis_name), [on_wire(as_mean(x)) for x in leaves])
    return [x.astype(like.dtype) for x, like in zip(rows, leaves, strict=True)]


def _joined(rows: list[Array], shapes: Tree) -> Tree:
    """Returns a tree like ``shapes`` of the arrays of which ``rows`` are the slices."""
    leaves, tree = jax.tree.flatten(shapes)
    return tree.unflatten([whole(x, like.shape) for x, like in zip(rows, leaves, strict=True)])


def _checked(where: str, slices: Tree, shapes: Tree, axis_name: AxisName) -> list[Array]:
    """Returns the leaves of ``slices``, which are slices of arrays with these shapes.

    Raises:
        ValueError: they are not.
    """
    devices = axis_size(where, axis_name)
    of_shapes, tree = jax.tree_util.tree_flatten_with_path(shapes)
    remedy = "Pass shard(params, axis_name), and the shapes of these params."
    if jax.tree.structure(slices) != tree:
        got = f"{jax.tree.structure(slices)}"
        raise ValueError(message(f"parallel.{where}", f"slices in a tree like the shapes, {tree}", got, remedy))
    leaves: list[Array] = jax.tree.leaves(slices)
    for (path, like), x in zip(of_shapes, leaves, strict=True):
        shape = (slice_length(like.size, devices),)
        if jnp.shape(x) != shape:
            expected = f"slices of shape {shape} at {name_of(path)}, whose shape is {like.shape}, on {devices} devices"
            raise ValueError(message(f"parallel.{where}", expected, f"{jnp.shape(x)}", remedy))
    return leaves
