"""Data parallelism with periodic averages: local SGD and DiLoCo.

Plain data parallelism averages gradients in each step. Here device r updates its own parameters x_r by its own
gradients g_r, and the N devices communicate in every H-th step only.

    Local SGD:    x_r <- x_r + inner(g_r)              in each step
                  x_r <- mean over s of x_s            after each H-th step

    DiLoCo:       x_r <- x_r + inner(g_r)              in each step
                  d   <- a - mean over s of x_s        after each H-th step: the outer gradient at the anchor a
                  a   <- a + outer(d);  x_r <- a       the anchor is the same on all devices

Source: Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767; Douillard et al., "DiLoCo:
Distributed Low-Communication Training of Language Models", arXiv:2311.08105; Douillard et al., "Streaming DiLoCo with
overlapping communication", arXiv:2501.18512.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from pycollective.errors import integer, message
from pycollective.parallel.axes import AxisName, Sliced, axis_size
from pycollective.parallel.buckets import gather_whole
from pycollective.parallel.per_device import as_varying, check_not_summed, check_params_given
from pycollective.parallel.wire import checked_wire_dtype, mean_slices

Array = Any
Tree = Any


class LocalState(NamedTuple):
    """The state of :func:`local_sgd` on one device.

    Attributes:
        phase: the number of steps since the last mean, from 0 to ``every`` - 1; an int32.
        inner: the state of the inner optimizer. The devices' states differ.
    """

    phase: Array
    inner: Any


def local_sgd(
    inner: optax.GradientTransformation, every: int, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    """Lets each device update its own parameters, and averages the parameters after each ``every``-th step.

    ``x_r <- x_r + inner(g_r)`` in each step; ``x_r <- mean_s x_s`` after each ``every``-th step. With ``every=1`` and
    SGD this is plain data parallelism. The devices must begin with the same parameters. The states of ``inner`` are not
    averaged. Call ``init`` and ``update`` where the axis is bound.

    Args:
        inner: an optimizer. It gets the gradients of this device alone.
        every: the number of steps between two means, H, from 1.
        axis_name: the name of the axis of data parallelism, or a tuple of names.

    Returns:
        The optimizer. Its ``update`` takes the gradients of this device's own examples, and the parameters. It returns
        this device's updates, of the shapes and dtypes that ``inner`` gives them. After a mean the devices' parameters
        agree up to the rounding of the sum of parameters and updates. The state is a :class:`LocalState`.

    Raises:
        TypeError: ``every`` is no integer.
        ValueError: ``every`` is below 1; ``update`` gets no parameters; by JAX's types, the gradients are summed
            already.
        NameError: the axis is not bound.

    Order:
        Program order: one mean of the parameters in each ``every``-th ``update``.

    Source:
        Stich, arXiv:1805.09767, algorithm 1.

    Example:
        >>> import jax, optax
        >>> import jax.numpy as jnp
        >>> optimizer = local_sgd(optax.sgd(0.5), 2, "batch")
        >>> def train(x):
        ...     w, path = jnp.float32(0), []
        ...     state = optimizer.init(w)
        ...     for _ in range(2):
        ...         grad = jax.grad(lambda w: (w - x) ** 2 / 2)(w)
        ...         updates, state = optimizer.update(grad, state, w)
        ...         w = optax.apply_updates(w, updates)
        ...         path.append(w)
        ...     return jnp.stack(path)
        >>> jax.vmap(train, axis_name="batch")(jnp.array([0.0, 4.0]))  # the second step ends at the mean of 0 and 3
        Array([[0. , 1.5],
               [2. , 1.5]], dtype=float32)
    """
    where = "local_sgd"
    every = _at_least_one(where, "every", every)
    inner = optax.with_extra_args_support(inner)

    def init(params: Tree) -> LocalState:
        axis_size(where, axis_name)
        return as_varying(LocalState(jnp.int32(0), inner.init(params)), axis_name)

    def update(
        grads: Tree, state: LocalState, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, LocalState]:
        check_not_summed(where, grads, axis_name)
        check_params_given(where, params)
        updates, inner_state = inner.update(grads, state.inner, params, **extra_args)
        phase = (state.phase + 1) % every

        def average(updates: Tree, params: Tree) -> Tree:
            return _updates_to(lax.pmean(optax.apply_updates(params, updates), axis_name), params, updates)

        # The phase is the same on all devices, so all of them take the same branch.
        updates = lax.cond(
            phase == 0,
            lambda *args: as_varying(average(*args), axis_name),
            lambda updates, _: as_varying(updates, axis_name),
            *(updates, params),
        )
        return updates, as_varying(LocalState(phase, inner_state), axis_name)

    return optax.GradientTransformationExtraArgs(init, update)


class DiLoCoState(NamedTuple):
    """The state of :func:`diloco` on one device.

    Attributes:
        phase: the number of steps since the first fragment was synchronised, from 0 to ``every`` - 1; an int32.
        inner: the state of the inner optimizer. The devices' states differ.
        anchor: the parameters after the last outer step; the same on all devices.
        outer: the state of the outer optimizer for each fragment; the same on all devices.
    """

    phase: Array
    inner: Any
    anchor: Tree
    outer: tuple[Any, ...]


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None,
    every: int,
    axis_name: AxisName,
    *,
    fragments: int = 1,
    wire_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Lets each device update its own parameters, and applies an outer optimizer to their mean change.

    ``x_r <- x_r + inner(g_r)`` in each step. After each ``every``-th step the outer gradient is ``d = a - mean_s x_s``,
    the anchor becomes ``a + outer(d)``, and all devices continue from the anchor. The devices must begin with the same
    parameters. Call ``init`` and ``update`` where the axis is bound.

    The streaming form divides the leaves into F ``fragments`` of about equal bytes. Fragment f has its outer step when
    the number of steps is ``f * H // F`` modulo H, so about P / F bytes are sent at a time. This is one of the three
    parts of arXiv:2501.18512. Its second part, in which a sum overlaps with later steps and the result is mixed with
    the device's own parameters, is not implemented. Its third part are narrow numbers on the wire: four bits there,
    floats of ``wire_dtype`` here.

    Args:
        inner: the optimizer of each device. It gets the gradients of this device alone. In the paper it is AdamW.
        outer: the optimizer of the anchor. None: that of the paper, ``optax.sgd(0.7, momentum=0.9, nesterov=True)``.
            With several fragments its trees have None in place of the leaves of other fragments.
        every: the number of steps between two sums of the same parameters, H, from 1. In the paper it is 500.
        axis_name: the name of the axis of data parallelism, or a tuple of names.
        fragments: the number of fragments, F, from 1, at most ``every`` and at most the number of leaves. Default 1.
        wire_dtype: the floating-point dtype in which outer gradients are sent, such as ``jnp.bfloat16``. They are added
            in float32. Default None: the dtype of the parameters.

    Returns:
        The optimizer. Its ``update`` takes the gradients of this device's own examples, and the parameters. It returns
        this device's updates, of the shapes and dtypes that ``inner`` gives them. The anchor is the same on all devices
        to the last bit. After an outer step the parameters are equal to it up to the rounding of the sum of parameters
        and updates. The state is a :class:`DiLoCoState`.

    Raises:
        TypeError: ``every`` or ``fragments`` is no integer; ``wire_dtype`` is no floating-point dtype.
        ValueError: ``every`` or ``fragments`` is below 1; there are more fragments than steps or leaves; ``update``
            gets no parameters; by JAX's types, the gradients are summed already.
        NameError: the axis is not bound.

    Order:
        Program order: one mean of each fragment in every ``every`` calls of ``update``.

    Source:
        Douillard et al., arXiv:2311.08105, algorithm 1, and arXiv:2501.18512, section 3.1.

    Example:
        >>> import jax, optax
        >>> import jax.numpy as jnp
        >>> optimizer = diloco(optax.sgd(0.5), optax.sgd(1.0), 2, "batch")  # this outer optimizer goes to the mean
        >>> def train(x):
        ...     w = jnp.float32(0)
        ...     state = optimizer.init(w)
        ...     for _ in range(2):
        ...         updates, state = optimizer.update(w - x, state, w)
        ...         w = optax.apply_updates(w, updates)
        ...     return w, state.anchor
        >>> jax.vmap(train, axis_name="batch")(jnp.array([0.0, 4.0]))
        (Array([1.5, 1.5], dtype=float32), Array([1.5, 1.5], dtype=float32))
    """
    where = "diloco"
    every = _at_least_one(where, "every", every)
    count = _at_least_one(where, "fragments", fragments)
    if count > every:
        remedy = "Each fragment has a step of its own, so choose at most as many as there are steps."
        raise ValueError(message(f"parallel.{where}", f"at most every={every} fragments", f"fragments={count}", remedy))
    wire = checked_wire_dtype(where, wire_dtype)
    inner = optax.with_extra_args_support(inner)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    outer = optax.with_extra_args_support(outer)

    def init(params: Tree) -> DiLoCoState:
        axis_size(where, axis_name)
        anchor = jax.tree.map(jnp.array, params)  # a copy: a program may donate both the parameters and the state
        outers = tuple(outer.init(_part(anchor, places)) for places in _places_of_fragments(where, params, count))
        return as_varying(DiLoCoState(jnp.int32(0), inner.init(params), anchor, outers), axis_name)

    def outer_step(updates: Tree, params: Tree, anchor: Tree, outer_state: Any) -> tuple[Tree, Tree, Any]:
        """Returns the updates that set the parameters to the new anchor, the anchor, and the outer state."""
        moved = optax.apply_updates(params, updates)
        outer_grads = _mean(jax.tree.map(jnp.subtract, anchor, moved), axis_name, wire)
        outer_updates, outer_state = outer.update(outer_grads, outer_state, anchor)
        anchor = optax.apply_updates(anchor, outer_updates)
        return _updates_to(anchor, params, updates), anchor, outer_state

    def update(
        grads: Tree, state: DiLoCoState, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, DiLoCoState]:
        check_not_summed(where, grads, axis_name)
        check_params_given(where, params)
        updates, inner_state = inner.update(grads, state.inner, params, **extra_args)
        phase = (state.phase + 1) % every
        new_updates, new_anchor = jax.tree.leaves(updates), jax.tree.leaves(state.anchor)
        outers = []
        for f, places in enumerate(_places_of_fragments(where, params, count)):
            # The phase is the same on all devices, so all of them take the same branch.
            *parts, outer_state = lax.cond(
                phase == f * every // count,
                lambda *args: as_varying(outer_step(*args), axis_name),
                lambda updates, _, anchor, outer_state: as_varying((updates, anchor, outer_state), axis_name),
                *(_part(tree, places) for tree in (updates, params, state.anchor)),
                state.outer[f],
            )
            outers.append(outer_state)
            for leaves, part in zip((new_updates, new_anchor), parts, strict=True):
                for i, x in zip(places, jax.tree.leaves(part), strict=True):
                    leaves[i] = x
        structure = jax.tree.structure(params)
        new_state = DiLoCoState(phase, inner_state, structure.unflatten(new_anchor), tuple(outers))
        return structure.unflatten(new_updates), as_varying(new_state, axis_name)

    return optax.GradientTransformationExtraArgs(init, update)


def _places_of_fragments(where: str, params: Tree, count: int) -> list[list[int]]:
    """Returns for each fragment the indices of its leaves, in ascending order."""
    leaves = jax.tree.leaves(params)
    if count > len(leaves):
        error = message(
            f"parallel.{where}",
            f"at least a leaf for each of fragments={count}",
            f"parameters with {len(leaves)} leaves",
            "Choose fewer fragments, or keep each layer in arrays of its own.",
        )
        raise ValueError(error)
    nbytes = [x.size * x.dtype.itemsize for x in map(jnp.asarray, leaves)]
    places: list[list[int]] = [[] for _ in range(count)]
    # Greedy partition: the largest leaf comes first, and each leaf goes to the smallest fragment so far.
    for i in sorted(range(len(leaves)), key=lambda i: -nbytes[i]):
        min(places, key=lambda own: (sum(nbytes[j] for j in own), len(own))).append(i)
    return [sorted(own) for own in places]


def _part(tree: Tree, places: list[int]) -> Tree:
    """Returns the tree with None in place of the leaves that are not at ``places``."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([x if i in places else None for i, x in enumerate(leaves)])


def _mean(tree: Tree, axis_name: AxisName, wire_dtype: Any) -> Tree:
    """Returns the mean over the devices. Floats are sent in ``wire_dtype`` if given, other arrays in their dtype."""
    devices = axis_size("diloco", axis_name)
    leaves, structure = jax.tree.flatten(tree)
    narrow = [wire_dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    means = iter(_mean_on_wire([x for x, yes in zip(leaves, narrow, strict=True) if yes], axis_name, wire_dtype))
    sums = iter(lax.psum([x for x, yes in zip(leaves, narrow, strict=True) if not yes], axis_name))
    return structure.unflatten([next(means) if yes else next(sums) / devices for yes in narrow])


def _mean_on_wire(arrays: list[Array], axis_name: AxisName, wire_dtype: Any) -> list[Array]:
    """Returns the means of arrays that are sent in ``wire_dtype``, with the bytes of an allreduce of such numbers."""
    means = [x.astype(wire_dtype) for x in mean_slices("diloco", arrays, axis_name, wire_dtype)]
    gathered = gather_whole(means, [Sliced(x.shape) for x in arrays], axis_name)
    return [x.astype(like.dtype) for x, like in zip(gathered, arrays, strict=True)]


def _updates_to(target: Tree, params: Tree, like: Tree) -> Tree:
    """Returns the updates that change ``params`` into ``target``, in the dtypes of ``like``."""
    return jax.tree.map(lambda t, p, u: (t - p).astype(u.dtype), target, params, like)


def _at_least_one(where: str, name: str, value: Any) -> int:
    value = integer(f"parallel.{where}", None, name, value)
    if value < 1:
        remedy = "Choose a positive number."
        raise ValueError(message(f"parallel.{where}", f"{name} to be at least 1", f"{name}={value}", remedy))
    return value
