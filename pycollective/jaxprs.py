"""Walks through jaxprs, and what lies in their parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr


def replaced(items: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """``items`` with ``values`` in ``places``."""
    filled = list(items)
    for place, value in zip(places, values, strict=True):
        filled[place] = value
    return filled


def split_arrays(args: Any, kwargs: Any) -> tuple[list[Any], Callable[[Sequence[Any]], tuple[Any, Any]]]:
    """The arrays among the arguments of a traced function, and a way to put others in their places.

    The rest is static: what :func:`jax.jit` does not trace.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

    def with_arrays(arrays: Sequence[Any]) -> tuple[Any, Any]:
        args, kwargs = jax.tree.unflatten(tree, replaced(leaves, places, arrays))
        return args, kwargs

    return [leaves[place] for place in places], with_arrays


def like(value: Any, parts: Sequence[Any]) -> Any:
    """A tuple or list of ``parts`` of the type of ``value``, which may be a named tuple."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs in the parameters of an equation, without their constants."""
    parts = [
        part for value in eqn.params.values() for part in (value if isinstance(value, (tuple, list)) else (value,))
    ]
    opened = [part.jaxpr if isinstance(part, ClosedJaxpr) else part for part in parts]
    return [part for part in opened if isinstance(part, Jaxpr)]


def map_jaxprs(jaxpr: Any, change: Callable[[Any], Any]) -> Any:
    """``jaxpr`` with all jaxprs that its equations hold, and then itself, replaced by what ``change`` makes of them.

    One result for each, itself where nothing changes: JAX compiles a function that is called twice once.
    """
    changed: dict[int, Any] = {}

    def whole(jaxpr: Any) -> Any:
        if id(jaxpr) not in changed:
            eqns = []
            for eqn in jaxpr.eqns:
                params = {name: inner(value) for name, value in eqn.params.items()}
                same = all(params[name] is value for name, value in eqn.params.items())
                eqns.append(eqn if same else eqn.replace(params=params))
            same = all(map(operator.is_, eqns, jaxpr.eqns))
            changed[id(jaxpr)] = change(jaxpr if same else jaxpr.replace(eqns=eqns))
        return changed[id(jaxpr)]

    def inner(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            new = whole(value.jaxpr)
            if new is value.jaxpr:
                return value
            return changed.setdefault(id(value), ClosedJaxpr(new, value.consts))
        if isinstance(value, Jaxpr):
            return whole(value)
        if isinstance(value, tuple) and any(isinstance(part, (Jaxpr, ClosedJaxpr)) for part in value):
            parts = [inner(part) for part in value]
            return value if all(map(operator.is_, parts, value)) else like(value, parts)
        return value

    return whole(jaxpr)
