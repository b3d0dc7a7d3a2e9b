"""What strategies have in common whose devices step by their own gradients."""

from __future__ import annotations

from typing import Any

import jax

from pycollective.errors import message
from pycollective.parallel.axes import AxisName, axis_size, has_types, name_of, names_of, varies, vary

Array = Any
Tree = Any


def check_own(where: str, grads: Tree, axis_name: AxisName) -> None:
    """Raises ValueError if JAX has summed gradients over the axis, and so they do not vary along it.

    Raises NameError if the axis is not bound.
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


def check_params(where: str, params: Tree | None) -> None:
    """Raises ValueError if an ``update`` that needs the parameters has none."""
    if params is None:
        remedy = "Call update(grads, state, params)."
        raise ValueError(message(f"parallel.{where}", "the parameters as well", "gradients and state only", remedy))


def as_own(tree: Tree, axis_name: AxisName) -> Tree:
    """Returns the tree as what each device has of its own: where JAX has types, they say that it varies along the axis.

    Both branches of a ``cond`` and all steps of a loop have the same types then.
    """
    names = [name for name in names_of(axis_name) if has_types(name)]
    return jax.tree.map(lambda x: vary(x, names), tree)
