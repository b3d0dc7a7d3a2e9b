"""Splits a backward pass in two parts: the gradients of a stage's inputs, and later those of its weights.

The previous rank waits for the first part only. The first part has the equations on which the first results depend. The
second part has the other equations. It takes shared values from the first part, so no equation is computed twice:

    dy' = dy * f'(z)        first; both parts need dy'
    dx  = dy' w^T           first
    dw  = x^T dy'           second

Source: the passes B and W of arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from pycollective.jax_support.jaxprs import evaluate, reads, rebind

Array = Any


class Split(NamedTuple):
    """A program in two parts.

    Attributes:
        first: returns the first results, followed by the values that the second part needs from it.
        second: returns the other results. Its arguments are some arguments of the program, followed by these values.
        reused_args: the indices of the program's arguments that the second part takes.
    """

    first: ClosedJaxpr
    second: ClosedJaxpr
    reused_args: tuple[int, ...]


def split(closed: ClosedJaxpr, results: int, *args: Array) -> Split:
    """Splits a program after its first results.

    An equation with results for both parts, such as a scan or a checkpoint, is in the first part as a whole. A call of
    a jitted function is replaced by the equations inside it. A program with references is not split: its second part
    has no equations.

    Args:
        closed: the program.
        results: the number of its first results.
        args: its arguments, or what has their types.

    Returns:
        The two parts.

    Example:
        >>> import jax.numpy as jnp
        >>> def backward(x, w, dy):
        ...     dz = dy * jnp.cos(x @ w)
        ...     return dz @ w.T, x.T @ dz
        >>> args = jnp.ones((2, 3)), jnp.ones((3, 3)), jnp.ones((2, 3))
        >>> parts = split(jax.make_jaxpr(backward)(*args), 1, *args)
        >>> [str(part).count("dot_general[") for part in (parts.first, parts.second)]  # x @ w, dx; dw
        [2, 1]
    """
    closed = jax.make_jaxpr(lambda *args: evaluate(closed, _inlined, *args))(*args)
    jaxpr = closed.jaxpr
    outs = jaxpr.outvars
    whole = any(hasattr(var.aval, "inner_aval") for eqn in jaxpr.eqns for var in eqn.outvars)
    first = jaxpr.eqns if whole else _needed(jaxpr.eqns, outs[:results], effects=False)
    chosen = set(map(id, first))
    second = _needed([eqn for eqn in jaxpr.eqns if id(eqn) not in chosen], outs[results:], effects=True)
    made = {var for eqn in second for var in eqn.outvars}
    read = [var for eqn in second for var in reads(eqn)] + [var for var in outs[results:] if isinstance(var, Var)]
    taken = dict.fromkeys(var for var in read if var not in made and var not in jaxpr.constvars)
    reused_args = tuple(i for i, var in enumerate(jaxpr.invars) if var in taken)
    given = [var for var in taken if var not in jaxpr.invars]
    return Split(
        ClosedJaxpr(jaxpr.replace(eqns=first, outvars=[*outs[:results], *given]), closed.consts),
        ClosedJaxpr(
            jaxpr.replace(
                eqns=second, invars=[*(jaxpr.invars[i] for i in reused_args), *given], outvars=outs[results:]
            ),
            closed.consts,
        ),
        reused_args,
    )


def _inlined(eqn: JaxprEqn, operands: list[Array]) -> Any:
    """Evaluates an equation; for a call of a jitted function, the equations inside it."""
    if eqn.primitive.name in ("jit", "pjit"):
        return evaluate(eqn.params["jaxpr"], _inlined, *operands)
    return rebind(eqn, operands)


def _needed(eqns: list[JaxprEqn], results: list[Any], *, effects: bool) -> list[JaxprEqn]:
    """Returns the equations on which some results depend; with ``effects`` also those that have effects."""
    needed = {var for var in results if isinstance(var, Var)}
    found = []
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars) or (effects and eqn.effects):
            found.append(eqn)
            needed.update(reads(eqn))
    return found[::-1]
