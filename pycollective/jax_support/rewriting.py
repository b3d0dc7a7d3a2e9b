"""Rewriting: a program with some of its equations replaced by programs.

What stays the same is not traced again. Tracing costs Python time for each equation, and a training step has thousands
of equations of which a pass replaces a few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from pycollective.jax_support import jax_internals, jaxprs

Replacement: TypeAlias = JaxprEqn | ClosedJaxpr | Callable[..., Sequence[Any]]
"""What replaces an equation: an equation with the same operands and results, a program without types that name a mesh,
or a function to be traced, of the operands."""

Change: TypeAlias = Callable[[JaxprEqn], Replacement | None]
"""A function from an equation to what replaces it; None: it stays.

A function that replaces it follows from the primitive, the parameters, the types of the operands and the scopes.
"""

Axes = Sequence[tuple[Any, int]]
"""Names and sizes of the axes around a program."""


def rewritten(closed: ClosedJaxpr, change: Change, axes: Axes = ()) -> ClosedJaxpr:
    """A program with ``change`` applied to its equations, but not to those of the programs that they hold.

    The result has no types that name a mesh. A program whose types do, or which has references, is traced again.

    Args:
        closed: the program.
        change: what replaces an equation.
        axes: the axes that the new program may name.
    """
    changes = {id(eqn): new for eqn in closed.jaxpr.eqns if (new := change(eqn)) is not None}
    if _can_splice(closed.jaxpr):
        if not changes:
            return closed
        trace = _Traces(axes)
        traced = {id(eqn): trace(eqn, changes[id(eqn)]) for eqn in closed.jaxpr.eqns if id(eqn) in changes}
        if not any(isinstance(new, ClosedJaxpr) and _makes_references(new.jaxpr) for new in traced.values()):
            return _spliced(closed, traced)
        changes = dict(traced)
    avals = [jaxprs.aval_like(var.aval) for var in closed.jaxpr.invars]

    def again(*args: Any) -> list[Any]:
        return evaluate(closed, lambda eqn: changes.get(id(eqn)), *args)

    return jax.make_jaxpr(again, axis_env=list(axes))(*avals)


class Rewriter:
    """:func:`rewritten` for the programs that equations hold: each once, so that XLA compiles a shared program once.

    Args:
        change: what replaces an equation.
        axes: the axes that the new programs may name.
    """

    def __init__(self, change: Change, axes: Axes = ()) -> None:
        self._change = change
        self._axes = axes
        # The new programs by the ids of the old jaxprs. It holds the old ones too, so that no id is used again.
        self._known: dict[int, tuple[Any, ClosedJaxpr]] = {}

    def __call__(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        if id(closed.jaxpr) not in self._known:
            self._known[id(closed.jaxpr)] = closed.jaxpr, rewritten(closed, self._change, self._axes)
        return self._known[id(closed.jaxpr)][1]


def evaluate(closed: ClosedJaxpr, change: Change, *args: Any) -> list[Any]:
    """Evaluates a program with ``change`` applied to its equations, under the caller's trace and mesh."""
    return jaxprs.evaluate(closed, changing(change), *args)


def changing(change: Change) -> jaxprs.Equation:
    """The evaluation of an equation to which ``change`` is applied."""

    def equation(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        new = change(eqn)
        if isinstance(new, ClosedJaxpr):
            return jaxprs.evaluate(new, jaxprs.rebind, *operands)
        if isinstance(new, JaxprEqn):
            return jaxprs.rebind(new, operands)
        if new is not None:
            return new(*operands)
        return jaxprs.bind(eqn, operands, {name: _without_mesh(value) for name, value in eqn.params.items()})

    return equation


def names_mesh(jaxpr: Any) -> bool:
    """Whether a type in a program, or in the programs in it, names a mesh.

    A program may have no equations: the body of a loop that only moves its carry, or a function that returns its
    argument.
    """
    return any(map(_is_of_mesh, _types(jaxpr))) or any(
        names_mesh(inner) for eqn in jaxpr.eqns for inner in jaxprs.inner_jaxprs(eqn)
    )


def _is_of_mesh(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def _types(jaxpr: Any) -> Iterable[Any]:
    """The types of a program's variables. Variables of one type may share its object."""
    found = {id(var.aval): var.aval for eqn in jaxpr.eqns for var in eqn.outvars}
    found |= {id(var.aval): var.aval for var in (*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars)}
    return found.values()


def _can_splice(jaxpr: Any) -> bool:
    """Whether the equations that stay the same keep their meaning beside new ones, outside any mesh."""
    if not jax.sharding.get_abstract_mesh().empty or _makes_references(jaxpr):
        return False
    if any(_is_of_mesh(aval) or hasattr(aval, "inner_aval") for aval in _types(jaxpr)):
        return False
    values = (value for eqn in jaxpr.eqns for value in eqn.params.values() if isinstance(value, _OF_MESH))
    return all(_without_mesh(value) is value for value in values)


def _makes_references(jaxpr: Any) -> bool:
    """Whether a program makes references. The effects of its equations name their variables."""
    return bool(jax_internals.without_references(jaxpr.effects) != jaxpr.effects)


_OF_MESH = (jax.sharding.NamedSharding, jax.sharding.AbstractMesh)


def _without_mesh(value: Any) -> Any:
    """A parameter of an equation without the mesh of its trace."""
    if isinstance(value, jax.sharding.NamedSharding) and isinstance(value.mesh, jax.sharding.AbstractMesh):
        return None
    return jax.sharding.get_abstract_mesh() if isinstance(value, jax.sharding.AbstractMesh) else value


def _spliced(closed: ClosedJaxpr, changes: Mapping[int, JaxprEqn | ClosedJaxpr]) -> ClosedJaxpr:
    """The program with the equation or program of ``changes`` in the place of each equation with this id.

    Variables of the new equations keep their names, but where the program has these names already: it may hold one
    function several times.
    """
    jaxpr = closed.jaxpr
    eqns: list[JaxprEqn] = []
    constants: dict[Var, tuple[Var, Any]] = {}  # the new ones, by their names in the programs that have them
    renamed: dict[Any, Any] = {}  # results of replaced equations, to what stands for them
    taken: set[Var] = set()  # names that the equations of a program cannot have
    if any(isinstance(new, ClosedJaxpr) for new in changes.values()):
        taken = _made(jaxpr) | {*jaxpr.invars, *jaxpr.constvars}
    for eqn in jaxpr.eqns:
        new = changes.get(id(eqn), eqn)
        if isinstance(new, JaxprEqn):
            eqns.append(_with_names(new, renamed) if renamed else new)
            continue
        names: dict[Any, Any] = {
            var: _new_name(renamed, atom) for var, atom in zip(new.jaxpr.invars, eqn.invars, strict=True)
        }
        for var, value in zip(new.jaxpr.constvars, new.consts, strict=True):
            names[var] = constants.setdefault(var, (Var(var.aval), value))[0]
        made = _made(new.jaxpr)
        _name_results(eqn, new.jaxpr, made, names, renamed)
        names |= {var: Var(var.aval) for var in taken & made if var not in names}
        taken |= made
        scopes = eqn.source_info.name_stack
        eqns += [_with_names(inner, names, scopes) for inner in new.jaxpr.eqns]
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    new_jaxpr = jaxpr.replace(
        constvars=[*jaxpr.constvars, *(var for var, _ in constants.values())],
        eqns=eqns,
        outvars=[_new_name(renamed, atom) for atom in jaxpr.outvars],
        effects=effects,
    )
    return ClosedJaxpr(new_jaxpr, [*closed.consts, *(value for _, value in constants.values())])


def _with_names(eqn: JaxprEqn, names: Mapping[Any, Any], scopes: Any = None) -> JaxprEqn:
    """The equation with new names of its variables, inside the scopes of an equation that it replaces."""
    changes: dict[str, Any] = {}
    for atom in eqn.invars:
        if type(atom) is not Literal and atom in names:
            changes["invars"] = [_new_name(names, atom) for atom in eqn.invars]
            break
    for var in eqn.outvars:
        if var in names:
            changes["outvars"] = [names.get(var, var) for var in eqn.outvars]
            break
    if scopes is not None and scopes.stack:
        source = eqn.source_info
        changes["source_info"] = source.replace(name_stack=scopes + source.name_stack)
    return eqn.replace(**changes) if changes else eqn


class _Traces:
    """The programs of replacements. Equations of one line that differ in their operands alone have one."""

    def __init__(self, axes: Axes) -> None:
        self._axes = list(axes)
        self._known: dict[Any, ClosedJaxpr] = {}

    def __call__(self, eqn: JaxprEqn, replacement: Replacement) -> JaxprEqn | ClosedJaxpr:
        if isinstance(replacement, (JaxprEqn, ClosedJaxpr)):
            return replacement
        avals = [jaxprs.aval_like(var.aval) for var in eqn.invars]
        types = tuple((aval.shape, aval.dtype, aval.weak_type) for aval in avals)
        source = eqn.source_info
        key = (eqn.primitive, tuple(eqn.params.items()), types, source.name_stack, source.traceback)
        try:
            known = self._known.get(key)
        except TypeError:  # a parameter has no hash
            return self._traced(eqn, replacement, avals)
        if known is None:
            self._known[key] = known = self._traced(eqn, replacement, avals)
        return known

    def _traced(self, eqn: JaxprEqn, function: Callable[..., Any], avals: Sequence[Any]) -> ClosedJaxpr:
        with source_info_util.user_context(eqn.source_info.traceback), eqn.ctx.manager:
            # The lambda is new to JAX: for a function that it knows it would return the program that it has.
            return jax.make_jaxpr(lambda *operands: function(*operands), axis_env=self._axes)(*avals)


def _new_name(names: Mapping[Any, Any], atom: Any) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _made(jaxpr: Any) -> set[Var]:
    """The variables that the equations of a program make."""
    return {var for eqn in jaxpr.eqns for var in eqn.outvars}


def _name_results(eqn: JaxprEqn, new: Any, made: set[Var], names: dict[Any, Any], renamed: dict[Any, Any]) -> None:
    """Gives the results of ``new`` the names that they have in ``eqn``.

    A result that is an input, a constant, a literal or an earlier result is not made by an equation of its own. Then
    the old name goes, and ``renamed`` has what stands for it. ``made``: see :func:`_made`, of ``new``.
    """
    for old, atom in zip(eqn.outvars, new.outvars, strict=True):
        if type(old) is Var and not isinstance(atom, Literal) and atom in made and atom not in names:
            names[atom] = old
        else:
            renamed[old] = _new_name(names, atom)
