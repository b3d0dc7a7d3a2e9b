"""Independent subnets: each device trains a random part of the hidden units, and the parts are joined again.

The units of each hidden layer are divided at random among N devices. A device has the weights between its own units:
a dense network that is N times narrower, its subnet. The device trains the subnet alone for some steps. Then the
subnets are joined, and the units are divided again. One round is

    units              = draw_subnets(key, sizes)        disjoint, each unit belongs to one device
    s_r                = params[units_r]                 no communication
    s_r                = some steps of training of s_r   no communication
    params[units_r]    = s_r       for each r            all_gather

Weights between units of different devices do not change in a round. Of P bytes of weights

    weights between            a device trains    a device receives in a round
    two hidden layers          P / N^2            (N - 1) P / N^2
    a hidden and other layer   P / N              (N - 1) P / N

In data parallelism a device trains all P bytes, and receives 2 (N - 1) P / N bytes of gradients in each step.

Source: Yuan, Wolfe, Dun, Tang, Kyrillidis, Jermaine, "Distributed Learning of Deep Neural Networks using Independent
Subnet Training", arXiv:1910.02120.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pycollective.errors import message
from pycollective.parallel.axes import AxisName, axis_size, gather, name_of
from pycollective.parallel.buckets import in_buckets
from pycollective.parallel.per_device import as_varying

Array = Any
Tree = Any
Layer = str
"""The name of a hidden layer."""


def draw_subnets(key: Array, sizes: Mapping[Layer, int], axis_name: AxisName) -> dict[Layer, Array]:
    """Divides the units of hidden layers at random among the devices of an axis.

    For each layer ``units = permutation(key, size).reshape(N, size / N)``.

    Args:
        key: a key of :func:`jax.random.key`. All devices use the first device's key, so that each unit belongs to one
            device.
        sizes: the number of units of each hidden layer, by its name.
        axis_name: the name of the axis, or a tuple of names.

    Returns:
        For each layer an array of int32 with shape (N, units of a device), the same on all devices: row r has the
        units of device r. Each unit is in exactly one row.

    Raises:
        ValueError: the number of units of a layer is no multiple of the number of devices.
        NameError: the axis is not bound.

    Order:
        Program order: one sum of the key's words.

    Source:
        Yuan et al., arXiv:1910.02120.

    Example:
        >>> import jax
        >>> draw = lambda _: draw_subnets(jax.random.key(0), {"hidden": 6}, "i")["hidden"]
        >>> units = jax.vmap(draw, axis_name="i")(jax.numpy.zeros(3))[0]
        >>> units.shape, sorted(units.ravel().tolist())
        ((3, 2), [0, 1, 2, 3, 4, 5])
    """
    devices = axis_size("draw_subnets", axis_name)
    for layer, size in sizes.items():
        if size < 1 or size % devices:
            error = message(
                "parallel.draw_subnets",
                f"a positive multiple of {devices} units, as {axis_name!r} has {devices} devices",
                f"{size} in the layer {layer!r}",
                "Choose a width that all devices can share.",
            )
            raise ValueError(error)
    data = jax.random.key_data(key)
    of_first = lax.psum(jnp.where(lax.axis_index(axis_name) == 0, data, jnp.zeros_like(data)), axis_name)
    keys = jax.random.split(jax.random.wrap_key_data(of_first, impl=jax.random.key_impl(key)), len(sizes))
    return {
        layer: jax.random.permutation(k, size).astype(jnp.int32).reshape(devices, size // devices)
        for k, (layer, size) in zip(keys, sizes.items(), strict=True)
    }


def take_subnet(params: Tree, spec: Tree, units: Mapping[Layer, Array], axis_name: AxisName) -> Tree:
    """Returns this device's subnet, the parameters of its own units: ``s_r = params[units_r]``.

    Args:
        params: the parameters, the same on all devices.
        spec: a tree like ``params``, with a tuple for each array. The tuple has an entry for each dimension of the
            array: the name of the hidden layer whose units the dimension counts, or None for a dimension that is not
            divided, such as inputs and outputs. The bias of a layer that is not divided has ``(None,)``.
        units: the result of :func:`draw_subnets`.
        axis_name: the axis of :func:`draw_subnets`.

    Returns:
        A tree like ``params``, in its dtypes. A dimension that counts hidden units is N times shorter.

    Raises:
        ValueError: a tuple of ``spec`` does not fit its array.
        NameError: the axis is not bound.

    Order:
        No communication.

    Source:
        Yuan et al., arXiv:1910.02120.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> params = {"in": jnp.ones((5, 8)), "inner": jnp.ones((8, 12)), "out": jnp.ones((12, 3)), "bias": jnp.ones(3)}
        >>> spec = {"in": (None, "h1"), "inner": ("h1", "h2"), "out": ("h2", None), "bias": (None,)}
        >>> def shapes(key):
        ...     units = draw_subnets(key, {"h1": 8, "h2": 12}, "i")
        ...     return take_subnet(params, spec, units, "i")
        >>> subnets = jax.vmap(shapes, axis_name="i")(jax.random.split(jax.random.key(0), 4))
        >>> [x.shape[1:] for x in (subnets["in"], subnets["inner"], subnets["out"])]
        [(5, 2), (2, 3), (3, 3)]
    """
    devices = axis_size("take_subnet", axis_name)
    own = {layer: rows[lax.axis_index(axis_name)] for layer, rows in units.items()}

    def take(x: Array, layers: tuple[Layer | None, ...]) -> Array:
        for dimension, layer in _divided(layers).items():
            x = jnp.take(x, own[layer], axis=dimension, unique_indices=True, mode="clip")
        # An array that is not divided is cast to a type that varies, since each device trains its own copy. Otherwise
        # JAX would sum the gradient of the array over the devices in each step.
        return as_varying(x, axis_name)

    leaves, tree, specs = _checked_specs("take_subnet", params, spec, units, devices)
    return tree.unflatten([take(x, layers) for x, layers in zip(leaves, specs, strict=True)])


def join_subnets(params: Tree, subnet: Tree, spec: Tree, units: Mapping[Layer, Array], axis_name: AxisName) -> Tree:
    """Joins the subnets of all devices: ``params[units_r] = s_r`` for each r.

    Args:
        params: the parameters that :func:`take_subnet` got.
        subnet: this device's subnet after its training.
        spec: as in :func:`take_subnet`.
        units: as in :func:`take_subnet`.
        axis_name: as in :func:`take_subnet`.

    Returns:
        The parameters, the same on all devices, with the shapes and dtypes of ``params``. A weight between units of one
        device has this device's value. A weight between units of different devices has its value in ``params``. An
        array without hidden units is the mean of the devices' arrays.

    Raises:
        ValueError: a tuple of ``spec`` or an array of ``subnet`` does not fit; an array without hidden units has
            integers, which have no mean.
        NameError: the axis is not bound.

    Order:
        Program order: one mean of the arrays without hidden units, then all-gathers of the others.

    Source:
        Yuan et al., arXiv:1910.02120.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> params, spec = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(1)}, {"w": ("h", "h"), "b": (None,)}
        >>> def train(x):
        ...     units = {"h": jnp.array([[1], [0]])}  # unit 1 belongs to device 0
        ...     subnet = take_subnet(params, spec, units, "i")
        ...     return join_subnets(params, jax.tree.map(lambda w: w + x, subnet), spec, units, "i")
        >>> joined = jax.vmap(train, axis_name="i", out_axes=None)(jnp.array([1.0, 2.0]))
        >>> print(joined["w"].tolist(), joined["b"])
        [[2.0, 0.0], [0.0, 1.0]] [1.5]
    """
    devices = axis_size("join_subnets", axis_name)
    leaves, tree, specs = _checked_specs("join_subnets", params, spec, units, devices)
    parts = _checked_parts(subnet, params, specs, units)
    shared = [i for i, layers in enumerate(specs) if not _divided(layers)]
    divided = [i for i, layers in enumerate(specs) if _divided(layers)]
    joined = dict(zip(shared, lax.pmean([parts[i] for i in shared], axis_name), strict=True)) if shared else {}
    rows = in_buckets(lambda x: gather(x, axis_name), [jnp.ravel(parts[i]) for i in divided])
    for i, row in zip(divided, rows, strict=True):
        # The dimensions that count units are moved to the front, so that a unit, or a pair of units, is one index.
        layers = _divided(specs[i])
        places, front = list(layers), list(range(len(layers)))
        whole = jnp.moveaxis(leaves[i], places, front)
        of_devices = row.reshape(devices, *parts[i].shape)
        of_devices = jnp.moveaxis(of_devices, [place + 1 for place in places], [at + 1 for at in front])
        index = tuple(
            jnp.expand_dims(units[layer], [other + 1 for other in front if other != at])
            for at, layer in enumerate(layers.values())
        )
        joined[i] = jnp.moveaxis(whole.at[index].set(of_devices, unique_indices=True), front, places)
    return tree.unflatten([joined[i] for i in range(len(leaves))])


def _divided(layers: tuple[Layer | None, ...]) -> dict[int, Layer]:
    """Returns the layer of each dimension that counts hidden units."""
    return {dimension: layer for dimension, layer in enumerate(layers) if layer is not None}


def _checked_specs(
    where: str, params: Tree, spec: Tree, units: Mapping[Layer, Array], devices: int
) -> tuple[list[Array], Any, list[tuple[Layer | None, ...]]]:
    """Returns the arrays, their tree, and the layers of each array.

    Raises:
        ValueError: the layers of an array do not fit its shape.
    """
    leaves, tree = jax.tree.flatten(params)
    remedy = "Name a layer of draw_subnets or None for each dimension of each array."
    try:
        specs = tree.flatten_up_to(spec)
    except ValueError as cause:
        expected = f"spec to be a tree as that of the parameters, {tree}"
        raise ValueError(message(f"parallel.{where}", expected, f"{spec}", remedy)) from cause
    for layer, rows in units.items():
        if rows.ndim != 2 or rows.shape[0] != devices:
            error = message(
                f"parallel.{where}",
                f"units with a row for each of {devices} devices",
                f"shape {rows.shape} of the layer {layer!r}",
                "Pass what draw_subnets has returned over the same axis.",
            )
            raise ValueError(error)
    sizes = {layer: rows.size for layer, rows in units.items()}
    for (path, x), layers in zip(jax.tree_util.tree_leaves_with_path(params), specs, strict=True):
        fits = isinstance(layers, tuple) and len(layers) == x.ndim and all(k is None or k in sizes for k in layers)
        if not fits or any(x.shape[d] != sizes[k] for d, k in _divided(layers).items()):
            expected = f"the layers {sizes} of {name_of(path)}"
            raise ValueError(message(f"parallel.{where}", expected, f"{layers!r} for the shape {x.shape}", remedy))
    return leaves, tree, specs


def _checked_parts(subnet: Tree, params: Tree, specs: list[Any], units: Mapping[Layer, Array]) -> list[Array]:
    """Returns the arrays of this device's subnet.

    Raises:
        ValueError: they do not have the tree, shapes and dtypes that :func:`take_subnet` returns.
    """
    where, remedy = "parallel.join_subnets", "Pass what take_subnet has returned, with other values."
    parts, tree = jax.tree.flatten(subnet)
    if tree != jax.tree.structure(params):
        raise ValueError(message(where, f"a subnet with the tree {jax.tree.structure(params)}", f"{tree}", remedy))
    for (path, x), part, layers in zip(jax.tree_util.tree_leaves_with_path(params), parts, specs, strict=True):
        shape = tuple(n if layer is None else units[layer].shape[1] for n, layer in zip(x.shape, layers, strict=True))
        if part.shape != shape or part.dtype != x.dtype:
            expected = f"a subnet with {x.dtype}{list(shape)} at {name_of(path)}"
            raise ValueError(message(where, expected, f"{part.dtype}{list(part.shape)}", remedy))
        if not _divided(layers) and not jnp.issubdtype(part.dtype, jnp.inexact):
            error = message(
                where,
                f"floating-point numbers at {name_of(path)}, which has no hidden units and so is averaged",
                f"{part.dtype}",
                "Leave it out of the tree.",
            )
            raise ValueError(error)
    return parts
