"""Finds optimizers of optax that take the norm of one device's part of a gradient for the norm of the whole.

The functions of this package that use a part of a parameter *mark* it. A mark does not change the value. The tangent
and the cotangent of the value pass through an equation that names the axis, and the dimensions along one of which the
parameter is cut. So the program of one device shows which of its values are gradients of parts. Before the program is
lowered, this file follows these values through it. A value is a

    Part    if it is computed element by element from a marked value
    Term    if it is computed from a reduction of a part over the cut dimensions, and no collective over the axis
            completes the reduction

If a function of optax computes with a term and a part, its result differs from that of one device with the whole
arrays, and the program is refused. A value that is not known to be a part or a term counts as neither. Terms in the
user's own functions are allowed: for example, each device may round its part with a scale of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, Literal, Primitive
from jax.interpreters import ad, batching, mlir

from pycollective.errors import message
from pycollective.jax_support import frames, jax_internals
from pycollective.jax_support.jaxprs import all_equations, inner_jaxprs
from pycollective.named_axes import discharge
from pycollective.named_axes.mesh import Mesh
from pycollective.parallel.axes import AxisName, names_of
from pycollective.parallel.cut_values import CALLS, COLLECTIVES, ELEMENTWISE, IDENTITIES, REDUCTIONS

Array = Any
Axes = frozenset[Hashable]

# The mark -------------------------------------------------------------------------------------------------------

marked_p = Primitive("marked_part")
marked_p.def_impl(lambda x, **_: x)
marked_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(marked_p, lambda _, x, **__: [x])
ad.deflinear2(marked_p, lambda ct, _, **params: [marked_p.bind(ct, **params)])


def _batch(args: Sequence[Array], dims: Sequence[int], *, cut: tuple[int, ...], **params: Any) -> tuple[Array, int]:
    (x,), (dim,) = args, dims
    return marked_p.bind(x, cut=tuple(i + (i >= dim) for i in cut), **params), dim


batching.primitive_batchers[marked_p] = _batch


def mark(x: Array, axis_name: AxisName, cut: Iterable[int], wrapper: str) -> Array:
    """Returns ``x``, a part of a parameter, whose tangents and cotangents are marked.

    Only the derivative has an additional equation. A loop or :func:`jax.checkpoint` saves ``x`` itself as residual.

    Args:
        x: this device's part.
        axis_name: the name of the axis along which the parameter is cut, or a tuple of names.
        cut: the dimensions that may be cut. The parameter is cut along one of them.
        wrapper: the wrapper that messages recommend for an optimizer of such parts.
    """
    return _marking(names_of(axis_name), tuple(cut), wrapper)(x)


@functools.lru_cache(maxsize=256)
def _marking(names: tuple[Hashable, ...], cut: tuple[int, ...], wrapper: str) -> Any:
    @jax.custom_jvp
    def part(x: Array) -> Array:
        return x

    @part.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        return primals[0], marked_p.bind(tangents[0], names=names, cut=cut, wrapper=wrapper)

    return part


# The check ------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A value that is computed element by element from a marked value.

    Attributes:
        names: the axes along which the parameter is cut.
        cut: the dimensions that may be cut.
        wrapper: that of :func:`mark`.
    """

    names: Axes
    cut: frozenset[int]
    wrapper: str

    def with_dimensions_at(self, places: Sequence[int | None]) -> Part | None:
        """Returns the part after its dimension i has moved to ``places[i]``; None if no cut dimension is left."""
        cut = frozenset(place for i in self.cut if (place := places[i]) is not None)
        return self._replace(cut=cut) if cut else None


class Term(NamedTuple):
    """A value that is computed from a reduction of a part, over the elements of one device alone.

    Attributes:
        names: the axes over which the reduction is not completed.
    """

    names: Axes


Value = Part | Term | None


def refuse_norms_of_parts(body: Any, mesh: Mesh) -> None:
    """Raises ValueError if a function of optax computes with the norm of one device's parts.

    Args:
        body: the program of one device.
        mesh: the mesh whose axes the program names.
    """
    if _has_marks(body):
        cut = frozenset(axis.name for axis in mesh.axes if axis.size > 1)
        _Interpreter(cut, mesh).run(body, [None] * len(body.invars), None)


discharge.CHECKS.append(refuse_norms_of_parts)


def _has_marks(jaxpr: Any) -> bool:
    return any(eqn.primitive is marked_p for eqn in all_equations(jaxpr))


class _Interpreter:
    def __init__(self, names: Axes, mesh: Mesh) -> None:
        self._names = names
        self._mesh = mesh

    def run(self, jaxpr: Any, args: Sequence[Value], caller: frames.Frame | None) -> list[Value]:
        """Returns the kinds of the results. ``caller``: the line of the user or of a library that calls the program."""
        values: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Value:
            return None if isinstance(atom, Literal) else values.get(atom)

        for eqn in jaxpr.eqns:
            operands = list(map(read, eqn.invars))
            if any(operands) or eqn.primitive is marked_p or any(map(_has_marks, inner_jaxprs(eqn))):
                place = frames.called_from(eqn) or caller
                values.update(zip(eqn.outvars, self._equation(eqn, operands, place), strict=True))
        return list(map(read, jaxpr.outvars))

    def _equation(self, eqn: JaxprEqn, operands: list[Value], place: frames.Frame | None) -> Sequence[Value]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if eqn.primitive is marked_p:
            params = eqn.params
            names = self._names.intersection(params["names"])
            return [Part(names, frozenset(params["cut"]), params["wrapper"]) if names else operands[0]]
        if name in IDENTITIES and len(operands) == count:
            return operands
        if discharge.names_in(eqn):
            return [self._collective(eqn, x) for x in operands] if name in COLLECTIVES else [None] * count
        if name in CALLS or name in ("custom_jvp_call", "custom_vjp_call"):
            (inner,) = inner_jaxprs(eqn)
            return self.run(inner, operands, place)
        if name == "cond":
            self._refuse_term_with_part(operands, place)
            return _joined(*(self.run(branch.jaxpr, operands[1:], place) for branch in eqn.params["branches"]))
        if name == "scan":
            return self._scan(eqn, operands, place)
        if name == "while":
            first = eqn.params["cond_nconsts"]
            return self._loop(eqn.params["body_jaxpr"].jaxpr, operands[first:], eqn.params["body_nconsts"], place)
        return [self._result(eqn, operands, place)] * count

    def _result(self, eqn: JaxprEqn, operands: list[Value], place: frames.Frame | None) -> Value:
        """Returns the kind of the result of an equation without inner programs that is no collective."""
        name, x = eqn.primitive.name, operands[0]
        if name in ELEMENTWISE:
            self._refuse_term_with_part(operands, place)
            return functools.reduce(_meet, operands)
        if name == "dot_general":
            self._refuse_term_with_part(operands, place)
            contracted = eqn.params["dimension_numbers"][0]
            sums = [
                Term(v.names)
                for v, dims in zip(operands, contracted, strict=True)
                if isinstance(v, Part) and _covers(v, dims)
            ]
            return functools.reduce(_meet, [*sums, *(v for v in operands if isinstance(v, Term))], None)
        if name == "concatenate":
            return functools.reduce(_meet, operands)
        if name in REDUCTIONS:
            if isinstance(x, Part):
                axes = eqn.params["axes"]
                return Term(x.names) if _covers(x, axes) else x.with_dimensions_at(_places_without(eqn, axes, x))
            return x
        if isinstance(x, Term):
            layouts = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "integer_pow")
            return x if name in layouts else None
        if isinstance(x, Part):
            return self._moved(eqn, x)
        return None

    def _moved(self, eqn: JaxprEqn, x: Part) -> Value:
        """Returns the kind of an equation that moves the elements of a part."""
        params, before, after = eqn.params, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        match eqn.primitive.name:
            case "transpose":
                return x.with_dimensions_at([params["permutation"].index(i) for i in range(len(before))])
            case "broadcast_in_dim":
                return x.with_dimensions_at(params["broadcast_dimensions"])
            case "squeeze":
                return x.with_dimensions_at(_places_without(eqn, params["dimensions"], x))
            case "reshape" if before == after:
                return x
            case "reshape":
                return x._replace(
                    cut=frozenset(i for i, n in enumerate(after) if n > 1) or frozenset(range(len(after)))
                )
        return None

    def _collective(self, eqn: JaxprEqn, x: Value) -> Value:
        """Returns the kind of a sum, maximum or minimum over named axes."""
        if x is None:
            return None
        left = x.names.difference(discharge.names_in(eqn))
        return x if left == x.names else Term(left) if left and isinstance(x, Term) else None

    def _scan(self, eqn: JaxprEqn, operands: list[Value], place: frames.Frame | None) -> list[Value]:
        consts, carries = jax_internals.counts_of_scan(eqn)
        rows = [
            x.with_dimensions_at([i - 1 if i else None for i in range(var.aval.ndim)]) if isinstance(x, Part) else x
            for x, var in zip(operands[consts + carries :], eqn.invars[consts + carries :], strict=True)
        ]
        args = [*operands[: consts + carries], *rows]
        results = self._loop(eqn.params["jaxpr"].jaxpr, args, consts, place, carries)
        stacks = [
            x._replace(cut=frozenset(i + 1 for i in x.cut)) if isinstance(x, Part) else x for x in results[carries:]
        ]
        return [*results[:carries], *stacks]

    def _loop(
        self,
        body: Any,
        args: Sequence[Value],
        consts: int,
        place: frames.Frame | None,
        carries: int | None = None,
    ) -> list[Value]:
        """Returns the kinds of the results of a loop's last step.

        The body is interpreted until the kinds of the carry do not change any more.
        """
        last = len(args) if carries is None else consts + carries
        carry = list(args[consts:last])
        while True:
            results = self.run(body, [*args[:consts], *carry, *args[last:]], place)
            met = _joined(carry, results[: len(carry)])
            if met == carry:
                return [*carry, *results[len(carry) :]]
            carry = met

    def _refuse_term_with_part(self, operands: Sequence[Value], place: frames.Frame | None) -> None:
        """Raises ValueError if a function of optax computes with a term and a part of the same axis."""
        library = place is not None and frames.is_in_package(place, "optax")
        for part in [x for x in operands if isinstance(x, Part)] if library else ():
            for term in [x for x in operands if isinstance(x, Term) and x.names & part.names]:
                assert place is not None
                along = ", ".join(repr(name) for name in sorted(map(str, term.names & part.names)))
                expected = "an optimizer that updates each element by itself, or norms over the axis"
                got = (
                    f"optax's {place.function.split('.')[0]} ({place.file}:{place.line}), which computes with a norm, "
                    f"or another reduction, of this device's part alone of a parameter that is cut along {along}"
                )
                remedy = (
                    f"Wrap the optimizer in parallel.{part.wrapper}, and clip by parallel.clip_by_global_norm and skip "
                    "by parallel.apply_if_finite, which look at all devices' parts."
                )
                comm = self._mesh.comm
                raise ValueError(message("parallel", expected, got, remedy, rank=comm.rank, size=comm.size))


def _covers(part: Part, dims: Iterable[int]) -> bool:
    """Whether these dimensions include all dimensions along which the part may be cut."""
    return part.cut.issubset(dims)


def _places_without(eqn: JaxprEqn, dims: Sequence[int], x: Part) -> list[int | None]:
    """Returns for each dimension its number after ``dims`` are removed, None for a removed one.

    If one of ``dims`` may be cut, all are None.
    """
    ndim = eqn.invars[0].aval.ndim
    if x.cut.intersection(dims):
        return [None] * ndim
    kept = [i for i in range(ndim) if i not in dims]
    return [kept.index(i) if i in kept else None for i in range(ndim)]


def _meet(a: Value, b: Value) -> Value:
    """Returns the kind of a value that is one of two values, or is computed element by element from both."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, Part):
        return a if not isinstance(b, Part) or a.names != b.names else a._replace(cut=a.cut | b.cut)
    return b if isinstance(b, Part) else Term(a.names | b.names)


def _joined(first: Sequence[Value], *others: Sequence[Value]) -> list[Value]:
    return [functools.reduce(_meet, values) for values in zip(first, *others, strict=True)]
