"""Walks through jaxprs, and what lies in their parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal


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


Equation = Callable[[JaxprEqn, list[Any]], Sequence[Any]]


def bind(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation of those operands, under the caller's trace."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def evaluate(closed: ClosedJaxpr, *args: Any, equation: Equation = bind) -> list[Any]:
    """``closed`` on ``args`` under the caller's trace; what replaces an equation keeps the user's line and scopes.

    Not :func:`jax.extend.core.jaxpr_as_fun`: that switches ``jax_debug_nans`` off, for good.
    """
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
            results = equation(eqn, list(map(read, eqn.invars)))
        values.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


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
