"""Which arrays a program may overwrite: what its caller donates, and what it does not read again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Var

from pycollective.ordering.jaxprs import is_reshape


def without_copies(jaxpr: Any, free: frozenset[Var] = frozenset()) -> Any:
    """Drops the hint ``in_place`` where the operand must survive: an input of the program, or read again later.

    XLA would copy such an operand in order to overwrite the copy, which costs more than MPI's own two-buffer form.

    Args:
        jaxpr: the program.
        free: inputs that it may overwrite.
    """
    buffers = _buffers(jaxpr)

    def buffers_of(atoms: Iterable[Any]) -> set[Var]:
        return {buffers.get(var, var) for var in atoms if isinstance(var, Var)}

    kept = {*jaxpr.invars, *jaxpr.constvars} - free
    kept |= buffers_of(jaxpr.outvars)
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        reads = buffers_of(eqn.invars)
        if hints := eqn.params.get("in_place"):
            arrays = zip(hints, eqn.invars, strict=True)
            ours = tuple(hint and isinstance(var, Var) and buffers.get(var, var) not in kept for hint, var in arrays)
            eqn = eqn.replace(params={**eqn.params, "in_place": ours})
        if eqn.primitive.name in ("jit", "pjit"):  # JAX inlines it
            closed = eqn.params["jaxpr"]
            inner = without_copies(closed.jaxpr, _free_inside(eqn, closed.jaxpr, kept, buffers))
            eqn = eqn.replace(params={**eqn.params, "jaxpr": ClosedJaxpr(inner, closed.consts)})
        elif eqn.primitive.name == "shard_map":  # the same program on each device
            inner = eqn.params["jaxpr"]
            inner = without_copies(inner, _free_inside(eqn, inner, kept, buffers))
            eqn = eqn.replace(params={**eqn.params, "jaxpr": inner})
        eqns.append(eqn)
        kept |= reads
    return jaxpr.replace(eqns=eqns[::-1])


def _free_inside(eqn: Any, inner: Any, kept: set[Var], buffers: dict[Var, Var]) -> frozenset[Var]:
    """The inputs of a program that an equation holds which nobody reads behind it."""
    pairs = zip(eqn.invars, inner.invars, strict=True)
    return frozenset(var for outer, var in pairs if isinstance(outer, Var) and buffers.get(outer, outer) not in kept)


def _buffers(jaxpr: Any) -> dict[Var, Var]:
    """For what only has another shape than an array before it, that array: XLA gives both one buffer."""
    buffers: dict[Var, Var] = {}
    for eqn in jaxpr.eqns:
        if is_reshape(eqn):
            source = eqn.invars[0]
            buffers[eqn.outvars[0]] = buffers.get(source, source)
    return buffers


class Donated(NamedTuple):
    """Which arguments of a function its program may overwrite: JAX's ``donate_argnums`` and ``donate_argnames``."""

    numbers: frozenset[int]
    names: frozenset[str]

    @classmethod
    def of(cls, fun: Callable[..., Any], options: dict[str, Any]) -> Donated:
        """Those that the options of :func:`jax.jit` name, in both ways where the signature tells."""
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
        """The ids of the arrays in those arguments."""
        chosen = [args[i] for i in self.numbers if i < len(args)], [kwargs[n] for n in self.names if n in kwargs]
        return {id(leaf) for leaf in jax.tree.leaves(chosen)}
