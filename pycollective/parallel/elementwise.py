"""Finds out whether an optimizer treats each element by itself: only then slices can be updated alone."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pycollective.errors import message
from pycollective.parallel.axes import AxisName, name_of, names_of, own_slice, shapes_of, slice_length, whole

Array = Any
Tree = Any

_STEPS = 2
"""Updates that the probe makes: the second one has a state that is not the first."""

_LARGE = 1e8
"""The size of gradients with which the probe is made again: an optimizer may look at a norm only where it is large."""

_TOLERANCE = 2e-6
"""The largest relative difference that rounding makes, in float32: of a norm over slices. Weight decay makes 1e-4."""


def check_elementwise(where: str, inner: optax.GradientTransformation, params: Tree, axis_name: AxisName) -> None:
    """Compares ``inner`` on small parameters with ``inner`` on two halves of them.

    Args:
        where: the function that asks, for messages.
        inner: the optimizer. It may have collectives over the axis.
        params: the parameters; only shapes and dtypes matter.
        axis_name: the axis over which the parameters will be cut.

    Raises:
        ValueError: the two differ, in their updates or in the shapes of their states.
    """
    shapes = shapes_of(params)
    settings = jax.config
    x64, dtypes, ranks = settings.jax_enable_x64, settings.jax_numpy_dtype_promotion, settings.jax_numpy_rank_promotion

    def probe() -> str | None:
        with jax.enable_x64(x64), jax.numpy_dtype_promotion(dtypes), jax.numpy_rank_promotion(ranks):
            return _difference(inner, shapes, axis_name)

    # The probe computes with numbers. This thread may be tracing a function, so the probe has another one.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        found = thread.submit(probe).result()
    if found is not None:
        error = message(
            f"parallel.{where}",
            "an optimizer that updates each element by itself",
            found,
            "LAMB, Adafactor, Muon and optax.clip_by_global_norm do not. parallel.clip_by_global_norm takes the place "
            "of the last.",
        )
        raise ValueError(error)


def _difference(inner: optax.GradientTransformation, shapes: Tree, axis_name: AxisName) -> str | None:
    """Says how ``inner`` differs on slices from ``inner`` on whole parameters; None: it does not."""
    cut = jax.tree.map(lambda x: jax.ShapeDtypeStruct((slice_length(x.size, 2),), x.dtype), shapes)
    states = [jax.eval_shape(inner.init, tree) for tree in (shapes, cut)]
    if jax.tree.structure(states[0]) != jax.tree.structure(states[1]):
        return "one whose state has another structure for slices"
    sizes = {x.shape: (slice_length(x.size, 2),) for x in jax.tree.leaves(shapes)}
    for of_whole, of_slice in zip(jax.tree.leaves(states[0]), jax.tree.leaves(states[1]), strict=True):
        if of_slice.shape not in (of_whole.shape, sizes.get(of_whole.shape)):
            return f"one whose state has {of_slice.shape} for a slice where it has {of_whole.shape} for the whole"

    random = np.random.default_rng(0)
    weights, *grads = (jax.tree.map(lambda x: _small(random, x), shapes) for _ in range(1 + _STEPS))
    large = [jax.tree.map(lambda g: g * _LARGE, tree) for tree in grads]
    for steps in (grads, large, list(map(_with_nan, grads))):
        alone, in_halves = (_updates(inner, [weights, *steps], axis_name, devices) for devices in (1, 2))
        paths = jax.tree_util.tree_leaves_with_path(alone)
        for (path, a), b in zip(paths, jax.tree.leaves(in_halves), strict=True):
            close = _TOLERANCE * np.abs(np.nan_to_num(a)).max(initial=0)
            if not np.allclose(a, b, rtol=_TOLERANCE, atol=close, equal_nan=True):
                return f"one whose updates of slices differ, at {name_of(path)}"
    return None


def _with_nan(tree: Tree) -> Tree:
    """Puts a NaN into one element. It reaches others only by what an optimizer makes of several elements."""
    leaves, structure = jax.tree.flatten(tree)
    place = next((i for i, x in enumerate(leaves) if x.size > 0), None)
    if place is not None:
        leaves[place] = jnp.where(
            jnp.arange(leaves[place].size).reshape(leaves[place].shape) == 0, np.nan, leaves[place]
        )
    return jax.tree.unflatten(structure, leaves)


def _small(random: np.random.Generator, like: jax.ShapeDtypeStruct) -> Array:
    """Returns random numbers with as many dimensions, two along each; in float32, where ``like`` is narrower."""
    shape = [min(2, length) for length in like.shape]
    return jnp.asarray(random.normal(size=shape)).astype(np.promote_types(like.dtype, np.float32))


def _updates(inner: optax.GradientTransformation, draw: list[Tree], axis_name: AxisName, devices: int) -> Tree:
    """Returns the updates that so many devices make of parameters and gradients in turn, each of its slices."""
    first, *others = names_of(axis_name)

    def on_device(_: Array) -> Tree:
        # One device has the arrays in their own shapes.
        own = draw if devices == 1 else jax.tree.map(lambda x: own_slice(x, axis_name, devices), draw)
        weights, *grads = own
        updates, state = None, inner.init(weights)
        for gradient in grads:
            updates, state = inner.update(gradient, state, weights)
            weights = optax.apply_updates(weights, updates)
        return updates

    mapped = on_device
    for name in (*reversed(others), first):
        mapped = jax.vmap(mapped, axis_name=name)
    results = mapped(jnp.zeros((devices,) + (1,) * len(others)))
    return jax.tree.map(lambda x, like: whole(x, like.shape), results, draw[0])
