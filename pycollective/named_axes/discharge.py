"""Replaces jax.lax's collectives over the axes of a mesh by this package's primitives: the *discharge*.

The program of one device was traced with the full sizes of the axes. It is discharged where it is lowered, when JAX's
own rules have differentiated and batched its collectives, and nothing will do so again. :func:`discharge` evaluates its
jaxpr under a new trace: it replaces a collective over our axes as ``discharge_rules`` says, discharges the jaxprs that
an equation holds, and binds all other equations as they are. It leaves collectives over other axes alone. It drops
JAX's types that say along which axes a value varies, since JAX has checked them by then.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, Var

from pycollective.errors import message
from pycollective.jax_support import jaxprs
from pycollective.jax_support.jax_internals import is_transposed
from pycollective.jax_support.jaxprs import inner_jaxprs
from pycollective.named_axes.discharge_rules import RULES, WITHOUT_COMMUNICATION, wrong_parameters
from pycollective.named_axes.mesh import Mesh
from pycollective.named_axes.names import AxisName
from pycollective.ordering.effect import effect
from pycollective.ordering.operand_order import number_of
from pycollective.primitives.passed import as_transpose, part_of
from pycollective.ranks.agreement import CollectiveLine

Names = frozenset[AxisName]

DEVICE_PROGRAMS: dict[Primitive, Callable[..., list[Any]]] = {}
"""For each primitive that holds a function over the axes of a ``mesh``: what runs it, from operands and parameters."""

CHECKS: list[Callable[[Any, Mesh], None]] = []
"""What looks at a program over a mesh before it is discharged. A check that refuses the program raises an error."""

_OVER_OTHER_AXES: dict[str, Callable[..., Any]] = {
    "psum": lax.psum,
    "psum_invariant": lax.psum,
    "pmax": lax.pmax,
    "pmin": lax.pmin,
}
"""The collectives that may go over our axes and others at once: over ours first, then by these functions."""


def collective_lines(
    jaxpr: Any, sizes: Mapping[AxisName, int], origins: Sequence[int] | None = None
) -> list[CollectiveLine]:
    """Returns a line for each collective over these axes. They must be the same on all ranks.

    Args:
        jaxpr: the program.
        sizes: the axes and their sizes.
        origins: where the inputs of the program come from, as numbers; None: they are the user's arguments.
    """
    lines = []
    known = dict(zip(jaxpr.invars, range(len(jaxpr.invars)) if origins is None else origins, strict=True))
    for eqn in jaxpr.eqns:
        of_operands = [known.get(atom, -1) if isinstance(atom, Var) else -1 for atom in eqn.invars]
        own = number_of(eqn.primitive.name, *of_operands)
        known |= {var: number_of(own, i) for i, var in enumerate(eqn.outvars)}
        if _names(eqn, frozenset(sizes)):
            operands = ", ".join(str(var.aval) for var in eqn.invars)
            params = ", ".join(f"{name}={value}" for name, value in sorted(eqn.params.items()) if value is not None)
            is_reduction = eqn.primitive.name.startswith(("psum", "pmax", "pmin", "reduce_scatter"))
            text = f"{eqn.primitive.name}({operands}; {params})"
            lines.append(CollectiveLine(text, own if is_reduction else -1))
        hidden = jaxprs.hidden_program(eqn, list(sizes.items()))
        visible = {name: size for name, size in sizes.items() if name not in _rebound_names(eqn)}
        for inner in inner_jaxprs(eqn) if hidden is None else [hidden.jaxpr]:
            has_operands = len(inner.invars) == len(of_operands)
            inside = of_operands if has_operands else [number_of(own, i) for i in range(len(inner.invars))]
            lines += collective_lines(inner, visible, inside)
    return lines


def mentions(eqn: JaxprEqn, names: Names) -> bool:
    """Returns whether an equation, or one in a jaxpr that it holds, names one of these axes."""
    return _names(eqn, names) or any(
        _any_equation(_names, inner, names - _rebound_names(eqn)) for inner in inner_jaxprs(eqn)
    )


def communicates(jaxpr: Any, names: Names) -> bool:
    """Returns whether a program communicates with other devices along these axes, or with other ranks."""

    def communicating(eqn: JaxprEqn, names: Names) -> bool:
        return _may_name(eqn, names) and eqn.primitive.name not in WITHOUT_COMMUNICATION

    return effect in jaxpr.effects or _any_equation(communicating, jaxpr, names)


def discharge(jaxpr: Any, mesh: Mesh) -> Callable[..., list[Any]]:
    """Returns the discharged program, a function of one device's arrays. Its caller binds the local names of ``mesh``.

    Raises:
        NotImplementedError: a collective has no rule, or goes over our axes and others at once.
        ValueError: a collective has wrong parameters, which JAX leaves for XLA to refuse; one of :data:`CHECKS` refuses
            the program.
    """
    for check in CHECKS:
        check(jaxpr, mesh)
    program = number_of(*(line.text for line in collective_lines(jaxpr, mesh.shape)))
    evaluate = partial(_Discharge(mesh, frozenset(mesh.shape)).evaluate, ClosedJaxpr(jaxpr, ()))

    def discharged(*args: Any) -> list[Any]:
        with part_of(program):
            return evaluate(*args)

    return discharged


def refuse_mixed(jaxpr: Any, mesh: Mesh, other: AxisName) -> None:
    """Refuses a collective over axes of the mesh and over ``other`` at once, if JAX cannot batch it along ``other``.

    Raises:
        NotImplementedError: the program has such a collective.
    """

    def mixed(eqn: JaxprEqn, names: Names) -> bool:
        if not (_names(eqn, names) and _names(eqn, frozenset([other]))) or eqn.primitive.name in _OVER_OTHER_AXES:
            return False
        return _refuse_other_axes(eqn, mesh)

    _any_equation(mixed, jaxpr, frozenset(mesh.shape))


def _refuse_other_axes(eqn: JaxprEqn, mesh: Mesh) -> NoReturn:
    remedy = "Use one call for these axes and another for the others."
    _fail(mesh, eqn, f"axes of {mesh!r} alone", f"{eqn.primitive.name} over {_axes(eqn)}", remedy)


def _fail(
    mesh: Mesh, eqn: JaxprEqn, expected: str, got: str, remedy: str, kind: type[Exception] = NotImplementedError
) -> NoReturn:
    where = source_info_util.summarize(eqn.source_info)
    text = message(eqn.primitive.name, expected, f"{got} at {where}", remedy, rank=mesh.comm.rank, size=mesh.comm.size)
    raise kind(text)


def _axes(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Returns the axes that a collective names. An int is a positional axis."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def names_in(eqn: JaxprEqn) -> Names:
    """Returns the names of the axes over which an equation is a collective."""
    return frozenset(name for name in _axes(eqn) if not isinstance(name, numbers.Integral))  # NumPy has ints, too


def _names(eqn: JaxprEqn, names: Names) -> bool:
    return not names.isdisjoint(names_in(eqn))


def _may_name(eqn: JaxprEqn, names: Names) -> bool:
    """Returns whether an equation names one of these axes, or hides a function that may do so when JAX traces it."""
    return _names(eqn, names) or jaxprs.hides_program(eqn)


def _rebound_names(eqn: JaxprEqn) -> Names:
    """Returns the names that the equation binds itself: in its jaxprs they mean axes of its own."""
    mesh = eqn.params.get("mesh")
    if isinstance(mesh, Mesh):
        return frozenset(mesh.shape)
    return frozenset(mesh.axis_names) if eqn.primitive.name == "shard_map" else frozenset()


def _any_equation(wanted: Callable[[JaxprEqn, Names], bool], jaxpr: Any, names: Names) -> bool:
    """Returns whether ``wanted`` holds for an equation of a program, or of the jaxprs in it, given the names there."""
    return any(
        wanted(eqn, names)
        or any(_any_equation(wanted, inner, names - _rebound_names(eqn)) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _has_mesh_in_types(jaxpr: Any) -> bool:
    """Returns whether a type in a program, or in the jaxprs in it, names a mesh.

    A program may have no equations: the body of a loop that only moves its carry, or a function that returns its
    argument.
    """
    atoms = (*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars, *(var for eqn in jaxpr.eqns for var in eqn.outvars))
    shardings = (getattr(var.aval, "sharding", None) for var in atoms)
    return any(sharding is not None and not sharding.mesh.empty for sharding in shardings) or any(
        _has_mesh_in_types(inner) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn)
    )


class _Discharge:
    """Evaluates jaxprs with the collectives over ``names``, axes of ``mesh``, replaced."""

    def __init__(self, mesh: Mesh, names: Names) -> None:
        self._mesh = mesh
        self._ours = names  # without axes whose names an equation around has bound again
        self._full = [(axis.name, axis.size) for axis in mesh.axes if axis.name in names]
        self._local = [(axis.local_name, axis.local) for axis in mesh.axes if axis.local > 1 and axis.name in names]
        # The discharged jaxprs by the ids of the old ones. It holds the old ones too, so that no id is used again.
        self._known: dict[int, tuple[Any, ClosedJaxpr]] = {}

    def evaluate(self, closed: ClosedJaxpr, *args: Any) -> list[Any]:
        return jaxprs.evaluate(closed, self._equation, *args)

    def _jaxpr(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """Discharges a jaxpr that an equation holds; always to the same result, so that XLA compiles it once."""
        if id(closed.jaxpr) not in self._known:
            args = [jaxprs.aval_like(var.aval) for var in closed.jaxpr.invars]
            new = jax.make_jaxpr(partial(self.evaluate, closed), axis_env=self._local)(*args)
            self._known[id(closed.jaxpr)] = closed.jaxpr, new
        return self._known[id(closed.jaxpr)][1]

    def _equation(self, eqn: JaxprEqn, operands: list[Any]) -> Any:
        with as_transpose() if is_transposed(eqn) else contextlib.nullcontext():
            return self._discharged(eqn, operands)

    def _discharged(self, eqn: JaxprEqn, operands: list[Any]) -> Any:
        if _names(eqn, self._ours):
            return self._collective(eqn, operands)
        if eqn.primitive in DEVICE_PROGRAMS:
            return self._device_program(eqn, operands)
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
            inside = _Discharge(self._mesh, self._ours - _rebound_names(eqn))
            return jaxprs.rebuilt_shard_map(eqn, inside._equation)(*operands)
        if (inner := jaxprs.called_jaxpr(eqn)) is not None:  # its derivative is not needed any more
            return self.evaluate(inner, *operands)
        if (inner := jaxprs.hidden_program(eqn, self._full)) is not None:
            if any(map(self._needs_discharge, [inner.jaxpr, *inner_jaxprs(eqn)])):
                return self.evaluate(inner, *operands)
        elif any(map(self._needs_discharge, inner_jaxprs(eqn))):
            return jaxprs.bind_with_jaxprs(eqn, operands, self._jaxpr)
        return jaxprs.bind(eqn, operands, {name: self._without_mesh(value) for name, value in eqn.params.items()})

    def _needs_discharge(self, jaxpr: Any) -> bool:
        """Returns whether a jaxpr has collectives or programs of ours, or types with the mesh of its trace."""

        def wanted(eqn: JaxprEqn, names: Names) -> bool:
            return _may_name(eqn, names) or eqn.primitive in DEVICE_PROGRAMS

        return _any_equation(wanted, jaxpr, self._ours) or _has_mesh_in_types(jaxpr)

    def _without_mesh(self, value: Any) -> Any:
        """Returns a parameter of an equation without the mesh of its trace."""
        if isinstance(value, jax.sharding.NamedSharding) and isinstance(value.mesh, jax.sharding.AbstractMesh):
            return None
        return jax.sharding.get_abstract_mesh() if isinstance(value, jax.sharding.AbstractMesh) else value

    def _device_program(self, eqn: JaxprEqn, operands: list[Any]) -> Any:
        """Discharges a program over another mesh inside this one: first over its own axes, and then over ours."""
        if not _any_equation(_may_name, eqn.params["body"], self._ours - _rebound_names(eqn)):
            return jaxprs.bind(eqn, operands, eqn.params)
        closed = jax.make_jaxpr(partial(DEVICE_PROGRAMS[eqn.primitive], **eqn.params), axis_env=self._full)(
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
        if others and name not in _OVER_OTHER_AXES and name not in WITHOUT_COMMUNICATION:
            _refuse_other_axes(eqn, mesh)
        params = {key: value for key, value in eqn.params.items() if key not in ("axes", "axis_name", "axis_size")}
        group = mesh.group_along(ours)
        if (problem := wrong_parameters(group.size, name, params)) is not None:
            fail(*problem, kind=ValueError)
        if positional:
            params["positional"] = positional
        results = rule(group, *operands, **params)
        return _OVER_OTHER_AXES[name](list(results), others) if others and name in _OVER_OTHER_AXES else results
