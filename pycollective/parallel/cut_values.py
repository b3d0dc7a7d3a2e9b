"""Abstract interpretation of a jaxpr whose arrays are cut among devices: which results agree with one device's.

The reference is one device that computes the same program with the whole arrays. Each value has one of four kinds, for
all numbers that the program's arguments may have:

    Same      replicated: all devices have the reference value
    Cut       sharded: each device has its elements of the reference value, and each element is computed from the
              elements at the same place of other cut arrays
    Term      partial: a sum, maximum or minimum over a device's own elements. A collective makes it Same.
    Mixed     none of these: the devices' values need not agree with the reference value

An operation that this file does not know gives Mixed, unless all its operands are Same. Each value also has an
*expression*, a number for the formula that computes it. Values with equal expressions are equal. Shapes are not part of
an expression, so the program for whole arrays can be compared with the program for parts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from pycollective.jax_support import jax_internals
from pycollective.parallel.axes import names_of

Axes = frozenset[Hashable]
Shape = tuple[int, ...]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _words(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj "
    "convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag "
    "integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma "
    "population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta"
)
"""Operations that compute element i of the result from element i of each array operand, and from scalars."""

IDENTITIES = _words("device_put name optimization_barrier pcast pvary sharding_constraint stop_gradient")
"""Operations that return their operands with the same values and shapes."""

RESHAPES = _words("broadcast_in_dim reshape squeeze")
"""Operations that keep the order of the elements if the result has as many elements as the operand.

See :func:`keeps_order` for the exception.
"""

REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "min",
    "reduce_or": "max",
}
COLLECTIVES = {"psum": "sum", "psum_invariant": "sum", "pmax": "max", "pmin": "min"}
CALLS = _words("call checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit pjit remat remat2")

_KEEP_ZEROS = _words(
    "abs add add_any and conj convert_element_type copy imag integer_pow max min neg or real reduce_precision round "
    "select_n sign sqrt square sub tanh"
)
"""Operations whose result is zero if all operands are zero."""

_LINEAR = _words("convert_element_type copy imag neg real reduce_precision")

Pad = str | None
"""The values in the padding at the end of the last slice of a :class:`Cut` value.

"zero": zeros. "least": zeros, and no element of the value is less. "true": True. None: not known.
"""


@dataclasses.dataclass(frozen=True)
class Same:
    """A replicated value (see the top of the file).

    Attributes:
        expression: the number of its expression.
        uniform: whether all its elements are equal.
    """

    expression: int
    uniform: bool


@dataclasses.dataclass(frozen=True)
class Cut:
    """A sharded value (see the top of the file).

    Attributes:
        expression: the number of its expression.
        place: how it is cut. Two arrays with equal places have corresponding elements on the same device.
        names: the mesh axes along which it is cut.
        pad: what is known about the padding of the last slice.
    """

    expression: int
    place: Hashable
    names: Axes
    pad: Pad


@dataclasses.dataclass(frozen=True)
class Term:
    """A partial reduction (see the top of the file).

    Attributes:
        expression: the number of its expression.
        op: "sum", "max" or "min".
        names: the mesh axes over which collectives still have to reduce it.
    """

    expression: int
    op: str
    names: Axes


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A value that need not agree with one device's (see the top of the file).

    Attributes:
        why: the reason, the end of a sentence that begins with "it".
        branches: whether the reason is a condition on which the devices may differ.
    """

    why: str
    branches: bool = False


Value = Same | Cut | Term | Mixed


class Layout(NamedTuple):
    """How arrays are cut.

    Attributes:
        flat: whether an array is cut as the vector of its elements in order. Then a reshape does not move elements
            between devices.
        padded: whether the last part may end with padding.
        names: all mesh axes along which an array is cut.
    """

    flat: bool
    padded: bool
    names: Axes

    def place(self, shape: Shape, axes: Hashable) -> Hashable:
        """Returns the :attr:`Cut.place` of an array of this shape, whose dimensions are cut along ``axes``."""
        return math.prod(shape) if self.flat else (shape, axes)


class Expressions:
    """Assigns numbers to expressions. Equal expressions have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def __call__(self, *expression: Any) -> int:
        return self._numbers.setdefault(expression, len(self._numbers))


def meet_pads(a: Pad, b: Pad) -> Pad:
    """Returns what is known about the padding of a value that is one of two values."""
    return a if a == b else "zero" if {a, b} == {"zero", "least"} else None


def meet(values: Sequence[Value]) -> Value:
    """Returns the kind of a value that is one of these values, with the expression of the first one."""
    for value in values:
        if isinstance(value, Mixed):
            return value
    sames = [v for v in values if isinstance(v, Same)]
    if len(sames) == len(values):
        return Same(sames[0].expression, all(v.uniform for v in sames))
    cuts = [v for v in values if isinstance(v, Cut)]
    others = [v for v in values if not isinstance(v, Cut)]
    if cuts and all(isinstance(v, Same) and v.uniform for v in others):
        if len({(v.place, v.names) for v in cuts}) == 1:
            pad = functools.reduce(meet_pads, [v.pad for v in cuts] + [None for _ in others])
            return dataclasses.replace(cuts[0], expression=values[0].expression, pad=pad)  # type: ignore[union-attr]
    elif all(isinstance(v, Term) for v in values) and len({(v.op, v.names) for v in values}) == 1:  # type: ignore[union-attr]
        return values[0]
    return Mixed("chooses between values that are cut in different ways")


class Interpreter:
    """Interprets jaxprs.

    Args:
        layout: how arrays are cut.
        expressions: the numbers of expressions. Programs that are compared need the same object.
    """

    def __init__(self, layout: Layout, expressions: Expressions) -> None:
        self._layout = layout
        self._expression = expressions
        self._zero = expressions("zero")
        self._depth = 0

    def is_zero(self, value: Same) -> bool:
        """Returns whether a value is the constant zero."""
        return value.expression == self._zero

    def run(self, closed: ClosedJaxpr, args: Sequence[Value]) -> list[Value]:
        """Returns the kinds of the results of a jaxpr."""
        jaxpr = closed.jaxpr
        values: dict[Any, Value] = dict(zip(jaxpr.constvars, map(self.constant, closed.consts), strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Value:
            return self.constant(atom.val) if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            values.update(zip(eqn.outvars, self._equation(eqn, list(map(read, eqn.invars))), strict=True))
        return list(map(read, jaxpr.outvars))

    def constant(self, x: Any) -> Value:
        """Returns the kind of a constant of the program."""
        if isinstance(x, jax.core.Tracer):  # a value of the surrounding trace
            if self._layout.names & jax_internals.varying_axes(x):
                return Mixed("computes with a value that each device has of its own, by JAX's types")
            return Same(self._expression("outside", id(x)), x.ndim == 0)
        if jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended):
            return Same(self._expression("constant", id(x)), x.ndim == 0)
        array = np.asarray(x)
        if array.size and (array == array.flat[0]).all():
            number = array.flat[0].item()
            if number == 0:
                return Same(self._zero, True)
            return Same(self._expression("literal", array.dtype.name, repr(number)), True)
        return Same(self._expression("constant", array.dtype.name, array.shape, array.tobytes()), array.ndim == 0)

    def _equation(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        name = eqn.primitive.name
        if name in CALLS:
            return self._call(eqn, operands)
        if name == "cond":
            return self._cond(eqn.params["branches"], *operands)
        if name == "while":
            return self._while(eqn, operands)
        if name == "scan":
            return self._scan(eqn, operands)
        if name in IDENTITIES and len(operands) == len(eqn.outvars):
            return operands
        value = self._value(eqn, operands)
        if isinstance(value, Same) and len(eqn.outvars) > 1:
            return [
                Same(self._expression("result", value.expression, i), var.aval.ndim == 0)
                for i, var in enumerate(eqn.outvars)
            ]
        return [value] * len(eqn.outvars)

    def _value(self, eqn: JaxprEqn, operands: list[Value]) -> Value:
        """Returns the kind of the result of an equation without inner programs."""
        name = eqn.primitive.name
        for operand in operands:
            if isinstance(operand, Mixed):
                return operand
        if name == "axis_index" and self._layout.names.intersection(names_of(eqn.params["axis_name"])):
            return Mixed("computes with lax.axis_index, so a device's result depends on its place")
        if all(isinstance(v, Same) for v in operands):
            return self._same(eqn, operands)  # type: ignore[arg-type]
        if name in COLLECTIVES:
            return self._collective(eqn, operands[0])
        if any(isinstance(v, Term) for v in operands):
            return self._terms(eqn, operands)
        if is_reduction(eqn):
            return self._reduction(eqn, operands[0])
        if name in RESHAPES:
            return self._reshape(eqn, operands[0])
        if name in ELEMENTWISE:
            return self._elementwise(eqn, operands)
        return Mixed(f"computes lax.{name} of a leaf's elements, which are on several devices")

    def _expression_of(self, eqn: JaxprEqn, operands: Iterable[Any], leave: Iterable[str] = ()) -> int:
        """Returns the expression of an equation: its primitive, parameters and operands.

        The parameters in ``leave`` and the shape of the result are not part of the expression.
        """
        ignored = {"sharding", "out_sharding", "weak_type", *leave}
        static = tuple((key, str(eqn.params[key])) for key in sorted(eqn.params) if key not in ignored)
        return self._expression(eqn.primitive.name, static, *(v.expression for v in operands))

    def _same(self, eqn: JaxprEqn, operands: Sequence[Same]) -> Value:
        uniform = all(v.uniform for v in operands)
        name = eqn.primitive.name
        if name in RESHAPES and uniform:
            return Same(operands[0].expression, True)
        if name in _KEEP_ZEROS and name not in ("integer_pow", "select_n") and all(map(self.is_zero, operands)):
            return Same(operands[0].expression, uniform)
        return Same(
            self._expression_of(eqn, operands), eqn.outvars[0].aval.ndim == 0 or (name in ELEMENTWISE and uniform)
        )

    def _elementwise(self, eqn: JaxprEqn, operands: list[Value]) -> Value:
        cuts = [v for v in operands if isinstance(v, Cut)]
        if any(isinstance(v, Same) and not v.uniform for v in operands):
            return Mixed("computes with an array that is not cut, beside elements that are")
        if len({(v.place, v.names) for v in cuts}) > 1:
            return Mixed("computes with elements of leaves that are cut in different ways")
        expression = self._expression_of(eqn, operands)
        return dataclasses.replace(cuts[0], expression=expression, pad=self._pad(eqn, operands))

    def _pad(self, eqn: JaxprEqn, operands: list[Value]) -> Pad:
        name = eqn.primitive.name
        pads = [
            v.pad if isinstance(v, Cut) else "least" if v.expression == self._zero else None  # type: ignore[union-attr]
            for v in operands
        ]
        zeros = [pad in ("least", "zero") for pad in pads]
        if name == "select_n":
            zeros, pads = zeros[1:], pads[1:]
        if name == "integer_pow" and eqn.params["y"] <= 0:
            return None
        if name == "is_finite" and all(zeros):
            return "true"
        if name in ("and", "or") and all(pad == "true" for pad in pads):
            return "true"
        if name in ("abs", "square") and all(zeros):
            return "least"
        if name in ("sqrt", "convert_element_type", "copy", "add", "max", "min") and all(p == "least" for p in pads):
            return "least"
        if name == "mul":
            return "zero" if any(zeros) else None
        if name == "div":
            return "zero" if zeros[0] and not zeros[1] else None
        return "zero" if name in _KEEP_ZEROS and all(zeros) else None

    def _reshape(self, eqn: JaxprEqn, x: Value) -> Value:
        before, after = eqn.invars[0].aval, eqn.outvars[0].aval
        if keeps_order(eqn) and (before.shape == after.shape or (self._layout.flat and before.size == after.size)):
            return x
        return Mixed(f"computes lax.{eqn.primitive.name} of a leaf's elements, which are on several devices")

    def _reduction(self, eqn: JaxprEqn, x: Value) -> Value:
        assert isinstance(x, Cut)
        op, aval = REDUCTIONS[eqn.primitive.name], eqn.invars[0].aval
        if aval.ndim > 0 and not eqn.params["axes"]:
            return x
        if len(eqn.params["axes"]) < aval.ndim:
            return Mixed(f"computes lax.{eqn.primitive.name} over some dimensions of a leaf, which is cut")
        neutral = {"sum": ("least", "zero"), "max": ("least",), "min": ("true",)}[op]
        if eqn.primitive.name == "reduce_or":
            neutral = ("least", "zero")
        if self._layout.padded and x.pad not in neutral:
            return Mixed(f"computes lax.{eqn.primitive.name} of what need not be neutral in the zeros at a slice's end")
        return Term(self._expression_of(eqn, [x], leave=["axes"]), op, x.names)

    def _collective(self, eqn: JaxprEqn, x: Value) -> Value:
        names = frozenset(eqn.params["axes"])
        op = COLLECTIVES[eqn.primitive.name]
        if eqn.params.get("axis_index_groups") is not None:
            return Mixed(f"computes lax.{eqn.primitive.name} in groups of devices")
        if isinstance(x, Term):
            left = x.names - names
            if x.op != op:
                return Mixed(f"computes lax.{eqn.primitive.name} of what is a {x.op} over a device's elements")
            if op == "sum" and names - x.names:
                others = sorted(map(repr, names - x.names))
                return Mixed(f"adds up along {', '.join(others)} too, where devices may have the same elements")
            return Term(self._expression_of(eqn, [x]), op, left) if left else Same(self._expression_of(eqn, [x]), True)
        assert isinstance(x, Cut)
        if x.names & names:
            return Mixed(f"computes lax.{eqn.primitive.name} over devices that have other elements of a leaf")
        return dataclasses.replace(x, expression=self._expression_of(eqn, [x]), pad=x.pad if op == "sum" else None)

    def _terms(self, eqn: JaxprEqn, operands: list[Value]) -> Value:
        """Returns the kind of an operation on partial reductions.

        It is a Term if the operation commutes with the collective that completes the reduction, else Mixed.
        """
        name = eqn.primitive.name
        terms = [v for v in operands if isinstance(v, Term)]
        others = [v for v in operands if not isinstance(v, Term)]
        term = terms[0]
        alike = all((v.op, v.names) == (term.op, term.names) for v in terms)
        same = all(isinstance(v, Same) for v in others)
        zeros = all(isinstance(v, Same) and v.expression == self._zero for v in others)
        expression = self._expression_of(
            eqn, operands, leave=["shape", "dimensions", "broadcast_dimensions", "new_sizes"]
        )
        kept = Term(expression, term.op, term.names)
        if name in RESHAPES or name in ("convert_element_type", "copy", "reduce_precision"):
            return kept if name != "convert_element_type" or _commutes(eqn, term.op) else self._part(eqn, term)
        if term.op == "sum":
            if name in ("add", "add_any", "sub") and alike and zeros:
                return kept
            if name in _LINEAR or (name == "mul" and len(terms) == 1 and same):
                return kept
            if name == "div" and isinstance(operands[0], Term) and len(terms) == 1 and same:
                return kept
        elif alike and same:
            of_bools = eqn.outvars[0].aval.dtype == bool
            if name == term.op or (of_bools and name == {"max": "or", "min": "and"}[term.op]):
                return kept
            if name == "not" and of_bools:
                return dataclasses.replace(kept, op="min" if term.op == "max" else "max")
        return self._part(eqn, term)

    def _part(self, eqn: JaxprEqn, term: Term) -> Mixed:
        what = {"sum": "sum", "max": "maximum", "min": "minimum"}[term.op]
        return Mixed(f"computes lax.{eqn.primitive.name} of a {what} over the elements of one device alone")

    def _call(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        inner = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
        closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
        return self.run(closed, operands)

    def _cond(self, branches: Sequence[ClosedJaxpr], index: Value, *operands: Value) -> list[Value]:
        if not isinstance(index, Same):
            why = index.why if isinstance(index, Mixed) else "comes from its own elements"
            mixed = Mixed(f"takes a branch by a condition on which devices may differ: it {why}", branches=True)
            return [mixed] * len(branches[0].jaxpr.outvars)
        of_branches = [self.run(branch, operands) for branch in branches]
        results = []
        for values in zip(*of_branches, strict=True):
            value = meet(values)
            if not isinstance(value, Mixed):
                expression = self._expression("cond", index.expression, *_expressions(values))
                value = dataclasses.replace(value, expression=expression)
            results.append(value)
        return results

    def _fixed_point(
        self, body: Callable[[list[Value]], list[Value]], start: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        """Returns the kinds of a loop's carry as the body reads it, and as the body returns it.

        The body is interpreted until the kinds of the carry do not change any more.
        """
        self._depth += 1
        carried = start
        while True:
            seen = [
                v
                if isinstance(v, Mixed)
                else dataclasses.replace(v, expression=self._expression("carried", self._depth, i))
                for i, v in enumerate(carried)
            ]
            made = body(seen)
            met = [meet([v, new]) for v, new in zip(seen, made, strict=True)]
            if met == seen:
                self._depth -= 1
                return seen, made
            carried = met

    def _while(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test_consts, body_consts = operands[:of_test], operands[of_test : of_test + of_body]
        start = operands[of_test + of_body :]
        body, test = eqn.params["body_jaxpr"], eqn.params["cond_jaxpr"]
        seen, made = self._fixed_point(lambda carry: self.run(body, [*body_consts, *carry]), start)
        (condition,) = self.run(test, [*test_consts, *seen])
        if not isinstance(condition, Same):
            return [Mixed("repeats a loop by a condition on which devices may differ", branches=True)] * len(start)
        loop = self._expression("while", condition.expression, *_expressions([*start, *made]))
        return [self._result(v, loop, i) for i, v in enumerate(seen)]

    def _scan(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        consts, carries = jax_internals.counts_of_scan(eqn)
        closed = eqn.params["jaxpr"]
        fixed, start, stacks = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]
        rows: list[Value] = []
        for stack, var in zip(stacks, closed.jaxpr.invars[consts + carries :], strict=True):
            if isinstance(stack, Same):
                expression = self._expression("row", stack.expression)
                rows.append(Same(expression, stack.uniform or var.aval.ndim == 0))
            else:
                rows.append(
                    stack if isinstance(stack, Mixed) else Mixed("goes over the elements of a leaf by lax.scan")
                )
        seen, _ = self._fixed_point(lambda carry: self.run(closed, [*fixed, *carry, *rows])[:carries], start)
        results = self.run(closed, [*fixed, *seen, *rows])
        length = eqn.params["length"], eqn.params["reverse"]
        loop = self._expression("scan", length, *_expressions([*start, *results]))
        stacked = [
            Same(v.expression, False)
            if isinstance(v, Same)
            else v
            if isinstance(v, Mixed)
            else Mixed("stacks elements of a leaf by lax.scan")
            for v in results[carries:]
        ]
        return [self._result(v, loop, i) for i, v in enumerate([*seen, *stacked])]

    def _result(self, value: Value, loop: int, place: int) -> Value:
        if isinstance(value, Mixed):
            return value
        return dataclasses.replace(value, expression=self._expression("result", loop, place))


def is_reduction(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a sum, maximum or minimum; ``and`` and ``or`` of integers are of their bits."""
    name = eqn.primitive.name
    return name in REDUCTIONS and (name not in ("reduce_and", "reduce_or") or eqn.invars[0].aval.dtype == bool)


def keeps_order(eqn: JaxprEqn) -> bool:
    """Returns whether one of :data:`RESHAPES` keeps the order of the elements: it does not transpose them before."""
    return eqn.primitive.name != "reshape" or eqn.params["dimensions"] is None


def _commutes(eqn: JaxprEqn, op: str) -> bool:
    """Whether a conversion of the dtype commutes with a sum, or with a maximum or minimum."""
    from_bool, to_bool = (var.aval.dtype.kind == "b" for var in (*eqn.invars, *eqn.outvars))
    return from_bool == to_bool or (from_bool and op != "sum")


def _expressions(values: Sequence[Value]) -> list[Any]:
    return [None if isinstance(v, Mixed) else v.expression for v in values]
