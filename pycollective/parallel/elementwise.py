"""Decides from the jaxprs of an optimizer's two functions whether it may be applied to parts of parameters.

An optimizer may be applied to parts, slices included, if three conditions hold for whole leaves and for parts of them
(:mod:`cut_values` defines Same and Cut):

    init      returns a state whose leaves are Same, or Cut like a parameter
    update    maps each such state to such a state, and returns updates that are Cut like the parameters
    both      have the same expressions for whole leaves and for parts

By induction over the steps, each device then has its elements of the parameters and of the state that one device would
have with the whole leaves, after any number of steps.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pycollective.errors import message
from pycollective.jax_support import jax_internals
from pycollective.parallel.axes import (
    AxisName,
    Shape,
    axis_size,
    in_order,
    name_of,
    names_of,
    slice_length,
    typed,
    vary,
)
from pycollective.parallel.cut_values import Cut, Expressions, Interpreter, Layout, Mixed, Same, Value, meet_pads

Array = Any
Tree = Any

_MARK = 1_000_003
"""A length that no real dimension has. Parameter i is traced with a cut dimension of length ``_MARK + i``, so a leaf of
the state with that length has the shape of parameter i.
"""

CHECKED = "parts_are_checked"
"""The name of an attribute of ``update`` of an optimizer: it knows how parameters are cut along all axes of parts."""

_MIXES = (
    "LAMB, Adafactor, Muon and optax.clip_by_global_norm do not. parallel.clip_by_global_norm takes the place of the "
    "last."
)
_BRANCHES = "parallel.apply_if_finite takes the place of optax.apply_if_finite: all devices decide alike."
_BY_SHAPE = (
    "It chooses by shapes, and a part of a leaf has another one. Choose by the whole parameters before: "
    "mask=jax.tree.map(lambda x: x.ndim > 1, params), a tree of bools. Adafactor and Muon cannot do that."
)


class Cutting(NamedTuple):
    """How parameters are cut into the devices' parts. The sequences have an item for each leaf.

    Attributes:
        whole: the shapes of the whole leaves.
        own: the shapes of this device's parts.
        axes: for each dimension of a part the mesh axes along which it is cut.
        flat: whether a part is a slice of the flattened leaf.
    """

    whole: tuple[Shape, ...]
    own: tuple[Shape, ...]
    axes: tuple[tuple[tuple[Hashable, ...], ...], ...]
    flat: bool

    @property
    def names(self) -> tuple[frozenset[Hashable], ...]:
        """For each leaf the mesh axes along which it is cut."""
        return tuple(frozenset(itertools.chain(*axes)) for axes in self.axes)

    @property
    def marked(self) -> tuple[Shape, ...]:
        """The shapes of parts with marked lengths in their cut dimensions, see :data:`_MARK`."""
        return tuple(
            tuple(_MARK + i if cut else length for length, cut in zip(shape, axes, strict=True))
            for i, (shape, axes) in enumerate(zip(self.own, self.axes, strict=True))
        )

    @property
    def layout(self) -> Layout:
        names = frozenset[Hashable]().union(*self.names)
        devices = math.prod(axis_size("zero", name) for name in in_order(names))
        padded = self.flat and any(
            math.prod(own) * devices != math.prod(whole) for own, whole in zip(self.own, self.whole, strict=True)
        )
        return Layout(self.flat, padded, names)


def cut_in_slices(shapes: Sequence[Shape], axis_name: AxisName, own: Sequence[Shape] | None = None) -> Cutting:
    """Returns how :func:`own_slice` cuts leaves of these shapes along an axis, which must be bound.

    Args:
        shapes: the shapes of the whole leaves.
        axis_name: the axis.
        own: the shapes of the slices. Default: one dimension; stacked layers have more dimensions before it.
    """
    devices = axis_size("zero", axis_name)
    own = [(slice_length(math.prod(shape), devices),) for shape in shapes] if own is None else own
    axes = tuple((*[()] * (len(shape) - 1), names_of(axis_name)) for shape in own)
    return Cutting(tuple(shapes), tuple(own), axes, True)


class Check:
    """Raises ValueError if an optimizer may not be applied to parts of leaves. Arguments that have passed are cached.

    Args:
        where: the name of the calling function, for messages.
        inner: the optimizer. It may call collectives over all axes that are bound.
    """

    def __init__(self, where: str, inner: optax.GradientTransformationExtraArgs) -> None:
        self._where = where
        self._inner = inner
        self._passed: set[Any] = set()

    def at_init(self, cutting: Cutting, params: Tree) -> None:
        """Checks ``init``, and ``update`` without extra arguments.

        An ``update`` that needs extra arguments is checked by :meth:`at_update`.
        """
        with contextlib.suppress(KeyError, TypeError):  # update misses an argument that it needs
            self.at_update(cutting, params, params, {})

    def at_update(self, cutting: Cutting, grads: Tree, params: Tree | None, extra_args: Mapping[str, Any]) -> None:
        """Checks a call of ``update``.

        Args:
            cutting: how the parameters are cut.
            grads: the gradients, whole or cut. Only their dtypes and JAX's types count.
            params: the parameters, in the same way; None if ``update`` gets none.
            extra_args: the other arguments of ``update``.
        """
        arrays, extra_tree = jax.tree.flatten(dict(extra_args))
        static = [None if is_number(x) else x for x in arrays]
        known = cutting, *map(_types, (grads, params, [x for x in arrays if is_number(x)])), extra_tree, static
        key = repr(known), jax_internals.bound_axes()
        if key in self._passed:
            return
        found = _Comparison(self._inner, cutting, grads, params, arrays, extra_tree).difference()
        if found is not None:
            expected = "an optimizer that updates each element by itself"
            raise ValueError(message(f"parallel.{self._where}", expected, f"one that {found.what}", found.remedy))
        self._passed.add(key)


def check_numbers(where: str, tree: Tree) -> None:
    """Raises TypeError if a leaf is not an array of numbers. A key of :mod:`jax.random`, for example, cannot be cut."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(x, "dtype", None)
        if dtype is not None and (dtype == jax.dtypes.float0 or jax.dtypes.issubdtype(dtype, jax.dtypes.extended)):
            remedy = "Keep keys of jax.random, and what has no gradient, in another tree."
            raise TypeError(message(f"parallel.{where}", "arrays of numbers", f"{dtype} at {name_of(path)}", remedy))


class _Found(NamedTuple):
    """The reason why an optimizer may not be applied to parts. ``what`` completes the sentence "got one that"."""

    what: str
    remedy: str


class _RefusedError(Exception):
    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.found = _Found(what, remedy)


class _Interpreted(NamedTuple):
    """The kinds of the results of ``init`` and ``update``, for whole leaves or for parts.

    Attributes:
        state: the kinds of the state that ``update`` gets.
        results: the kinds of the updates and of the new state.
        names: the names of all these values, for messages.
    """

    state: list[Value]
    results: list[Value]
    names: list[str]


class _Comparison:
    """Traces an optimizer for whole leaves and for parts, interprets both programs, and compares the results."""

    def __init__(
        self,
        inner: optax.GradientTransformationExtraArgs,
        cutting: Cutting,
        grads: Tree,
        params: Tree | None,
        extra: list[Any],
        extra_tree: Any,
    ) -> None:
        self._inner, self._cutting, self._layout = inner, cutting, cutting.layout
        self._grads, self._params = grads, params
        self._extra, self._extra_tree = extra, extra_tree
        self._numbers = [i for i, x in enumerate(extra) if is_number(x)]
        self._expressions = Expressions()
        self._interpreter = Interpreter(self._layout, self._expressions)
        of_types = typed(self._layout.names)
        self._names = cutting.names
        self._varying = [names & of_types for names in self._names]

    def difference(self) -> _Found | None:
        try:
            marked = self._leaves_like(self._cutting.marked, self._grads if self._params is None else self._params)
            state = jax.eval_shape(lambda *leaves: self._init(marked.tree, leaves), *marked.shapes)
            self._state_tree = jax.tree.structure(state)
            self._places = [self._place_of(x.shape) for x in jax.tree.leaves(state)]
            whole, own = (self._interpreted(shapes) for shapes in (self._cutting.whole, self._cutting.own))
            for a, b, name in zip([*whole.state, *whole.results], [*own.state, *own.results], own.names, strict=True):
                if a.expression != b.expression:  # type: ignore[union-attr]
                    raise _RefusedError(
                        f"does something else for a part of a leaf than for the whole, {name}", _BY_SHAPE
                    )
        except _RefusedError as refused:
            return refused.found
        return None

    def _leaves_like(self, shapes: Sequence[Shape], like: Tree) -> Leaves:
        leaves, tree = jax.tree.flatten(like)
        structs = [jax.ShapeDtypeStruct(s, dtype_of(x)) for s, x in zip(shapes, leaves, strict=True)]
        names = [varying_of(x) | own for x, own in zip(leaves, self._varying, strict=True)]
        return Leaves(tree, structs, names)

    def _init(self, tree: Any, leaves: Sequence[Array]) -> Any:
        return self._inner.init(tree.unflatten(leaves))

    def _place_of(self, shape: Shape) -> int | None:
        """Returns the index of the parameter like which a leaf of the state is cut; None if the leaf is not cut."""
        marks = [length - _MARK for length in shape if length >= _MARK]
        if not marks:
            return None
        if marks[0] >= len(self._cutting.own) or shape != self._cutting.marked[marks[0]]:
            what = "has in its state what depends on the shape of a leaf in another way than the leaf itself"
            raise _RefusedError(what, _MIXES)
        return marks[0]

    def _interpreted(self, shapes: Sequence[Shape]) -> _Interpreted:
        """Interprets ``init`` and ``update`` for parameters of these shapes.

        Raises:
            _RefusedError: a result is neither Same nor Cut like its parameter.
        """
        grads = self._leaves_like(shapes, self._grads)
        params = None if self._params is None else self._leaves_like(shapes, self._params)
        like = grads if params is None else params

        closed, state = jax.make_jaxpr(lambda *x: self._init(like.tree, like.vary(x)), return_shape=True)(*like.shapes)
        state_leaves, tree = jax.tree_util.tree_flatten_with_path(state)
        state_names = [f"in its state at {name_of(path)}" for path, _ in state_leaves]
        if tree != self._state_tree:
            raise _RefusedError("has a state of another structure for parts of leaves", _BY_SHAPE)
        for (_, x), place, name in zip(state_leaves, self._places, state_names, strict=True):
            if place is not None and x.shape != shapes[place]:
                raise _RefusedError(f"has the shape {x.shape} for a leaf of shape {shapes[place]}, {name}", _BY_SHAPE)
        state_kinds = self._interpreter.run(closed, self._kinds("params", shapes))
        self._require_kinds(state_kinds, self._places, shapes, state_names)

        count, arity = len(grads.shapes), 1 if params is None else 2
        states = Leaves(
            tree,
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in state_leaves],
            [jax_internals.varying_axes_of(var.aval) for var in closed.jaxpr.outvars],
        )
        numbers = [self._extra[i] for i in self._numbers]
        extra = Leaves(
            None, [jax.ShapeDtypeStruct(np.shape(x), dtype_of(x)) for x in numbers], [*map(varying_of, numbers)]
        )
        of_grads, of_extra = arity * count, len(extra.shapes)

        def update(*leaves: Array) -> Any:
            mine = grads.tree.unflatten(grads.vary(leaves[:count]))
            weights = None if params is None else params.tree.unflatten(params.vary(leaves[count:of_grads]))
            others = list(self._extra)
            for i, x in zip(self._numbers, extra.vary(leaves[of_grads : of_grads + of_extra]), strict=True):
                others[i] = x
            carried = tree.unflatten(states.vary(leaves[of_grads + of_extra :]))
            return self._inner.update(mine, carried, weights, **self._extra_tree.unflatten(others))

        given = [*grads.shapes, *([] if params is None else params.shapes), *extra.shapes]
        closed, (updates, new_state) = jax.make_jaxpr(update, return_shape=True)(*given, *states.shapes)
        if jax.tree.structure(new_state) != tree or jax.tree.structure(updates) != grads.tree:
            raise _RefusedError(
                "gives updates or a state of another structure than it gets", "Give back what comes in."
            )
        names = [f"at {name_of(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(updates)] + state_names
        fixed: list[Value] = [*self._kinds("grads", shapes), *([] if params is None else self._kinds("params", shapes))]
        for i, (x, axes) in enumerate(zip(extra.shapes, extra.varying, strict=True)):
            same = Same(self._expressions("extra", i), x.ndim == 0)
            fixed.append(Mixed("computes with an argument that varies") if axes & self._layout.names else same)
        # The padding of the slices is known for the state of init. Repeat until update keeps what is known about it.
        pads = [self._pad(v) for v in state_kinds]
        while True:
            seen = [self._state_kind(i, shapes, x.ndim, pads[i]) for i, (_, x) in enumerate(state_leaves)]
            results = self._interpreter.run(closed, [*fixed, *seen])
            made = [self._pad(v) for v in results[count:]]
            met = [meet_pads(*pair) for pair in zip(pads, made, strict=True)]
            if met == pads:
                break
            pads = met
        self._require_kinds(results, [*range(count), *self._places], shapes, names)
        return _Interpreted(state_kinds, results, state_names + names)

    def _kinds(self, what: str, shapes: Sequence[Shape]) -> list[Value]:
        """Returns the kinds of parameters or gradients."""
        return [self._kind(self._expressions(what, i), i, shapes, "zero") for i in range(len(shapes))]

    def _kind(self, expression: int, place: int, shapes: Sequence[Shape], pad: str | None) -> Value:
        names = self._names[place]
        if not names:
            return Same(expression, len(shapes[place]) == 0)
        return Cut(expression, self._layout.place(shapes[place], self._cutting.axes[place]), names, pad)

    def _state_kind(self, i: int, shapes: Sequence[Shape], ndim: int, pad: str | None) -> Value:
        expression, place = self._expressions("state", i), self._places[i]
        return Same(expression, ndim == 0) if place is None else self._kind(expression, place, shapes, pad)

    def _pad(self, value: Value) -> str | None:
        """Returns what is known about the padding of a leaf of the state, which may also be zeros."""
        if isinstance(value, Cut):
            return None if value.pad == "true" else value.pad
        return "least" if isinstance(value, Same) and self._interpreter.is_zero(value) else None

    def _require_kinds(
        self, values: Sequence[Value], places: Sequence[int | None], shapes: Sequence[Shape], names: Sequence[str]
    ) -> None:
        """Raises _RefusedError unless each value is Same, or Cut like the parameter whose index is in ``places``."""
        for value, place, name in zip(values, places, names, strict=True):
            if isinstance(value, Mixed):
                raise _RefusedError(f"{value.why}, {name}", _BRANCHES if value.branches else _MIXES)
            want = None if place is None else self._kind(0, place, shapes, None)
            if isinstance(want, Cut):
                cut = isinstance(value, Cut) and (value.place, value.names) == (want.place, want.names)
                if not cut and not (isinstance(value, Same) and value.uniform):
                    raise _RefusedError(f"gives elements of another place, {name}", _MIXES)
            elif not isinstance(value, Same):
                raise _RefusedError(f"gives what comes from the elements of one device alone, {name}", _MIXES)


class Leaves(NamedTuple):
    """The leaves of a tree, and for each leaf the axes along which it varies by JAX's types."""

    tree: Any
    shapes: list[jax.ShapeDtypeStruct]
    varying: list[frozenset[Hashable]]

    def vary(self, leaves: Sequence[Array]) -> list[Array]:
        return [vary(x, names) for x, names in zip(leaves, self.varying, strict=True)]


def is_number(x: Any) -> bool:
    """Returns whether a leaf of ``extra_args`` is an array or a number. A bool of Python, for example, is static."""
    return not isinstance(x, bool) and isinstance(x, (jax.Array, np.ndarray, np.generic, int, float, complex))


def dtype_of(x: Any) -> Any:
    """Returns the dtype of an array or a number."""
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def varying_of(x: Any) -> frozenset[Hashable]:
    """Returns the axes along which a value varies, by JAX's types."""
    return jax_internals.varying_axes(x) if isinstance(x, jax.core.Tracer) else frozenset()


def _types(tree: Tree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(np.shape(x), str(dtype_of(x)), sorted(map(str, varying_of(x)))) for x in leaves]
