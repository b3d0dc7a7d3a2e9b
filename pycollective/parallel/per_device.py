"""Checks and types of values that differ between devices: gradients before their sum, parameters of one device."""

from __future__ import annotations

from typing import Any

import jax

from pycollective.errors import message
from pycollective.parallel.axes import AxisName, axis_size, has_types, name_of, names_of, varies, vary

Array = Any
Tree = Any


def check_not_summed(where: str, grads: Tree, axis_name: AxisName) -> None:
    """Checks that JAX has not summed the gradients over the axis already: a summed gradient does not vary along it.

    Raises:
        ValueError: by JAX's types, a gradient does not vary along the axis.
        NameError: the axis is not bound.
    """
    axis_size(where, axis_name)
    if not has_types(axis_name):
        return
    for path, x in jax.tree_util.tree_leaves_with_path(grads):
        if not varies(x, axis_name):
            error = message(
                f"parallel.{where}",
                "gradients of each device's own examples",
                f"one that JAX has summed over {axis_name!r} already, at {name_of(path)}",
                f"Differentiate by lax.pcast(params, {axis_name!r}, to='varying').",
            )
            raise ValueError(error)


def check_params_given(where: str, params: Tree | None) -> None:
    """Raises ValueError if ``update`` was called without the parameters, which it needs."""
    if params is None:
        remedy = "Call update(grads, state, params)."
        raise ValueError(message(f"parallel.{where}", "the parameters as well", "gradients and state only", remedy))


def as_varying(tree: Tree, axis_name: AxisName) -> Tree:
    """Casts a tree to types that vary along the axis, if JAX has types for the axis.

    The branches of a ``cond``, and the steps of a loop, must return the same types.
    """
    names = [name for name in names_of(axis_name) if has_types(name)]
    return jax.tree.map(lambda x: vary(x, names), tree)
