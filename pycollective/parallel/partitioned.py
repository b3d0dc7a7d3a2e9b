"""Programs of whole arrays, computed by devices that have slices of these arrays.

An optimizer is traced for whole parameters, and its program is interpreted for slices, as a compiler partitions a
program. Each value of the program is

    same     on each device, whole
    slice    each device has its slice, see :class:`~pycollective.parallel.axes.Sliced`
    whole    one device, the *owner*, has the whole value

An equation that computes each element by itself is applied to slices. A sum, maximum or minimum over a slice, or a dot
product of two slices, is completed by a collective. Every other equation of sliced values is computed for whole arrays
by one device. Equations that depend on each other in this way are one *component*: the Newton-Schulz iteration of one
matrix in Muon, for example. The devices share the components such that all have about the same number of operations.

Values move in *rounds*: before round k the devices exchange everything that has been computed in rounds before it and
that round k needs. A round has at most one reduction of each kind and dtype, one all-gather, and for components two
all-to-alls of each dtype.

So the results are those of the program on one device with the whole arrays, except that sums are added in another
order, whatever the program computes. How an array is cut is only a question of speed and memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from pycollective.jax_support import jax_internals, jaxprs
from pycollective.named_axes import discharge
from pycollective.parallel.axes import AxisName, Shape, Sliced, gather, names_of, typed, vary
from pycollective.parallel.buckets import gather_whole
from pycollective.parallel.cut_values import (
    CALLS,
    COLLECTIVES,
    ELEMENTWISE,
    IDENTITIES,
    REDUCTIONS,
    RESHAPES,
    is_reduction,
    keeps_order,
)

Array = Any


class RefusedError(Exception):
    """A program that cannot be computed in slices. The text completes the sentence "got one that"."""


@dataclasses.dataclass(eq=False)
class _Value:
    """A value of the program.

    Attributes:
        aval: its type in the program.
        kind: "same", "slice" or "whole".
        round: the round in which it is computed.
        uniform: whether it is a "same" value of which the devices have one element, a scalar, for all.
        cut: how a "slice" is cut.
        component: that of a "whole" value.
        foreign: whether it comes from an array, not a number, that the program has captured or is given from outside,
            and which may differ between devices.
        refused: why the value may not be used, or "".
    """

    aval: Any
    kind: str
    round: int = 0
    uniform: bool = False
    cut: Sliced | None = None
    component: _Component | None = None
    foreign: bool = False
    refused: str = ""
    others: dict[Any, _Value] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uniform |= self.kind == "same" and self.aval.ndim == 0


@dataclasses.dataclass(eq=False)
class _Component:
    """Equations that one device computes for whole arrays.

    Attributes:
        round: the round before whose other equations they are computed.
        equations: the equations, their operands and their results.
        slices: the operands that devices have as slices.
        results: for each result that is used elsewhere, the slice that it becomes.
    """

    round: int
    equations: list[tuple[JaxprEqn, list[_Value], list[_Value]]] = dataclasses.field(default_factory=list)
    slices: dict[_Value, None] = dataclasses.field(default_factory=dict)
    results: dict[_Value, _Value] = dataclasses.field(default_factory=dict)


Arrays = dict[_Value, Array]
_CASTS = ("pcast", "pvary")


class _Reduced(NamedTuple):
    part: _Value
    total: _Value
    op: str


class Program:
    """A program of whole arrays, to be computed by devices with slices.

    Args:
        axis_name: the axis whose devices have slices. It must be bound.
        devices: the number of devices.
    """

    def __init__(self, axis_name: AxisName, devices: int) -> None:
        self._axis_name, self._devices = axis_name, devices
        self._names = frozenset(names_of(axis_name))
        self._typed = typed(self._names)
        self._local: dict[int, list[Callable[[Arrays], None]]] = {}
        self._reductions: dict[int, list[_Reduced]] = {}
        self._gathers: dict[int, list[tuple[_Value, _Value]]] = {}
        self._components: dict[int, list[_Component]] = {}
        self._constants: Arrays = {}
        self.mixes = ""
        """What computes with several elements of an array: the name of an operation, or "" if nothing does."""

    # Values -------------------------------------------------------------------------------------------------------

    def same(self, aval: Any, *, foreign: bool = False, refused: str = "") -> _Value:
        """Returns an argument that all devices have. Numbers are taken for the same on all devices."""
        return _Value(aval, "same", foreign=foreign and aval.ndim > 0, refused=refused)

    def sliced(self, aval: Any, cut: Sliced) -> _Value:
        """Returns an argument of which each device has its slice."""
        return _Value(aval, "slice", cut=cut)

    def constant(self, x: Any) -> _Value:
        """Returns a constant of the program, or a value of the surrounding trace."""
        value = _Value(jax.typeof(x), "same", foreign=isinstance(x, jax.core.Tracer) and x.ndim > 0)
        if isinstance(x, jax.core.Tracer):
            varies = jax_internals.varying_axes(x) & self._names
            value.refused = "computes with a value that each device has of its own, by JAX's types" if varies else ""
        self._constants[value] = x
        return value

    def as_slice(self, value: _Value, cut: Sliced) -> _Value:
        """Returns the value as slices."""
        if value.kind == "slice" and value.cut == cut:
            return value
        if cut not in value.others:
            value.others[cut] = self._to_slice(value, cut)
        return value.others[cut]

    def _to_slice(self, value: _Value, cut: Sliced) -> _Value:
        if value.kind == "whole":
            assert value.component is not None
            if value not in value.component.results:
                made = _Value(value.aval, "slice", value.component.round, cut=cut)
                value.component.results[value] = made
                return made
            value = value.component.results[value]
        if value.kind == "slice":
            value = self.as_same(value)
        _refuse_foreign(value)
        made = _Value(value.aval, "slice", value.round, cut=cut)
        shape = cut.slice_shape(self._devices)

        def run(arrays: Arrays) -> None:
            x = arrays[value]
            own = jnp.broadcast_to(x, shape) if value.uniform else cut.own(x, self._axis_name, self._devices)
            arrays[made] = self._varying(own)

        self._add(value.round, run)
        return made

    def as_same(self, value: _Value) -> _Value:
        """Returns the value, such that each device has all of it."""
        if value.kind == "same":
            return value
        if "same" not in value.others:
            part = value if value.kind == "slice" else self.as_slice(value, Sliced(value.aval.shape))
            value.others["same"] = made = _Value(value.aval, "same", part.round + 1)
            self._gathers.setdefault(made.round, []).append((part, made))
        return value.others["same"]

    def _add(self, at: int, run: Callable[[Arrays], None]) -> None:
        self._local.setdefault(at, []).append(run)

    # Planning -----------------------------------------------------------------------------------------------------

    def read(self, closed: ClosedJaxpr, args: Sequence[_Value]) -> list[_Value]:
        """Plans a jaxpr for these arguments, and returns its results."""
        jaxpr = closed.jaxpr
        values: dict[Any, _Value] = dict(zip(jaxpr.constvars, map(self.constant, closed.consts), strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        def value_of(atom: Any) -> _Value:
            return self.constant(np.asarray(atom.val, atom.aval.dtype)) if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            values.update(zip(eqn.outvars, self._equation(eqn, list(map(value_of, eqn.invars))), strict=True))
        return list(map(value_of, jaxpr.outvars))

    def _equation(self, eqn: JaxprEqn, operands: list[_Value]) -> Sequence[_Value]:
        name = eqn.primitive.name
        for v in operands:
            if v.refused:
                raise RefusedError(v.refused)
        if name in _CASTS and self._names & discharge.names_in(eqn):
            return operands  # types are adapted when the equation's readers are computed
        same = all(v.kind == "same" for v in operands)
        if name in CALLS and not (same and name.startswith("custom")):
            inner = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
            return self.read(inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ()), operands)
        if same:
            return self._same(eqn, operands)
        if name == "cond" and operands[0].kind != "whole":
            return self._cond(eqn, operands)
        if name in IDENTITIES and name not in _CASTS:
            return operands
        elementwise = name in ELEMENTWISE or name in _CASTS or name in COLLECTIVES
        owners = {v.component for v in operands if v.component is not None}
        if any(v.kind == "slice" for v in operands) or (elementwise and len(owners) > 1):
            found = self._of_slices(eqn, operands, elementwise)
            if found is not None:
                return found
        return self._whole(eqn, operands)

    def _same(self, eqn: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        """Plans an equation that each device computes."""
        name = eqn.primitive.name
        if name in RESHAPES and operands[0].uniform:
            (var,) = eqn.outvars
            return [self._renamed(operands[0], var.aval)]
        uniform = name in ELEMENTWISE and all(v.uniform or v.aval.ndim == 0 for v in operands)
        at = max((v.round for v in operands), default=0)
        foreign = any(v.foreign for v in operands)
        made = [_Value(var.aval, "same", at, uniform, foreign=foreign) for var in eqn.outvars]

        def run(arrays: Arrays) -> None:
            given = [arrays[v] if uniform else _spread(v, arrays) for v in operands]
            arrays.update(zip(made, _bound(eqn, given), strict=True))

        self._add(at, run)
        return made

    def _renamed(self, value: _Value, aval: Any, cut: Sliced | None = None) -> _Value:
        """Returns a value with the same array on each device, and another type."""
        made = _Value(aval, value.kind, value.round, value.uniform, cut, foreign=value.foreign)

        def run(arrays: Arrays) -> None:
            arrays[made] = arrays[value]

        self._add(value.round, run)
        return made

    def _of_slices(self, eqn: JaxprEqn, operands: list[_Value], elementwise: bool) -> list[_Value] | None:
        """Plans an equation that devices compute with their slices; None if they cannot."""
        name, x = eqn.primitive.name, operands[0]
        if elementwise:
            return self._elementwise(eqn, operands)
        aval = eqn.outvars[0].aval
        if name in RESHAPES and keeps_order(eqn) and x.kind == "slice" and aval.size == x.aval.size:
            assert x.cut is not None
            kept = x.cut.kept
            if aval.shape[:kept] == x.aval.shape[:kept]:
                return [self._renamed(x, aval, Sliced(aval.shape, kept))]
        if is_reduction(eqn) and aval.size == 1 and x.kind == "slice":
            return [self._reduction(eqn, operands, eqn.primitive.name)]
        if name == "dot_general" and all(v.kind == "slice" for v in operands) and aval.ndim == 0:
            (left, right), _ = eqn.params["dimension_numbers"]
            if tuple(left) == tuple(right) and operands[0].cut == operands[1].cut:
                return [self._reduction(eqn, operands, "reduce_sum")]
        return None

    def _elementwise(self, eqn: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        shape = eqn.outvars[0].aval.shape
        cuts = [v.cut for v in operands if v.cut is not None and v.aval.shape == shape]
        cut = cuts[0] if cuts else Sliced(shape)
        # Scalars among the operands, such as the bounds of clamp, are for all elements, and so are dimensions of one.
        given = []
        for v in operands:
            v = self.as_same(v) if v.aval.shape != shape else v
            if v.aval.shape != shape and v.aval.ndim:
                v = self._broadcast(v, shape)
            _refuse_foreign(v)
            given.append(v if v.kind == "same" and v.uniform else self.as_slice(v, cut))
        at = max(v.round for v in given)
        made = [_Value(var.aval, "slice", at, cut=cut) for var in eqn.outvars]
        length = cut.slice_shape(self._devices)
        scalars = {"select_n": (0,), "clamp": (0, 2)}.get(eqn.primitive.name, ())

        def run(arrays: Arrays) -> None:
            def of_slice(i: int, v: _Value) -> Array:
                as_it_is = v.kind == "slice" or (i in scalars and v.aval.ndim == 0)
                return arrays[v] if as_it_is else jnp.broadcast_to(arrays[v], length)

            arrays.update(zip(made, _bound(eqn, [of_slice(i, v) for i, v in enumerate(given)]), strict=True))

        self._add(at, run)
        return made

    def _broadcast(self, value: _Value, shape: Shape) -> _Value:
        """Returns a "same" value, broadcast to a shape of as many dimensions."""
        made = _Value(
            jax.ShapeDtypeStruct(shape, value.aval.dtype), "same", value.round, value.uniform, foreign=value.foreign
        )

        def run(arrays: Arrays) -> None:
            arrays[made] = arrays[value] if value.uniform else jnp.broadcast_to(arrays[value], shape)

        self._add(value.round, run)
        return made

    def _reduction(self, eqn: JaxprEqn, operands: list[_Value], name: str) -> _Value:
        """Plans a reduction of slices to one number."""
        self.mixes = eqn.primitive.name
        at, aval = max(v.round for v in operands), eqn.outvars[0].aval
        part = _Value(aval, "same", at, True)
        total = _Value(aval, "same", at + 1, True)
        cut = operands[0].cut
        assert cut is not None

        def run(arrays: Arrays) -> None:
            neutral = _neutral(name, operands[0].aval.dtype)
            xs = [cut.without_padding(arrays[v], neutral, self._axis_name, self._devices) for v in operands]
            params = dict(eqn.params)
            if eqn.primitive.name == "dot_general":
                xs, params["dimension_numbers"] = [jnp.ravel(x) for x in xs], (((0,), (0,)), ((), ()))
            else:
                params["axes"] = tuple(range(xs[0].ndim))
            (arrays[part],) = _bound(eqn, xs, params)

        self._add(at, run)
        self._reductions.setdefault(at + 1, []).append(_Reduced(part, total, REDUCTIONS[name]))
        return total

    def _whole(self, eqn: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        """Plans an equation that one device computes."""
        for inner in (eqn, *(e for j in jaxprs.inner_jaxprs(eqn) for e in jaxprs.all_equations(j))):
            if discharge.names_in(inner) and inner.primitive.name not in _CASTS:
                raise RefusedError(f"computes lax.{inner.primitive.name} of a whole leaf, which devices have in slices")
        for x in (*operands, *eqn.outvars):
            if jax.dtypes.issubdtype(x.aval.dtype, jax.dtypes.extended) and getattr(x, "kind", "whole") != "same":
                raise RefusedError(f"computes a key by lax.{eqn.primitive.name} from a leaf, which is cut")
        for v in operands:
            _refuse_foreign(v)
        self.mixes = eqn.primitive.name
        owners = {v.component: None for v in operands if v.component is not None}
        component = next(iter(owners), None)
        if len(owners) != 1 or any(v.round >= component.round for v in operands if v.component is not component):  # type: ignore[union-attr]
            given = [self.as_slice(v, Sliced(v.aval.shape)) if v.kind == "whole" else v for v in operands]
            component = _Component(1 + max(v.round for v in given))
            self._components.setdefault(component.round, []).append(component)
            operands = given
        assert component is not None
        component.slices.update((v, None) for v in operands if v.kind == "slice")
        made = [_Value(var.aval, "whole", component.round, component=component) for var in eqn.outvars]
        component.equations.append((eqn, operands, made))
        return made

    def _cond(self, eqn: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        """Plans a choice between branches by a number that all devices have."""
        index = self.as_same(operands[0])
        _refuse_foreign(index)
        given = [self.as_slice(v, Sliced(v.aval.shape)) if v.kind == "whole" else v for v in operands[1:]]
        at = max(v.round for v in (index, *given))
        programs, results = [], []
        arguments = []
        for branch in eqn.params["branches"]:
            program = Program(self._axis_name, self._devices)
            copies = [dataclasses.replace(v, round=0, others={}) for v in given]
            results.append(program.read(branch, copies))
            self.mixes = self.mixes or program.mixes
            programs.append(program)
            arguments.append(copies)
        made = []
        for var, of_branches in zip(eqn.outvars, zip(*results, strict=True), strict=True):
            if all(v.kind == "same" for v in of_branches):
                foreign = any(v.foreign for v in of_branches)
                made.append(_Value(var.aval, "same", at, foreign=foreign))
            else:
                cut = next((v.cut for v in of_branches if v.cut is not None), Sliced(var.aval.shape))
                made.append(_Value(var.aval, "slice", at, cut=cut))
        types = [jax_internals.varying_axes_of(v.aval) | (self._typed if v.kind == "slice" else set()) for v in made]
        branches = []
        for program, values, copies in zip(programs, results, arguments, strict=True):
            outputs = [
                program.as_slice(v, m.cut) if m.cut is not None else program.as_same(v)
                for v, m in zip(values, made, strict=True)
            ]

            def run_branch(*xs: Array, program: Program = program, copies: Any = copies, outputs: Any = outputs) -> Any:
                found = program.run(dict(zip(copies, xs, strict=True)), outputs)
                return [vary(x, names) for x, names in zip(found, types, strict=True)]

            branches.append(run_branch)

        def run(arrays: Arrays) -> None:
            found = lax.switch(arrays[index], branches, *(arrays[v] for v in given))
            arrays.update(zip(made, found, strict=True))

        self._add(at, run)
        return made

    # Computation --------------------------------------------------------------------------------------------------

    def run(self, arguments: Arrays, results: Sequence[_Value]) -> list[Array]:
        """Computes the program.

        Args:
            arguments: the arrays of this device: slices, or whole arrays that all devices have.
            results: what to return, "same" or "slice".
        """
        arrays: Arrays = self._constants | arguments
        planned = (self._local, self._reductions, self._gathers, self._components)
        for at in sorted(set().union(*planned)):
            self._exchange_components(self._components.get(at, []), arrays)
            self._reduce(self._reductions.get(at, []), arrays)
            self._gather(self._gathers.get(at, []), arrays)
            for run in self._local.get(at, []):
                run(arrays)
        return [_spread(v, arrays) if v.kind == "same" else arrays[v] for v in results]

    def _varying(self, x: Array) -> Array:
        return vary(x, self._typed)

    def _reduce(self, reductions: Sequence[_Reduced], arrays: Arrays) -> None:
        """Completes the devices' sums, maxima and minima, by one call for each kind and dtype.

        Maxima and minima of floating-point numbers are gathered: an all-reduce of XLA on CPUs may lose a NaN.
        """
        collectives = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
        of_rows = {"max": jnp.max, "min": jnp.min}
        groups: dict[Any, list[_Reduced]] = {}
        for r in reductions:
            groups.setdefault((r.op, r.part.aval.dtype, jax_internals.varying_axes(arrays[r.part])), []).append(r)
        for (op, dtype, _), group in groups.items():
            row = jnp.stack([self._varying(arrays[r.part]) for r in group])
            if op in of_rows and jnp.issubdtype(dtype, jnp.inexact):
                total = of_rows[op](gather(row, self._axis_name), axis=0)
            else:
                of_numbers = row.astype(jnp.int32) if dtype.kind == "b" else row
                total = collectives[op](of_numbers, self._axis_name).astype(dtype)
            arrays.update((r.total, total[i]) for i, r in enumerate(group))

    def _gather(self, gathers: Sequence[tuple[_Value, _Value]], arrays: Arrays) -> None:
        parts = [self._varying(arrays[part]) for part, _ in gathers]
        cuts = [part.cut for part, _ in gathers]
        wholes = gather_whole(parts, cuts, self._axis_name)  # type: ignore[arg-type]
        arrays.update((made, x) for (_, made), x in zip(gathers, wholes, strict=True))

    def _exchange_components(self, components: Sequence[_Component], arrays: Arrays) -> None:
        """Sends slices to the owners of components, which compute them, and the slices of the results back."""
        components = [c for c in components if c.results or any(eqn.effects for eqn, *_ in c.equations)]
        if not components:
            return
        owned = _shared([sum(_operations(eqn) for eqn, *_ in c.equations) for c in components], self._devices)
        of_owner = [[components[i] for i in places] for places in owned]
        sent = [[(v, v.cut) for c in mine for v in c.slices] for mine in of_owner]
        made = [[(v, made.cut) for c in mine for v, made in c.results.items()] for mine in of_owner]
        packing_of_sent, packing = _Packing(sent, self._devices), _Packing(made, self._devices)
        rows = packing_of_sent.own_slices(arrays)
        received = {key: lax.all_to_all(self._varying(x), self._axis_name, 0, 0) for key, x in rows.items()}

        def branch(device: int, received: dict[Any, Array]) -> dict[Any, Array]:
            whole = packing_of_sent.arrays(device, received)
            mine: Arrays = {}
            for component in of_owner[device]:
                mine.update((v, self._varying(whole[v])) for v in component.slices)
                for eqn, operands, results in component.equations:
                    given = [mine[v] if v in mine else self._varying(_spread(v, arrays)) for v in operands]
                    mine.update(zip(results, self._recomputed(eqn, given), strict=True))
            return {key: self._varying(x) for key, x in packing.rows(device, mine).items()}

        branches = [functools.partial(branch, device) for device in range(self._devices)]
        index = lax.axis_index(self._axis_name)
        back = lax.switch(index, branches, received) if self._devices > 1 else branches[0](received)
        for key, x in back.items():
            back[key] = lax.all_to_all(x, self._axis_name, 0, 0)
        for device in range(self._devices):
            for v, x in packing.slices(device, back).items():
                arrays[v.component.results[v]] = x  # type: ignore[union-attr]

    def _recomputed(self, eqn: JaxprEqn, operands: Sequence[Array]) -> Sequence[Array]:
        """Computes an equation on its owner. By JAX's types, all values vary along the axis there."""
        if not self._typed:
            return _bound(eqn, operands)
        name, params = eqn.primitive.name, eqn.params

        def all_of(closed: ClosedJaxpr) -> Callable[..., list[Array]]:
            def function(*xs: Array) -> list[Array]:
                return [self._varying(x) for x in jaxprs.evaluate(closed, self._recomputed, *xs)]

            return function

        operands = [self._varying(x) for x in operands]
        if name == "scan":
            consts, carries = jax_internals.counts_of_scan(eqn)
            body = all_of(params["jaxpr"])

            def step(carry: Any, row: Any) -> Any:
                found = body(*operands[:consts], *carry, *row)
                return found[:carries], found[carries:]

            start, stacks = list(operands[consts : consts + carries]), list(operands[consts + carries :])
            last, rows = lax.scan(step, start, stacks, length=params["length"], reverse=params["reverse"])
            return [*last, *rows]
        if name == "while":
            of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
            test, body = all_of(params["cond_jaxpr"]), all_of(params["body_jaxpr"])
            fixed, start = operands[of_test : of_test + of_body], list(operands[of_test + of_body :])
            return lax.while_loop(
                lambda carry: test(*operands[:of_test], *carry)[0], lambda carry: body(*fixed, *carry), start
            )
        if name == "cond":
            return lax.switch(operands[0], [all_of(branch) for branch in params["branches"]], *operands[1:])
        if name in CALLS:
            inner = params.get("call_jaxpr", params.get("jaxpr"))
            return all_of(inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ()))(*operands)
        return _bound(eqn, operands)


class _Packing:
    """Arrays of the owners of components, joined to one array of each dtype.

    Args:
        of_owner: for each owner, its values and how they are cut.
        devices: the number of devices.
    """

    def __init__(self, of_owner: Sequence[Sequence[tuple[_Value, Any]]], devices: int) -> None:
        self._of_owner, self._devices = of_owner, devices
        self._lengths: dict[Any, int] = {}
        for values in of_owner:
            ends: dict[Any, int] = {}
            for v, cut in values:
                ends[v.aval.dtype] = ends.get(v.aval.dtype, 0) + math.prod(cut.slice_shape(devices))
            for dtype, end in ends.items():
                self._lengths[dtype] = max(self._lengths.get(dtype, 0), end)

    def _joined(self, parts: dict[Any, list[Array]], rows: int) -> dict[Any, Array]:
        joined = {}
        for dtype, length in self._lengths.items():
            own = parts.get(dtype, [])
            filled = sum(x.shape[1] for x in own)
            joined[dtype] = jnp.concatenate([*own, jnp.zeros((rows, length - filled), dtype)], axis=1)
        return joined

    def own_slices(self, arrays: Arrays) -> dict[Any, Array]:
        """Returns this device's slices for each owner, of shape (devices, length)."""
        rows: dict[Any, list[Array]] = {dtype: [] for dtype in self._lengths}
        for values in self._of_owner:
            parts: dict[Any, list[Array]] = {}
            for v, _ in values:
                parts.setdefault(v.aval.dtype, []).append(arrays[v].reshape(1, -1))
            for dtype, row in self._joined(parts, 1).items():
                rows[dtype].append(row)
        return {dtype: jnp.concatenate(parts) for dtype, parts in rows.items()}

    def rows(self, owner: int, arrays: Arrays) -> dict[Any, Array]:
        """Returns the owner's whole arrays as slices for each device, of shape (devices, length)."""
        parts: dict[Any, list[Array]] = {}
        for v, cut in self._of_owner[owner]:
            parts.setdefault(v.aval.dtype, []).append(cut.rows(arrays[v], self._devices).reshape(self._devices, -1))
        return self._joined(parts, self._devices)

    def _parts(self, owner: int, rows: dict[Any, Array]) -> list[tuple[_Value, Any, Array]]:
        at: dict[Any, int] = {}
        parts = []
        for v, cut in self._of_owner[owner]:
            dtype, length = v.aval.dtype, math.prod(cut.slice_shape(self._devices))
            first = at.get(dtype, 0)
            parts.append((v, cut, rows[dtype][:, first : first + length]))
            at[dtype] = first + length
        return parts

    def arrays(self, owner: int, rows: dict[Any, Array]) -> Arrays:
        """Returns the owner's whole arrays, from the slices of all devices."""
        shape = self._devices
        return {v: cut.whole(x.reshape(shape, *cut.slice_shape(shape))) for v, cut, x in self._parts(owner, rows)}

    def slices(self, owner: int, rows: dict[Any, Array]) -> Arrays:
        """Returns this device's slices of an owner's arrays, from the rows that all owners have sent."""
        return {v: x[owner].reshape(cut.slice_shape(self._devices)) for v, cut, x in self._parts(owner, rows)}


def _bound(eqn: JaxprEqn, operands: Sequence[Array], params: dict[str, Any] | None = None) -> Sequence[Array]:
    """Binds the primitive of an equation, at the line of the equation, to operands whose types are made alike."""
    if eqn.primitive.name in _CASTS and eqn.params.get("to", "varying") == "varying":
        return [vary(operands[0], discharge.names_in(eqn))]
    names = frozenset[Hashable]().union(*map(jax_internals.varying_axes, operands))
    if names and not jaxprs.inner_jaxprs(eqn) and not discharge.names_in(eqn):
        operands = [vary(x, names) for x in operands]
    with jaxprs.at_line_of(eqn, jax.sharding.get_abstract_mesh()):
        return jaxprs.bind(eqn, operands, eqn.params if params is None else params)


def _spread(value: _Value, arrays: Arrays) -> Array:
    """Returns a "same" value with all its elements."""
    x = arrays[value]
    return jnp.broadcast_to(x, value.aval.shape) if value.uniform and value.aval.ndim else x


def _refuse_foreign(value: _Value) -> None:
    if value.foreign:
        raise RefusedError(
            "computes with an array from outside of the parameters and the state, which may differ between devices"
        )


def names_axis(closed: ClosedJaxpr, axis_name: AxisName) -> bool:
    """Returns whether a program computes a collective over the axis, or the index along it."""
    names = frozenset(names_of(axis_name))
    equations = jaxprs.all_equations(closed.jaxpr)
    return any(discharge.names_in(eqn) & names and eqn.primitive.name not in _CASTS for eqn in equations)


def _neutral(name: str, dtype: Any) -> Any:
    """Returns what does not change a reduction."""
    least = name in ("reduce_min", "reduce_and")
    if dtype.kind == "b" or name == "reduce_sum":
        return least
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.inf if least else -jnp.inf
    limits = jnp.iinfo(dtype)
    return limits.max if least else limits.min


def _operations(eqn: JaxprEqn) -> float:
    """Returns about how many arithmetic operations an equation has."""
    inner = jaxprs.inner_jaxprs(eqn)
    if inner:
        return eqn.params.get("length", 1) * sum(_operations(e) for jaxpr in inner for e in jaxpr.eqns)
    size = sum(var.aval.size for var in eqn.outvars)
    if eqn.primitive.name == "dot_general":
        (left, _), _ = eqn.params["dimension_numbers"]
        return 2 * size * math.prod(eqn.invars[0].aval.shape[i] for i in left)
    return max(size, *(v.aval.size for v in eqn.invars), 1)


def _shared(costs: Sequence[float], devices: int) -> list[list[int]]:
    """Shares items among devices, the most expensive first, each to the device with the least work so far."""
    work = [0.0] * devices
    owned: list[list[int]] = [[] for _ in work]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        device = work.index(min(work))
        owned[device].append(i)
        work[device] += costs[i]
    return owned
