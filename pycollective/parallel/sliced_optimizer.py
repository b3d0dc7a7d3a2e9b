"""Optimizers whose state and parameters are in slices: their programs for whole arrays, partitioned."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr

from pycollective.errors import message
from pycollective.jax_support import jax_internals
from pycollective.parallel.axes import AxisName, Shape, Sliced, axis_size, in_order, name_of, names_of, typed
from pycollective.parallel.elementwise import (
    CHECKED,
    Check,
    Cutting,
    Leaves,
    cut_in_slices,
    dtype_of,
    is_number,
    varying_of,
)
from pycollective.parallel.partitioned import Program, RefusedError, names_axis

Array = Any
Tree = Any

_REMEDY = "Average over devices before what differs between them, and pass it as a number."
_REMEDY_OF_STATE = "Pass a state of init, or of shard_state for this optimizer."


def belongs_to_parameters(
    inner: optax.GradientTransformation, state: Any, params: Sequence[Shape] | None
) -> list[bool] | None:
    """Returns for each leaf of a state whether it belongs to a parameter, as :func:`optax.tree.map_params` finds it.

    If ``inner.init`` needs more of the parameters than :func:`optax.tree.map_params` gives it, the leaves with the
    shape of a parameter belong to it, except for scalars. Keys of :mod:`jax.random` belong to none: they cannot
    be cut.

    Args:
        inner: the optimizer.
        state: the state that the optimizer has for whole parameters, or its shapes.
        params: the shapes of the parameters. None: not known. Then the result may be None, also not known.
    """
    leaves = jax.tree.leaves(state)
    try:
        found = jax.tree.leaves(
            optax.tree.map_params(inner, lambda _: True, state, transform_non_params=lambda _: False)
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        if params is None:
            return None
        found = [np.ndim(x) > 0 and np.shape(x) in params for x in leaves]
    return [
        yes and not jax.dtypes.issubdtype(dtype_of(x), jax.dtypes.extended)
        for x, yes in zip(leaves, found, strict=True)
    ]


def cuts_of_state(inner: optax.GradientTransformation, state: Any, cuts: Sequence[Sliced]) -> list[Sliced | None]:
    """Returns for each leaf of a state how it is cut. None: all devices have it.

    Args:
        inner: the optimizer.
        state: the shapes of the state that the optimizer would have for whole parameters.
        cuts: how the parameters are cut.
    """
    kept = {cut.shape: cut.kept for cut in cuts}
    belongs = belongs_to_parameters(inner, state, list(kept))
    assert belongs is not None
    return [
        Sliced(x.shape, kept.get(x.shape, 0)) if yes else None
        for x, yes in zip(jax.tree.leaves(state), belongs, strict=True)
    ]


def is_slice(where: str, own: Shape, cut: Sliced, devices: int, *, belongs: bool | None) -> bool:
    """Returns whether a leaf of a state in slices is a slice, by its shape.

    Args:
        where: the name of the calling function, for messages.
        own: the shape of the leaf.
        cut: how the leaf would be cut.
        devices: the number of devices.
        belongs: whether the leaf belongs to a parameter; None: not known.

    Raises:
        ValueError: the shape is neither that of a slice nor that of the whole leaf; or it is both, and whether the leaf
            belongs to a parameter is not known.
    """
    shape = cut.slice_shape(devices)
    if own != cut.shape and own != shape:
        error = message(f"parallel.{where}", f"a leaf of shape {shape} or {cut.shape}", f"{own}", _REMEDY_OF_STATE)
        raise ValueError(error)
    if own == cut.shape == shape and belongs is None and devices > 1:
        fail_for_params(where)
    return own == shape and (own != cut.shape or bool(belongs))


def fail_for_params(where: str) -> NoReturn:
    """Raises ValueError, since the parameters are needed to know which leaves of a state are cut."""
    expected = "an optimizer whose init optax.tree.map_params can call, or the parameters"
    raise ValueError(message(f"parallel.{where}", expected, "neither", "Pass params=, the parameters or their shapes."))


class SlicedOptimizer:
    """Applies an optimizer for whole arrays to slices of them.

    ``init`` and ``update`` of the optimizer are traced for whole arrays and computed for slices, see
    :mod:`~pycollective.parallel.partitioned`. An optimizer that computes collectives over the axis is written for
    slices: it is checked by :class:`~pycollective.parallel.elementwise.Check`, and both of its functions are applied to
    slices as they are.

    Args:
        where: the name of the calling function, for messages.
        inner: the optimizer.
        axis_name: the axis along which parameters are cut.
    """

    def __init__(self, where: str, inner: optax.GradientTransformation, axis_name: AxisName) -> None:
        self._where, self._axis_name = where, axis_name
        self._inner = optax.with_extra_args_support(inner)
        self._check = Check(where, self._inner)

    def init(self, slices: Tree, cuts: Sequence[Sliced]) -> Any:
        """Returns the state in slices. ``cuts`` says for each leaf of ``slices`` how it is cut."""
        leaves, tree = jax.tree.flatten(slices)
        closed, state = self._traced_init(tree, whole := self._whole(leaves, cuts))
        if names_axis(closed, self._axis_name) or self._update_names_axis(tree, whole, closed, state):
            self._check.at_init(self._cutting(cuts, leaves), slices)
            return self._inner.init(slices)
        program = self._program()
        arguments = [program.sliced(x, cut) for x, cut in zip(whole.shapes, cuts, strict=True)]
        with self._refusals():
            results = program.read(closed, arguments)
            return self._computed(
                program,
                dict(zip(arguments, leaves, strict=True)),
                results,
                cuts_of_state(self._inner, state, cuts),
                state,
            )

    def update(
        self, grads: Tree, state: Any, params: Tree | None, extra_args: Mapping[str, Any], cuts: Sequence[Sliced]
    ) -> tuple[Tree, Any]:
        """Returns the updates and the new state in slices, for gradients, a state and parameters in slices."""
        of_grads, tree = jax.tree.flatten(grads)
        of_params = jax.tree.leaves(params)
        like = of_grads if params is None else of_params
        whole_grads, whole_params = self._whole(of_grads, cuts), self._whole(of_params, cuts[: len(of_params)])
        whole_like = self._whole(like, cuts)
        closed_init, started = self._traced_init(tree, whole_like)
        of_state, state_tree = jax.tree.flatten(state)
        if state_tree != jax.tree.structure(started):
            expected = f"a state {jax.tree.structure(started)}"
            raise ValueError(message(f"parallel.{self._where}", expected, f"{state_tree}", _REMEDY_OF_STATE))
        state_cuts = cuts_of_state(self._inner, started, cuts)
        whole_state = self._whole(of_state, [Sliced(x.shape) for x in jax.tree.leaves(started)])
        arrays, extra_tree = jax.tree.flatten(dict(extra_args))
        places = [i for i, x in enumerate(arrays) if is_number(x)]
        numbers = [arrays[i] for i in places]
        whole_extra = self._whole(numbers, [None] * len(numbers))

        def function(grads: Any, params_: Any, state: Any, numbers: Any) -> Any:
            others = list(arrays)
            for i, x in zip(places, whole_extra.vary(numbers), strict=True):
                others[i] = x
            weights = None if params is None else tree.unflatten(whole_params.vary(params_))
            carried = state_tree.unflatten(whole_state.vary(state))
            return self._inner.update(
                tree.unflatten(whole_grads.vary(grads)), carried, weights, **extra_tree.unflatten(others)
            )

        closed, made = jax.make_jaxpr(function, return_shape=True)(
            whole_grads.shapes, whole_params.shapes, whole_state.shapes, whole_extra.shapes
        )
        if names_axis(closed_init, self._axis_name) or names_axis(closed, self._axis_name):
            self._check.at_update(self._cutting(cuts, of_grads), grads, params, extra_args)
            slices = self._whole(like, [None] * len(like))
            of_slices = self._shapes_of_state(tree, slices)
            longer = [jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] + 1), x.dtype) for x in slices.shapes]
            fixed = map(operator.eq, of_slices, self._shapes_of_state(tree, slices._replace(shapes=longer)))
            if any(cut is not None and alike for cut, alike in zip(state_cuts, fixed, strict=True)):
                known = names_axis(closed_init, self._axis_name)
                if not known and not self._update_names_axis(tree, whole_like, closed_init, started):
                    self._fail_for_extra_args(extra_args)
            self._check_state(state, of_slices)
            return self._inner.update(grads, state, params, **extra_args)
        if jax.tree.structure(made) != jax.tree.structure((grads, state)):
            got = f"one that gives {jax.tree.structure(made)}"
            expected = f"an optimizer that gives back what it gets, {jax.tree.structure((grads, state))}"
            raise ValueError(message(f"parallel.{self._where}", expected, got, "Keep the structure of the state."))
        devices = axis_size(self._where, self._axis_name)
        of_started = [x.shape for x in jax.tree.leaves(started)]
        self._check_state(
            state,
            [x if cut is None else cut.slice_shape(devices) for x, cut in zip(of_started, state_cuts, strict=True)],
        )
        program = self._program()
        arguments = [
            program.sliced(x, cut) if cut is not None else program.same(x)
            for x, cut in zip(
                [*whole_grads.shapes, *whole_params.shapes, *whole_state.shapes],
                [*cuts, *cuts[: len(of_params)], *state_cuts],
                strict=True,
            )
        ]
        names = frozenset(names_of(self._axis_name))
        for x, shape in zip(numbers, whole_extra.shapes, strict=True):
            refused = "computes with an argument that varies, by JAX's types" if varying_of(x) & names else ""
            arguments.append(program.same(shape, foreign=not refused, refused=refused))
        given = dict(zip(arguments, [*of_grads, *of_params, *of_state, *numbers], strict=True))
        with self._refusals():
            results = program.read(closed, arguments)
        if program.mixes and not getattr(self._inner.update, CHECKED, False):
            self._check_other_axes(program.mixes, [*whole_grads.varying, *whole_params.varying])
        return self._computed(program, given, results, [*cuts, *state_cuts], made)

    def _program(self) -> Program:
        return Program(self._axis_name, axis_size(self._where, self._axis_name))

    def _whole(self, leaves: Sequence[Array], cuts: Sequence[Sliced | None]) -> Leaves:
        """Returns the shapes of whole arrays."""
        names = frozenset(names_of(self._axis_name))
        structs = [
            jax.ShapeDtypeStruct(np.shape(x) if cut is None else cut.shape, dtype_of(x))
            for x, cut in zip(leaves, cuts, strict=True)
        ]
        varying = [varying_of(x) if cut is None else varying_of(x) - names for x, cut in zip(leaves, cuts, strict=True)]
        return Leaves(None, structs, varying)

    def _check_other_axes(self, operation: str, varying: Sequence[frozenset[Hashable]]) -> None:
        """Raises ValueError if leaves may be cut along other axes too, so that a device lacks some of their elements.

        Args:
            operation: what the optimizer computes of several elements of a leaf.
            varying: for each leaf the axes along which it varies, by JAX's types.
        """
        others = set(jax_internals.bound_axes()).difference(names_of(self._axis_name))
        unknown = in_order((others - typed(others)) | (others & frozenset[Hashable]().union(*varying)))
        if unknown:
            along = ", ".join(map(repr, unknown))
            expected = f"an optimizer that knows which parameters are cut along {along}"
            got = f"one that computes lax.{operation} of the elements of a leaf"
            remedy = (
                "Wrap it: for_parts(optimizer, specs), with jax.P() where nothing is cut along other axes. Clip by "
                "parallel.clip_by_global_norm(limit, specs=specs)."
            )
            raise ValueError(message(f"parallel.{self._where}", expected, got, remedy))

    def _traced_init(self, tree: Any, leaves: Leaves) -> tuple[ClosedJaxpr, Any]:
        """Returns the program of ``init`` for these leaves, and the shapes of its state."""
        return jax.make_jaxpr(lambda *xs: self._inner.init(tree.unflatten(leaves.vary(xs))), return_shape=True)(
            *leaves.shapes
        )

    def _shapes_of_state(self, tree: Any, leaves: Leaves) -> list[Shape]:
        return [x.shape for x in jax.tree.leaves(self._traced_init(tree, leaves)[1])]

    def _fail_for_extra_args(self, extra_args: Mapping[str, Any]) -> NoReturn:
        """Raises ValueError, since ``init`` has cut numbers that belong to parameters but not to their elements."""
        expected = "an optimizer with collectives over the axis whose update can be called without extra arguments"
        got = f"one that needs some of {sorted(extra_args)}, and has in its state what does not depend on the elements"
        raise ValueError(message(f"parallel.{self._where}", expected, got, "Give these arguments defaults."))

    def _update_names_axis(self, tree: Any, whole: Leaves, closed: ClosedJaxpr, state: Any) -> bool:
        """Returns whether ``update``, without extra arguments, computes a collective over the axis.

        An ``update`` that needs extra arguments, and computes a collective, gets a state of whole arrays in slices.
        :meth:`update` refuses it if leaves are cut that ``init`` for slices would not cut.
        """
        leaves, state_tree = jax.tree.flatten(state)
        states = Leaves(None, leaves, [jax_internals.varying_axes_of(var.aval) for var in closed.jaxpr.outvars])

        def update(leaves: Any, carried: Any) -> Any:
            params = tree.unflatten(whole.vary(leaves))
            return self._inner.update(params, state_tree.unflatten(states.vary(carried)), params)

        try:
            return names_axis(jax.make_jaxpr(update)(whole.shapes, leaves), self._axis_name)
        except (KeyError, TypeError, ValueError):
            return False

    def _check_state(self, state: Any, shapes: Sequence[Shape]) -> None:
        """Raises ValueError if a state is not one that :meth:`init` makes, with leaves of these shapes."""
        for (path, x), shape in zip(jax.tree_util.tree_leaves_with_path(state), shapes, strict=True):
            if np.shape(x) != shape:
                expected = f"a state with the shape {shape} at {name_of(path)}"
                raise ValueError(message(f"parallel.{self._where}", expected, f"{np.shape(x)}", _REMEDY_OF_STATE))

    def _cutting(self, cuts: Sequence[Sliced], own: Sequence[Array]) -> Cutting:
        return cut_in_slices([cut.shape for cut in cuts], self._axis_name, [np.shape(x) for x in own])

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except RefusedError as refused:
            expected = "an optimizer that computes with gradients, parameters, its state and numbers"
            error = message(f"parallel.{self._where}", expected, f"one that {refused}", _REMEDY)
            raise ValueError(error) from None

    def _computed(
        self, program: Program, given: Any, results: Sequence[Any], cuts: Sequence[Sliced | None], shapes: Tree
    ) -> Any:
        """Returns the results as a tree like ``shapes``, in slices where ``cuts`` says it, with zeros as padding."""
        devices = axis_size(self._where, self._axis_name)
        wanted = [
            program.as_same(x) if cut is None else program.as_slice(x, cut)
            for x, cut in zip(results, cuts, strict=True)
        ]
        arrays = [
            jnp.asarray(x) if cut is None else cut.without_padding(x, 0, self._axis_name, devices)
            for x, cut in zip(program.run(given, wanted), cuts, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(shapes), arrays)
