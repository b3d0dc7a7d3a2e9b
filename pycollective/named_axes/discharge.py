"""jax.lax's collectives over the axes of a mesh become primitives over its groups of devices.

The program of one device comes from a trace in which the axes have their full sizes; JAX's own rules have then
differentiated and batched its collectives, and nothing will do that again: :func:`discharge` runs where a program is
lowered. It goes through the jaxpr once more under a trace: a collective over our axes is replaced as
``discharge_rules`` says, equations with jaxprs get them discharged, others are bound again as they are. Types that say
along which axes a value varies have done their work, and end here. Collectives over other axes are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive

from pycollective.errors import message
from pycollective.named_axes.discharge_rules import RULES, SILENT, bad_params
from pycollective.named_axes.mesh import Mesh
from pycollective.named_axes.names import AxisName
from pycollective.ordering import jaxprs
from pycollective.ordering.effect import effect
from pycollective.ordering.jaxprs import inner_jaxprs

Names = frozenset[AxisName]

PROGRAMS: dict[Primitive, Callable[..., list[Any]]] = {}
"""Functions of operands and parameters, for primitives that hold a program over a ``mesh`` of theirs."""

_OVER_THE_REST: dict[str, Callable[..., Any]] = {
    "psum": lax.psum,
    "psum_invariant": lax.psum,
    "pmax": lax.pmax,
    "pmin": lax.pmin,
}
"""What may go over our axes first and over others afterwards."""


def collectives(jaxpr: Any, sizes: Mapping[AxisName, int]) -> list[str]:
    """One line for each collective over these axes, which all ranks must have in common."""
    lines = []
    for eqn in jaxpr.eqns:
        if _names(eqn, frozenset(sizes)):
            operands = ", ".join(str(var.aval) for var in eqn.invars)
            params = ", ".join(f"{name}={value}" for name, value in sorted(eqn.params.items()) if value is not None)
            lines.append(f"{eqn.primitive.name}({operands}; {params})")
        hidden = jaxprs.hidden_program(eqn, list(sizes.items()))
        left = {name: size for name, size in sizes.items() if name not in _hidden(eqn)}
        for inner in inner_jaxprs(eqn) if hidden is None else [hidden.jaxpr]:
            lines += collectives(inner, left)
    return lines


def mentions(eqn: JaxprEqn, names: Names) -> bool:
    """Whether an equation, or what it holds, names one of these axes."""
    return _names(eqn, names) or any(_any(_names, inner, names - _hidden(eqn)) for inner in inner_jaxprs(eqn))


def speaks(jaxpr: Any, names: Names) -> bool:
    """Whether the program speaks with other devices along these axes, or with other ranks."""
    return effect in jaxpr.effects or _any(
        lambda eqn, left: _may_name(eqn, left) and eqn.primitive.name not in SILENT, jaxpr, names
    )


def discharge(jaxpr: Any, mesh: Mesh) -> Callable[..., list[Any]]:
    """The same as a function of one device's arrays. Its caller binds the local names of ``mesh``.

    Raises:
        NotImplementedError: a collective that has no rule, or one over our axes and others at once.
        ValueError: parameters that JAX leaves for XLA to refuse.
    """
    return partial(_Discharge(mesh, frozenset(mesh.shape)).evaluate, ClosedJaxpr(jaxpr, ()))


def refuse_mixed(jaxpr: Any, mesh: Mesh, other: AxisName) -> None:
    """Refuses collectives over axes of the mesh and ``other`` at once that JAX cannot batch along that.

    Raises:
        NotImplementedError: there is one.
    """

    def mixed(eqn: JaxprEqn, names: Names) -> bool:
        if not (_names(eqn, names) and _names(eqn, frozenset([other]))) or eqn.primitive.name in _OVER_THE_REST:
            return False
        return _refuse(eqn, mesh)

    _any(mixed, jaxpr, frozenset(mesh.shape))


def _refuse(eqn: JaxprEqn, mesh: Mesh) -> NoReturn:
    remedy = "Use one call for these axes and another for the others."
    _fail(mesh, eqn, f"axes of {mesh!r} alone", f"{eqn.primitive.name} over {_axes(eqn)}", remedy)


def _fail(
    mesh: Mesh, eqn: JaxprEqn, expected: str, got: str, remedy: str, kind: type[Exception] = NotImplementedError
) -> NoReturn:
    where = source_info_util.summarize(eqn.source_info)
    text = message(eqn.primitive.name, expected, f"{got} at {where}", remedy, rank=mesh.comm.rank, size=mesh.comm.size)
    raise kind(text)


def _axes(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The axes that a collective names; an int is a positional axis."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _names(eqn: JaxprEqn, names: Names) -> bool:
    return any(not isinstance(name, int) and name in names for name in _axes(eqn))


def _may_name(eqn: JaxprEqn, names: Names) -> bool:
    """Whether it names one of them, or stands for a function that may do so when JAX traces it."""
    return _names(eqn, names) or jaxprs.hides_program(eqn)


def _hidden(eqn: JaxprEqn) -> Names:
    """The names that mean an axis of the equation's own in the jaxprs that it holds."""
    mesh = eqn.params.get("mesh")
    if isinstance(mesh, Mesh):
        return frozenset(mesh.shape)
    return frozenset(mesh.axis_names) if eqn.primitive.name == "shard_map" else frozenset()


def _any(wanted: Callable[[JaxprEqn, Names], bool], jaxpr: Any, names: Names) -> bool:
    return any(
        wanted(eqn, names) or any(_any(wanted, inner, names - _hidden(eqn)) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


class _Discharge:
    def __init__(self, mesh: Mesh, names: Names) -> None:
        self._mesh = mesh
        self._ours = names  # axes of the mesh that nothing hides here
        self._full = [(axis.name, axis.size) for axis in mesh.axes if axis.name in names]
        self._local = [(axis.local_name, axis.local) for axis in mesh.axes if axis.local > 1 and axis.name in names]
        self._known: dict[int, tuple[Any, ClosedJaxpr]] = {}  # with the old jaxpr, whose id must stay its own

    def evaluate(self, closed: ClosedJaxpr, *args: Any) -> list[Any]:
        return jaxprs.evaluate(closed, self._equation, *args)

    def _jaxpr(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """One result for each, so that what is called twice is compiled once."""
        if id(closed.jaxpr) not in self._known:
            args = [jaxprs.aval_like(var.aval) for var in closed.jaxpr.invars]
            new = jax.make_jaxpr(partial(self.evaluate, closed), axis_env=self._local)(*args)
            self._known[id(closed.jaxpr)] = closed.jaxpr, new
        return self._known[id(closed.jaxpr)][1]

    def _equation(self, eqn: JaxprEqn, operands: list[Any]) -> Any:
        if _names(eqn, self._ours):
            return self._collective(eqn, operands)
        if eqn.primitive in PROGRAMS:
            return self._program(eqn, operands)
        if eqn.primitive.name == "shard_map":
            if self._local:
                remedy = "Bind all axes in one pycollective.shard_map."
                _fail(
                    self._mesh,
                    eqn,
                    f"a program over {self._mesh!r} by itself",
                    f"jax.shard_map over {eqn.params['mesh']}",
                    remedy,
                )
            inside = _Discharge(self._mesh, self._ours - _hidden(eqn))
            return jaxprs.rebuilt_shard_map(eqn, inside._equation)(*operands)
        if (inner := jaxprs.called_jaxpr(eqn)) is not None:  # nothing differentiates what is discharged
            return self.evaluate(inner, *operands)
        if (inner := jaxprs.hidden_program(eqn, self._full)) is not None:
            if any(map(self._concerns, [inner.jaxpr, *inner_jaxprs(eqn)])):
                return self.evaluate(inner, *operands)
        elif any(map(self._concerns, inner_jaxprs(eqn))):
            return jaxprs.bind_with_jaxprs(eqn, operands, self._jaxpr)
        return jaxprs.bind(eqn, operands, {name: self._outside(value) for name, value in eqn.params.items()})

    def _concerns(self, jaxpr: Any) -> bool:
        """Whether it holds what is ours, or types of the mesh under which it was traced."""

        def wanted(eqn: JaxprEqn, names: Names) -> bool:
            typed = (getattr(var.aval, "sharding", None) for var in (*eqn.invars, *eqn.outvars))
            return (
                _may_name(eqn, names)
                or eqn.primitive in PROGRAMS
                or any(not sharding.mesh.empty for sharding in typed if sharding is not None)
            )

        return _any(wanted, jaxpr, self._ours)

    def _outside(self, value: Any) -> Any:
        """A parameter without the mesh under which it was traced."""
        if isinstance(value, jax.sharding.NamedSharding) and isinstance(value.mesh, jax.sharding.AbstractMesh):
            return None
        return jax.sharding.get_abstract_mesh() if isinstance(value, jax.sharding.AbstractMesh) else value

    def _program(self, eqn: JaxprEqn, operands: list[Any]) -> Any:
        """One over another mesh, inside; its collectives over axes of ours are replaced once it is discharged."""
        if not _any(_may_name, eqn.params["body"], self._ours - _hidden(eqn)):
            return jaxprs.bind(eqn, operands, eqn.params)
        closed = jax.make_jaxpr(partial(PROGRAMS[eqn.primitive], **eqn.params), axis_env=self._full)(
            *(jaxprs.aval_like(var.aval) for var in eqn.invars)
        )
        return self.evaluate(closed, *operands)

    def _collective(self, eqn: JaxprEqn, operands: list[Any]) -> Any:
        mesh = self._mesh
        name = eqn.primitive.name
        fail = partial(_fail, mesh, eqn)
        rule = RULES.get(name)
        if rule is None:
            fail(f"one of {sorted(RULES)} over axes of {mesh!r}", name, "Write it with those.")
        names = _axes(eqn)
        positional = tuple(axis for axis in names if isinstance(axis, int))
        ours = tuple(axis for axis in names if not isinstance(axis, int) and axis in self._ours)
        others = tuple(axis for axis in names if not isinstance(axis, int) and axis not in self._ours)
        if others and name not in _OVER_THE_REST and name not in SILENT:
            _refuse(eqn, mesh)
        params = {key: value for key, value in eqn.params.items() if key not in ("axes", "axis_name", "axis_size")}
        group = mesh.over(ours)
        if (problem := bad_params(group.size, name, params)) is not None:
            fail(*problem, kind=ValueError)
        if positional:
            params["positional"] = positional
        results = rule(group, *operands, **params)
        return _OVER_THE_REST[name](list(results), others) if others and name in _OVER_THE_REST else results
