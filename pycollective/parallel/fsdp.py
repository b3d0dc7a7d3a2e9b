"""Fully sharded data parallelism: each device along an axis keeps a slice of each parameter between its uses.

A layer's parameters are gathered right before the layer is computed, and again in the backward pass:

    w = [s_0 s_1 ...]                                               all_gather, forward and backward
    h = f(w, h)
    g_r = slice r of the mean over devices of the gradients of w    reduce_scatter, backward

With P parameters in float32, their gradients and two moments of Adam, each of N devices keeps

    plain data parallelism                16 P bytes
    ZeRO stage 2 (``parallel.zero``)      8 P + 8 P / N
    fully sharded                         16 P / N, and temporarily one gathered layer and its gradient

A step moves 1.5 times as many bytes as an allreduce of the gradients.

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
from pycollective.jax_support.jaxprs import split_arrays
from pycollective.parallel.axes import (
    AxisName,
    Sliced,
    axis_size,
    has_types,
    name_of,
    own_slice,
    shapes_of,
    varies,
    whole,
)
from pycollective.parallel.buckets import gather_whole, in_buckets
from pycollective.parallel.elementwise import check_numbers
from pycollective.parallel.marked import mark
from pycollective.parallel.sliced_optimizer import SlicedOptimizer

Array = Any
Tree = Any


def shard(params: Tree, axis_name: AxisName) -> Tree:
    """Returns this device's slices of parameters: ``s_r = x.ravel()[r L : (r + 1) L]`` with ``L = ceil(size / N)``.

    Zeros fill the slices of the last devices up to the length L. An optimizer that updates each element by itself can
    be applied to slices as its parameters.

    For layers that are stacked along a first axis, for :func:`jax.lax.scan`, use ``jax.vmap(lambda p: shard(p,
    axis_name))(params)``: the slices keep the first axis.

    Args:
        params: an array or a pytree of arrays, the same on all devices. If the model is cut along other axes, they are
            this device's part of it.
        axis_name: the name of the axis of data parallelism, or a tuple of names.

    Returns:
        A tree like ``params`` of vectors of length L, in the dtypes of ``params``.

    Raises:
        TypeError: a leaf is not an array of numbers: a key of :mod:`jax.random`, for example.
        NameError: the axis is not bound.

    Differentiation:
        Both modes: the transpose puts the cotangent into zeros, at the place of this device's slice.

    Order:
        No communication.

    Source:
        Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 5.3.

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
    """Gathers whole arrays from the devices' slices, the inverse of :func:`shard`: ``x = [s_0 s_1 ...]``.

    Save whole arrays in checkpoints: :func:`shard` cuts them again for any number of devices. For stacked layers use
    ``jax.vmap(lambda s: unshard(s, shapes_of_a_layer, axis_name))(slices)``.

    Args:
        slices: this device's slices of parameters, of gradients or of moments.
        shapes: the parameters, or a tree of :class:`jax.ShapeDtypeStruct` with their shapes.
        axis_name: the axis of :func:`shard`.

    Returns:
        A tree like ``shapes`` of arrays with these shapes and the dtypes of the slices, the same on all devices.

    Raises:
        ValueError: the slices do not have the tree or the lengths that ``shapes`` implies.
        NameError: the axis is not bound.

    Order:
        Program order: one all-gather for each bucket of small slices, and one for each large slice.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w = jnp.arange(3.0)
        >>> jax.vmap(lambda w: unshard(shard(w, "i"), w, "i"), None, axis_name="i", axis_size=2)(w)[0]
        Array([0., 1., 2.], dtype=float32)
    """
    shapes = shapes_of(shapes)
    leaves = _checked("unshard", slices, shapes, axis_name)
    of_shapes, tree = jax.tree.flatten(shapes)
    return tree.unflatten(gather_whole(leaves, [Sliced(x.shape) for x in of_shapes], axis_name))


def gathered(
    fun: Callable[..., Any],
    shapes: Tree,
    axis_name: AxisName,
    *,
    wire_dtype: Any = None,
    policy: Callable[..., Any] | None = jax.checkpoint_policies.dots_saveable,
) -> Callable[..., Any]:
    """Makes a function of slices from a function of whole parameters: ``f_r(s, ...) = fun([s_0 s_1 ...], ...)``.

    Each call gathers the parameters. They are not kept for the backward pass, which gathers them again. This saves
    memory if ``fun`` is a part of the model: an embedding or a layer, best one inside :func:`jax.lax.scan`.

    Args:
        fun: a function of parameters and other arrays. Its results are those of the device's own examples.
        shapes: the parameters, or a tree of :class:`jax.ShapeDtypeStruct` with their shapes.
        axis_name: the axis of :func:`shard`, a name or a tuple of names.
        wire_dtype: the floating-point dtype in which parameters are sent, such as ``jnp.bfloat16``. Default None: the
            dtype of the slices. Gradients are rounded to it as well, but their sums are sent in float32.
        policy: the policy of :func:`jax.checkpoint`, which says what the backward pass does not compute again. Default:
            it keeps products of matrices. None: it keeps the arguments alone.
            ``jax.checkpoint_policies.everything_saveable`` also keeps the parameters, which are then gathered once
            only.

    Returns:
        A function of slices and of the other arguments of ``fun``. What is no array among these is static, such as a
        flag ``train=True``. ``fun`` gets parameters with the shapes of ``shapes`` and the dtypes of the slices.

    Raises:
        ValueError: the slices do not have the tree or the lengths that ``shapes`` implies; ``wire_dtype`` is no
            floating-point dtype; by JAX's types, all results are the same on all devices.
        NameError: the axis is not bound.

    Differentiation:
        Take gradients where the axis is bound. The gradient of the slices is this device's slice of the *mean* over
        devices of the gradients for each device's own examples, as in :func:`~pycollective.parallel.zero`. So
        differentiate the loss of the device's own examples, and average the loss afterwards: by JAX's types, a loss
        that is averaged before counts 1 / N on each device. Forward mode gathers the tangents of the slices.

    Order:
        Program order: all-gathers forward; all-gathers and reduce-scatters in the derivative.

    Source:
        Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 5.3: stage 3.

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
        arrays, with_arrays = split_arrays(args, kwargs)

        def of_leaves(leaves: list[Array], arrays: list[Array]) -> Any:
            args, kwargs = with_arrays(arrays)
            return fun(_joined(_gathered_rows(leaves, axis_name, wire_dtype), shapes), *args, **kwargs)

        results = jax.checkpoint(of_leaves, policy=policy)(leaves, arrays)
        if has_types(axis_name) and not any(varies(x, axis_name) for x in jax.tree.leaves(results)):
            error = message(
                "parallel.gathered",
                "a function whose results are those of the device's own examples",
                f"one whose results are the same along {axis_name!r}, by JAX's types",
                "Reduce the loss over the axis after its gradient is taken, which is a mean by itself.",
            )
            raise ValueError(error)
        return results

    return of_slices


def sliced(
    inner: optax.GradientTransformation, shapes: Tree, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    """Applies an optimizer to slices: the updates are slices of those of whole arrays.

    Call ``init`` and ``update`` where the axis is bound.

    Args:
        inner: an optimizer, as in :func:`~pycollective.parallel.zero`. It sees whole arrays.
        shapes: the parameters, or a tree of :class:`jax.ShapeDtypeStruct` with their shapes.
        axis_name: the axis of :func:`shard`.

    Returns:
        The optimizer. Its state is that of ``inner`` for slices, and its updates have the shapes of the slices.

    Raises:
        ValueError: when ``init`` or ``update`` is called: as :func:`~pycollective.parallel.zero`; the slices have
            another tree, or other shapes, than ``shapes`` implies.
        NameError: when ``init`` or ``update`` is called: the axis is not bound.

    Differentiation:
        As :func:`~pycollective.parallel.zero`.

    Order:
        Program order, in ``init`` and ``update``: what ``inner`` needs of other devices' slices.

    Example:
        >>> import jax, optax
        >>> import jax.numpy as jnp
        >>> w = jnp.ones(3)
        >>> optimizer = sliced(optax.sgd(0.1, momentum=0.9), w, "data")
        >>> state = jax.vmap(lambda w: optimizer.init(shard(w, "data")), None, axis_name="data", axis_size=2)(w)
        >>> state[0].trace.shape  # on each of two devices: the momentum of two elements
        (2, 2)
    """
    shapes = shapes_of(shapes)
    optimizer = SlicedOptimizer("sliced", inner, axis_name)

    def cuts(slices: Tree) -> list[Sliced]:
        return _cuts("sliced", slices, shapes, axis_name, stacked=True)

    def init(slices: Tree) -> Any:
        return optimizer.init(slices, cuts(slices))

    def update(grads: Tree, state: Any, params: Tree | None = None, **extra_args: Any) -> tuple[Tree, Any]:
        return optimizer.update(grads, state, params, extra_args, cuts(grads))

    return optax.GradientTransformationExtraArgs(init, update)


def _gathered_rows(leaves: list[Array], axis_name: AxisName, wire_dtype: Any) -> list[Array]:
    """Returns the slices of all devices. The transpose gives the mean over devices of the cotangents of this slice."""
    devices = axis_size("gathered", axis_name)

    def as_mean(x: Array) -> Array:  # the transpose of all_gather is a sum over devices: it is divided here
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        x = mark(x, axis_name, [0], "sliced(optimizer, shapes, axis_name)")
        return with_transpose(lambda x: x, lambda ct: ct / devices, x)

    def on_wire(x: Array) -> Array:
        narrow = wire_dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(wire_dtype) if narrow else x

    # By JAX's types the gathered array varies along the axis, so each device has its own gradient of it. The transpose
    # sums and cuts these gradients in one call, a reduce-scatter.
    rows = in_buckets(lambda x: lax.all_gather(x, axis_name), [on_wire(as_mean(x)) for x in leaves])
    return [x.astype(like.dtype) for x, like in zip(rows, leaves, strict=True)]


def _joined(rows: list[Array], shapes: Tree) -> Tree:
    """Returns a tree like ``shapes`` of whole arrays, from ``rows``: for each array the slices of all devices."""
    leaves, tree = jax.tree.flatten(shapes)
    return tree.unflatten([whole(x, like.shape) for x, like in zip(rows, leaves, strict=True)])


def _checked(where: str, slices: Tree, shapes: Tree, axis_name: AxisName) -> list[Array]:
    """Returns the leaves of ``slices``.

    Raises:
        ValueError: they are not slices of arrays with these shapes.
    """
    _cuts(where, slices, shapes, axis_name)
    return jax.tree.leaves(slices)


def _cuts(where: str, slices: Tree, shapes: Tree, axis_name: AxisName, *, stacked: bool = False) -> list[Sliced]:
    """Returns how the leaves are cut. ``stacked``: whether slices may keep first dimensions of their arrays.

    Raises:
        ValueError: they are not slices of arrays with these shapes.
    """
    devices = axis_size(where, axis_name)
    of_shapes, tree = jax.tree_util.tree_flatten_with_path(shapes)
    remedy = "Pass shard(params, axis_name), and the shapes of these params."
    if jax.tree.structure(slices) != tree:
        got = f"{jax.tree.structure(slices)}"
        raise ValueError(message(f"parallel.{where}", f"slices in a tree like the shapes, {tree}", got, remedy))
    cuts = []
    for (path, like), x in zip(of_shapes, jax.tree.leaves(slices), strict=True):
        cut = Sliced(like.shape, max(jnp.ndim(x) - 1, 0) if stacked else 0)
        shape = cut.slice_shape(devices)
        if jnp.shape(x) != shape:
            expected = f"slices of shape {shape} at {name_of(path)}, whose shape is {like.shape}, on {devices} devices"
            raise ValueError(message(f"parallel.{where}", expected, f"{jnp.shape(x)}", remedy))
        cuts.append(cut)
    return cuts
