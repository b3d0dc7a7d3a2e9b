"""Replaces jax.lax's collectives over the axes of a mesh by this package's primitives: the *discharge*.

The program of one device was traced with the full sizes of the axes. It is discharged when it is lowered. By then
JAX's own rules have differentiated and batched its collectives, and no transform follows. :func:`discharge` replaces a
collective over our axes by its rule in ``discharge_rules``. It also discharges the jaxprs inside an equation. All other
equations stay as they are (``rewriting``), collectives over other axes included. The types that say along which axes a
value varies are dropped, since JAX has checked them by then.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive

from pycollective.errors import message
from pycollective.jax_support import jaxprs, rewriting
from pycollective.jax_support.jax_internals import is_transposed
from pycollective.jax_support.jaxprs import inner_jaxprs
from pycollective.named_axes.discharge_rules import RULES, WITHOUT_COMMUNICATION, as_one_equation, wrong_parameters
from pycollective.named_axes.mesh import Mesh
from pycollective.named_axes.names import AxisName
from pycollective.ordering.effect import effect
from pycollective.ordering.operand_order import Origins, number_of
from pycollective.primitives.passed import as_transpose, part_of
from pycollective.ranks.agreement import CollectiveLine

Names = frozenset[AxisName]

DEVICE_PROGRAMS: dict[Primitive, Callable[..., list[Any]]] = {}
"""For each primitive that holds a function over the axes of a ``mesh``: the function that runs it.

Its arguments are the operands and the parameters of the equation.
"""

CHECKS: list[Callable[[Any, Mesh], None]] = []
"""Functions that check a program over a mesh before it is discharged. A check raises an error to refuse the program."""

_OVER_OTHER_AXES: dict[str, Callable[..., Any]] = {
    "psum": lax.psum,
    "psum_invariant": lax.psum,
    "pmax": lax.pmax,
    "pmin": lax.pmin,
}
"""The collectives that may be over our axes and other axes together.

The rule reduces over our axes first. Then the function here reduces over the others.
"""


_LINES: weakref.WeakKeyDictionary[Any, dict[Any, list[CollectiveLine]]] = weakref.WeakKeyDictionary()
"""The results of :func:`collective_lines`, for each live device program and the axes of its mesh."""


def collective_lines(body: Any, mesh: Mesh) -> list[CollectiveLine]:
    """Returns a line for each collective of a device program over the axes of its mesh.

    The ranks compare the lines, which must be the same on all of them. Each collective has a hash of the lines as an
    attribute. So they are computed once for each program.
    """
    known, axes = _LINES.setdefault(body, {}), tuple(mesh.shape.items())
    if axes not in known:
        known[axes] = _lines(body, mesh.shape, range(1, len(body.invars) + 1))
    return known[axes]


_text_of_type = functools.lru_cache(maxsize=4096)(str)  # JAX puts the text together at each call


def _lines(jaxpr: Any, sizes: Mapping[AxisName, int], origins: Sequence[int]) -> list[CollectiveLine]:
    """Returns a line for each collective over these axes.

    Args:
        jaxpr: the program.
        sizes: the axes and their sizes.
        origins: for each input of the program a number for how it is computed.
    """
    lines = []
    found = Origins(jaxpr.invars, origins)
    names = frozenset(sizes)
    for eqn in jaxpr.eqns:
        of_operands, own = found.add(eqn)
        if eqn.primitive in jaxprs.PLAIN:
            continue
        if _names(eqn, names):
            operands = ", ".join([_text_of_type(var.aval) for var in eqn.invars])
            params = ", ".join(f"{name}={value}" for name, value in sorted(eqn.params.items()) if value is not None)
            is_reduction = eqn.primitive.name.startswith(("psum", "pmax", "pmin", "reduce_scatter"))
            text = f"{eqn.primitive.name}({operands}; {params})"
            lines.append(CollectiveLine(text, own if is_reduction else -1))
        hidden = jaxprs.hidden_program(eqn, list(sizes.items())) if jaxprs.hides_program(eqn) else None
        inner_programs = inner_jaxprs(eqn) if hidden is None else [hidden.jaxpr]
        if inner_programs:
            visible = {name: size for name, size in sizes.items() if name not in _rebound_names(eqn)}
        for inner in inner_programs:
            has_operands = len(inner.invars) == len(of_operands)
            inside = (
                of_operands if has_operands else [number_of(own, i) if own else 0 for i in range(len(inner.invars))]
            )
            lines += _lines(inner, visible, inside)
    return lines


def mentions(eqn: JaxprEqn, names: Names) -> bool:
    """Returns whether an equation, or an equation inside it, names one of these axes."""
    return _names(eqn, names) or any(
        _any_equation(_names, inner, names - _rebound_names(eqn)) for inner in inner_jaxprs(eqn)
    )


def communicates(jaxpr: Any, names: Names) -> bool:
    """Returns whether a program communicates with other devices along these axes, or with other ranks."""

    def communicating(eqn: JaxprEqn, names: Names) -> bool:
        return _may_name(eqn, names) and eqn.primitive.name not in WITHOUT_COMMUNICATION

    return effect in jaxpr.effects or _any_equation(communicating, jaxpr, names)


def discharge(jaxpr: Any, mesh: Mesh) -> ClosedJaxpr:
    """Returns the discharged program of one device's arrays. It names the local axes of ``mesh``.

    Raises:
        NotImplementedError: a collective has no rule, or is over our axes and other axes together.
        ValueError: a collective has wrong parameters, which JAX does not check before XLA does; or one of
            :data:`CHECKS` refuses the program.
    """
    for check in CHECKS:
        check(jaxpr, mesh)
    program = number_of(*(line.text for line in collective_lines(jaxpr, mesh)))
    with part_of(program):
        return _Discharge(mesh, frozenset(mesh.shape)).program(ClosedJaxpr(jaxpr, ()))


def refuse_mixed(jaxpr: Any, mesh: Mesh, other: AxisName) -> None:
    """Refuses a collective over axes of the mesh and ``other`` together, if JAX cannot batch it along ``other``.

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
    params = eqn.params
    if "axes" not in params and "axis_name" not in params:  # the case of nearly all equations
        return False
    return not names.isdisjoint(names_in(eqn))


def _may_name(eqn: JaxprEqn, names: Names) -> bool:
    """Returns whether an equation names one of these axes, or hides a function that may name one when it is traced."""
    return _names(eqn, names) or jaxprs.hides_program(eqn)


def _rebound_names(eqn: JaxprEqn) -> Names:
    """Returns the names that the equation binds: inside the equation they are other axes."""
    mesh = eqn.params.get("mesh")
    if isinstance(mesh, Mesh):
        return frozenset(mesh.shape)
    return frozenset(mesh.axis_names) if eqn.primitive.name == "shard_map" else frozenset()


def _any_equation(wanted: Callable[[JaxprEqn, Names], bool], jaxpr: Any, names: Names) -> bool:
    """Returns whether ``wanted`` is true for an equation of a program or of its inner jaxprs.

    The second argument of ``wanted`` are those of ``names`` that no surrounding equation binds again.
    ``wanted`` is not called for equations of plain primitives.
    """
    return any(
        wanted(eqn, names)
        or any(_any_equation(wanted, inner, names - _rebound_names(eqn)) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
        if eqn.primitive not in jaxprs.PLAIN
    )


class _Discharge:
    """Rewrites programs: replaces the collectives over ``names``, which are axes of ``mesh``."""

    def __init__(self, mesh: Mesh, names: Names) -> None:
        self._mesh = mesh
        self._ours = names  # without names that a surrounding equation binds again
        self._full = [(axis.name, axis.size) for axis in mesh.axes if axis.name in names]
        self._local = [(axis.local_name, axis.local) for axis in mesh.axes if axis.local > 1 and axis.name in names]
        self._group_along = functools.cache(mesh.group_along)
        self.program = rewriting.Rewriter(self._change, self._local)

    def _evaluate(self, closed: ClosedJaxpr) -> Callable[..., list[Any]]:
        return partial(rewriting.evaluate, closed, self._change)

    def _change(self, eqn: JaxprEqn) -> rewriting.Replacement | None:
        """Returns the replacement of an equation; None if the equation stays."""
        if eqn.primitive in jaxprs.PLAIN:
            return None
        new = self._replacement(eqn)
        if not callable(new) or not is_transposed(eqn):
            return new

        def transposed(*operands: Any) -> Sequence[Any]:
            with as_transpose():
                return new(*operands)

        return transposed

    def _replacement(self, eqn: JaxprEqn) -> rewriting.Replacement | None:
        if _names(eqn, self._ours):
            return self._collective(eqn)
        if eqn.primitive in DEVICE_PROGRAMS:
            return self._device_program(eqn)
        if eqn.primitive.name == "shard_map":
            if self._local:
                self._refuse_inside_devices(eqn, f"jax.shard_map over {eqn.params['mesh']}")
            inside = _Discharge(self._mesh, self._ours - _rebound_names(eqn))
            return jaxprs.rebuilt_shard_map(eqn, rewriting.changing(inside._change))
        if (inner := jaxprs.called_jaxpr(eqn)) is not None:  # its derivative is not needed any more
            return self._evaluate(inner)
        if (inner := jaxprs.hidden_program(eqn, self._full)) is not None:
            return self._evaluate(inner) if any(map(self._needs_discharge, [inner.jaxpr, *inner_jaxprs(eqn)])) else None
        if any(map(self._needs_discharge, inner_jaxprs(eqn))):
            return lambda *operands: jaxprs.bind_with_jaxprs(eqn, operands, self.program)
        return None

    def _refuse_inside_devices(self, eqn: JaxprEqn, got: str) -> NoReturn:
        remedy = "Bind all axes in one pycollective.shard_map, or name a communicator inside."
        _fail(self._mesh, eqn, f"a program over {self._mesh!r} by itself", f"{got} inside", remedy)

    def _needs_discharge(self, jaxpr: Any) -> bool:
        """Returns whether a jaxpr has collectives over our axes, device programs, or types with its trace's mesh."""

        def wanted(eqn: JaxprEqn, names: Names) -> bool:
            return _may_name(eqn, names) or eqn.primitive in DEVICE_PROGRAMS

        return _any_equation(wanted, jaxpr, self._ours) or rewriting.names_mesh(jaxpr)

    def _device_program(self, eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
        """Discharges a device program over another mesh inside this one: first over its own axes, then over ours."""
        if self._local:
            self._refuse_inside_devices(eqn, f"a program over {eqn.params['mesh']!r}")
        if not _any_equation(_may_name, eqn.params["body"], self._ours - _rebound_names(eqn)):
            return None
        avals = [jaxprs.aval_like(var.aval) for var in eqn.invars]
        own = partial(DEVICE_PROGRAMS[eqn.primitive], **eqn.params)
        return self._evaluate(jax.make_jaxpr(own, axis_env=self._full)(*avals))

    def _collective(self, eqn: JaxprEqn) -> rewriting.Replacement:
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
        group = self._group_along(ours)
        if (problem := wrong_parameters(group.size, name, params)) is not None:
            fail(*problem, kind=ValueError)
        if positional:
            params["positional"] = positional
        if others and name in _OVER_OTHER_AXES:
            return lambda *operands: _OVER_OTHER_AXES[name](list(rule(group, *operands, **params)), others)
        with as_transpose() if is_transposed(eqn) else contextlib.nullcontext():
            return as_one_equation(group, eqn, params) or partial(rule, group, **params)
