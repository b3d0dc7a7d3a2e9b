"""Which arrays a program may overwrite: those that its caller donates, and those that it does not need any more."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Var

from pycollective.jax_support.jaxprs import PLAIN, is_reshape

_CALLED = {"jit": "jaxpr", "pjit": "jaxpr", "linear_call": "callee", "shard_map": "jaxpr"}
"""Calls that JAX inlines, and one that each device makes; each with the parameter that has the program it calls."""


def without_copies(jaxpr: Any, free: frozenset[Var] = frozenset()) -> Any:
    """The program with the hint ``in_place`` only where XLA need not copy the operand first.

    XLA copies an operand that must survive, an input of the program or an array that is read later, and overwrites the
    copy. That costs more than the call of MPI with two buffers.

    Args:
        jaxpr: the program.
        free: the inputs that it may overwrite.
    """
    places = [place for place, eqn in enumerate(jaxpr.eqns) if eqn.primitive not in PLAIN and _may_overwrite(eqn)]
    if not places:
        return jaxpr
    buffers = _buffers(jaxpr)

    def buffers_of(atoms: Iterable[Any]) -> set[Var]:
        return {buffers.get(var, var) for var in atoms if isinstance(var, Var)}

    # From the last equation to the first: the buffers that the equations after this one need.
    needed = {*jaxpr.invars, *jaxpr.constvars} - free
    needed |= buffers_of(jaxpr.outvars)
    eqns = list(jaxpr.eqns)
    end = len(eqns)
    for place in reversed(places):
        needed |= buffers_of(atom for later in eqns[place + 1 : end] for atom in later.invars)
        eqn, end = eqns[place], place + 1
        if hints := eqn.params.get("in_place"):
            arrays = zip(hints, eqn.invars, strict=True)
            cheap = tuple(hint and isinstance(var, Var) and buffers.get(var, var) not in needed for hint, var in arrays)
            eqns[place] = eqn.replace(params={**eqn.params, "in_place": cheap})
        elif (name := _CALLED.get(eqn.primitive.name)) is not None:
            called = eqn.params[name]
            whole = called.jaxpr if isinstance(called, ClosedJaxpr) else called
            inner = without_copies(whole, _free_inside(eqn, whole, needed, buffers))
            if inner is not whole:
                new = ClosedJaxpr(inner, called.consts) if isinstance(called, ClosedJaxpr) else inner
                eqns[place] = eqn.replace(params={**eqn.params, name: new})
    return jaxpr.replace(eqns=eqns)


def _may_overwrite(eqn: Any) -> bool:
    """Whether an equation has the hint, or is a call whose program may have it."""
    return "in_place" in eqn.params or eqn.primitive.name in _CALLED


def _free_inside(eqn: Any, inner: Any, needed: set[Var], buffers: dict[Var, Var]) -> frozenset[Var]:
    """The inputs of ``inner``, a jaxpr of ``eqn``, that no later equation needs."""
    pairs = zip(eqn.invars, inner.invars, strict=True)
    return frozenset(var for outer, var in pairs if isinstance(outer, Var) and buffers.get(outer, outer) not in needed)


def _buffers(jaxpr: Any) -> dict[Var, Var]:
    """Maps each reshaped array to the array that it was made from: XLA gives both one buffer."""
    buffers: dict[Var, Var] = {}
    for eqn in jaxpr.eqns:
        if is_reshape(eqn):
            source = eqn.invars[0]
            buffers[eqn.outvars[0]] = buffers.get(source, source)
    return buffers


class Donated(NamedTuple):
    """The arguments of a function that its program may overwrite.

    Attributes:
        numbers: JAX's ``donate_argnums``.
        names: JAX's ``donate_argnames``.
    """

    numbers: frozenset[int]
    names: frozenset[str]

    @classmethod
    def of(cls, fun: Callable[..., Any], options: dict[str, Any]) -> Donated:
        """The arguments that the options of :func:`jax.jit` name, each by number and by name if ``fun`` shows both."""
        numbers, names = options.get("donate_argnums"), options.get("donate_argnames")
        numbers = () if numbers is None else (numbers,) if isinstance(numbers, int) else tuple(numbers)
        names = () if names is None else (names,) if isinstance(names, str) else tuple(names)
        try:
            known = list(inspect.signature(fun).parameters)
        except (TypeError, ValueError):  # JAX infers nothing either
            known = []
        places = {known[i]: i for i in range(len(known))}
        return cls(
            frozenset(
                [
                    *(i % len(known) if known and i < 0 else i for i in numbers),
                    *(places[n] for n in names if n in places),
                ]
            ),
            frozenset([*names, *(known[i] for i in numbers if -len(known) <= i < len(known))]),
        )

    def arrays(self, args: Any, kwargs: Any) -> set[int]:
        """The ids of the arrays in the donated arguments of a call."""
        chosen = [args[i] for i in self.numbers if i < len(args)], [kwargs[n] for n in self.names if n in kwargs]
        return {id(leaf) for leaf in jax.tree.leaves(chosen)}
