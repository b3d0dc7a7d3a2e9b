"""Optimizers for parameters of which each device has a part: a norm must cover the parts of all devices.

An optimizer may compute with the norm of its gradients. If its gradients are parts, each device has another norm, and
values that should be the same on all devices diverge. So :func:`for_parts` refuses such an optimizer, and
:func:`clip_by_global_norm` computes the norm over the parts of all devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from pycollective.errors import message
from pycollective.jax_support import jax_internals
from pycollective.parallel.axes import AxisName, axis_size, in_order, name_of, names_of, typed, vary
from pycollective.parallel.elementwise import CHECKED, Check, Cutting, check_numbers

Array = Any
Tree = Any


def for_parts(inner: optax.GradientTransformation, specs: Tree = None) -> optax.GradientTransformationExtraArgs:
    """Applies an optimizer to parts of parameters, and refuses one whose updates would differ from those of the whole.

    Use it for tensor parallelism and for experts. For slices of :func:`shard` use :func:`sliced`; :func:`zero` makes
    this check itself. Call ``init`` and ``update`` where the axes are bound.

    Args:
        inner: an optimizer that updates each element of a part by its own gradient, state and value. Arrays that all
            devices have are not restricted, unless it computes with them and with parts together. For a norm over all
            elements use :func:`clip_by_global_norm`.
        specs: for each parameter a :class:`jax.sharding.PartitionSpec`, as in the ``in_specs`` of ``shard_map``: it
            names the axes along which each dimension is cut. A tree like the parameters, or a prefix of it. Default
            None: a parameter is cut along the axes along which it varies by JAX's types.

    Returns:
        The optimizer. Its state and its updates are those of ``inner`` for this device's parts.

    Raises:
        ValueError: when ``init`` or ``update`` is called: the update of an element of a part depends on other elements,
            as in LAMB, Adafactor, Muon and :func:`optax.clip_by_global_norm`; ``specs`` is needed, or does not fit.
        NameError: when ``init`` or ``update`` is called: an axis of ``specs`` is not bound.

    Order:
        No communication but that of ``inner``.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> specs = {"w": jax.P(None, "model"), "bias": jax.P()}
        >>> clip = clip_by_global_norm(1.0, specs=specs)
        >>> optimizer = for_parts(optax.chain(clip, optax.sgd(1.0)), specs)
        >>> def step(w):  # a column of w on each of two devices
        ...     grads = {"w": w, "bias": jnp.zeros(1)}
        ...     return optimizer.update(grads, optimizer.init(grads))[0]["w"]
        >>> parts = jnp.array([[[3.0], [0.0]], [[4.0], [0.0]]])  # together their norm is 5
        >>> print(jax.vmap(step, axis_name="model")(parts).ravel())
        [-0.6 -0.  -0.8 -0. ]
    """
    inner = optax.with_extra_args_support(inner)
    check = Check("for_parts", inner)

    def init(params: Tree) -> Any:
        check.at_init(_cut_by_specs(params, specs), params)
        return inner.init(params)

    def update(grads: Tree, state: Any, params: Tree | None = None, **extra_args: Any) -> tuple[Tree, Any]:
        check.at_update(_cut_by_specs(grads if params is None else params, specs), grads, params, extra_args)
        return inner.update(grads, state, params, **extra_args)

    setattr(update, CHECKED, True)
    return optax.GradientTransformationExtraArgs(init, update)


def clip_by_global_norm(limit: float, axis_name: AxisName = (), *, specs: Tree = None) -> optax.GradientTransformation:
    """Scales slices or parts of gradients so that the norm of the whole gradients is at most ``limit``.

    ``y = g * min(1, limit / norm)``, where ``norm`` is the 2-norm over the slices and parts of all devices. A gradient
    that all devices have counts once. This is :func:`optax.clip_by_global_norm` of the whole gradients.

    Args:
        limit: the largest norm.
        axis_name: the axis of :func:`zero` or :func:`shard`, along which each gradient is a slice. Default ``()``: no
            such axis.
        specs: how gradients are cut along other axes, as in :func:`for_parts`. Default None: as JAX's types say. If
            JAX has no types and other axes are bound, it must be given: ``jax.P()`` means that nothing is cut along
            them.

    Returns:
        A transformation without state. Its updates have the shapes and dtypes of the gradients.

    Raises:
        ValueError: when ``update`` is called: axes other than ``axis_name`` are bound, and neither ``specs`` nor JAX's
            types say how gradients are cut along them.
        NameError: when ``update`` is called: an axis is not bound.

    Order:
        Program order, in ``update``: sums of one number over each set of axes along which gradients are cut.

    Source:
        :func:`optax.clip_by_global_norm`.

    Example:
        >>> import jax, optax
        >>> from pycollective.parallel import zero
        >>> optimizer = zero(optax.chain(clip_by_global_norm(1.0, "batch"), optax.adamw(1e-3)), "batch")
        >>> specs = {"w": jax.P(None, "model"), "bias": jax.P()}  # on a mesh of data x model
        >>> clip = clip_by_global_norm(1.0, "data", specs=specs)
        >>> optimizer = zero(optax.chain(clip, optax.adamw(1e-3)), "data")
    """

    def update(grads: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, Any]:
        del params
        leaves = jax.tree.leaves(grads)
        squares: dict[frozenset[Hashable], Array] = {}
        for x, names in zip(leaves, _cut_along("clip_by_global_norm", grads, axis_name, specs), strict=True):
            wide = x.astype(np.promote_types(x.dtype, np.float32))
            squares[names] = squares.get(names, 0) + jnp.sum(jnp.square(jnp.abs(wide)))
        slices = frozenset(names_of(axis_name))
        norm = jnp.sqrt(sum(_total(_total(x, slices), names - slices) for names, x in squares.items()))
        scale = jnp.where(norm < limit, 1.0, limit / norm)
        return jax.tree.map(lambda x: x * scale.astype(x.dtype), grads), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def _total(x: Array, names: frozenset[Hashable]) -> Array:
    """Returns the sum over the devices along these axes."""
    if not names:
        return x
    ordered = in_order(names)
    return lax.psum(vary(x, typed(ordered)), ordered)


def _cut_along(where: str, tree: Tree, axis_name: AxisName, specs: Tree) -> list[frozenset[Hashable]]:
    """Returns for each leaf the axes along which it is cut: ``axis_name``, and others by ``specs`` or JAX's types.

    Raises:
        ValueError: neither of them says whether a leaf is cut along an axis that is bound.
    """
    for name in names_of(axis_name):
        axis_size(where, name)
    slices = frozenset(names_of(axis_name))
    if specs is not None:
        of_leaves = _spec_of_each(where, tree, specs)
        return [slices.union(*map(_names_of_entry, spec)) for spec in of_leaves]
    others = in_order(set(jax_internals.bound_axes()) - slices)
    of_types = typed(others)
    unknown = [name for name in others if name not in of_types]
    if unknown:
        error = message(
            f"parallel.{where}",
            f"specs, since axes other than {axis_name!r} are bound",
            f"none, where {unknown} are bound",
            "Pass specs= as in shard_map, one for each parameter; jax.P() where nothing is cut along other axes.",
        )
        raise ValueError(error)
    return [slices | jax_internals.varying_axes(x).intersection(others) for x in jax.tree.leaves(tree)]


def _spec_of_each(where: str, tree: Tree, specs: Tree) -> list[jax.sharding.PartitionSpec]:
    """Returns the specification of each leaf.

    Raises:
        ValueError: a specification does not fit its leaf.
        NameError: a specification names an axis that is not bound.
    """
    remedy = "Pass a jax.P for each parameter, as in the in_specs of shard_map."
    try:
        of_leaves = jax.tree.leaves(jax.tree.broadcast(specs, tree, is_leaf=_is_spec), is_leaf=_is_spec)
    except ValueError as cause:
        expected = f"specs as a tree like the parameters, or a prefix of {jax.tree.structure(tree)}"
        raise ValueError(message(f"parallel.{where}", expected, f"{specs}", remedy)) from cause
    for (path, _), spec in zip(jax.tree_util.tree_leaves_with_path(tree), of_leaves, strict=True):
        if not _is_spec(spec):
            raise ValueError(message(f"parallel.{where}", f"a jax.P at {name_of(path)}", f"{spec!r}", remedy))
        for name in itertools.chain(*map(_names_of_entry, spec)):
            axis_size(where, name)
    return of_leaves


def _is_spec(x: Any) -> bool:
    return isinstance(x, jax.sharding.PartitionSpec)


def _names_of_entry(entry: Any) -> tuple[Hashable, ...]:
    return () if entry is None else names_of(entry)


def _cut_by_specs(params: Tree, specs: Tree) -> Cutting:
    """Returns how the parameters are cut; ``params`` are this device's parts of them."""
    where = "for_parts"
    check_numbers(where, params)
    leaves = jax.tree.leaves(params)
    own = [jnp.shape(x) for x in leaves]
    names = _cut_along(where, params, (), specs)
    if specs is None:  # JAX's types name the axes but not the dimensions that are cut: each dimension may be
        cuts = [in_order(leaf) for leaf in names]
        return Cutting(tuple(own), tuple(own), tuple((cut,) * len(s) for s, cut in zip(own, cuts, strict=True)), False)
    axes, whole = [], []
    for (path, _), shape, spec in zip(
        jax.tree_util.tree_leaves_with_path(params), own, _spec_of_each(where, params, specs), strict=True
    ):
        entries = [*map(_names_of_entry, spec)]
        if len(entries) > len(shape):
            expected, remedy = f"a jax.P of at most {len(shape)} dimensions at {name_of(path)}", "Leave some out."
            raise ValueError(message(f"parallel.{where}", expected, f"{spec}", remedy))
        entries += [()] * (len(shape) - len(entries))
        axes.append(tuple(entries))
        sizes = [math.prod(axis_size(where, name) for name in entry) for entry in entries]
        whole.append(tuple(length * size for length, size in zip(shape, sizes, strict=True)))
    return Cutting(tuple(whole), tuple(own), tuple(axes), False)
