"""Makes each device's elements of new parameters, from a function that would make the whole parameters.

Most initializers compute element i of an array from a key and from i alone: random bits, then elementwise operations.
So the program of the initializer is read backward from the result, for the elements that a device has:

    y[i] = f(a[i], b[i])             for elementwise operations
    y[i] = a[i'], i' from i          for broadcasts, reshapes, transposes, slices, concatenations
    y[i] = threefry(key, i)          for random bits, since JAX's generator counts by elements

Operations that no result needs are not computed, such as the forward pass inside ``init`` of a Flax module. Any other
operation is computed whole, and so are its operands.

Source: counter-based generators, Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011; JAX's
``jax_threefry_partitionable``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.extend.random import threefry2x32_p

from pycollective.errors import message
from pycollective.jax_support import jax_internals
from pycollective.jax_support.jaxprs import called_jaxpr, evaluate, reads, rebind
from pycollective.parallel.axes import AxisName, axis_size, name_of, names_of, slice_length, vary
from pycollective.parallel.cut_values import ELEMENTWISE, IDENTITIES
from pycollective.parallel.elementwise import check_numbers

Array = Any
Tree = Any
Shape = tuple[int, ...]

_ELEMENTWISE = ELEMENTWISE | IDENTITIES | {"bitcast_convert_type"}


def initialized_slices(init: Callable[..., Tree], axis_name: AxisName, *, stacked: Tree = False) -> Callable[..., Tree]:
    """Makes the slices of parameters without the whole parameters: ``shard(init(*args), axis_name)``, with its numbers.

    An array whose elements are random bits, constants, and elementwise operations on these, is never whole on a device:
    the initializers of JAX, Flax and Equinox by normal, truncated normal and uniform distributions, zeros and ones. An
    array that other operations compute, such as the QR decomposition of an orthogonal initializer or a ``lax.scan``, is
    whole on each device for a while.

    Args:
        init: a function that returns the whole parameters, a tree of arrays with less than 2 ** 31 elements each. It
            must make the same on all devices, from the same arguments.
        axis_name: the axis of :func:`shard`, a name or a tuple of names.
        stacked: which arrays are layers that are stacked along a first axis, which slices keep: a bool, or a tree of
            bools that is a prefix of the parameters. Default False.

    Returns:
        A function of the arguments of ``init``, which are arrays, keys or trees of them. It returns the slices that
        :func:`shard` makes: vectors of length L, or ``(layers, L)`` for stacked arrays.

    Raises:
        TypeError: a leaf is not an array of numbers: a key of :mod:`jax.random`, for example.
        ValueError: an array has 2 ** 31 elements or more.
        NameError: the axis is not bound.

    Differentiation:
        None.

    Order:
        No communication.

    Source:
        :func:`shard`; the numbers are those of :mod:`jax.random` with ``jax_threefry_partitionable``, the default.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> init = lambda key: {"w": jax.random.normal(key, (3, 3)), "b": jnp.zeros(3)}
        >>> make = jax.vmap(initialized_slices(init, "data"), None, axis_name="data", axis_size=2)
        >>> slices = make(jax.random.key(0))
        >>> slices["w"].shape, bool((slices["w"].ravel()[:9] == init(jax.random.key(0))["w"].ravel()).all())
        ((2, 5), True)
    """

    def places(shape: Shape, is_stacked: bool) -> tuple[Array, Array | None]:
        layers, size = (shape[0], math.prod(shape[1:])) if is_stacked else (None, math.prod(shape))
        length = slice_length(size, axis_size("initialized_slices", axis_name))
        within = lax.axis_index(axis_name) * length + jnp.arange(length, dtype=jnp.int32)
        index = jnp.minimum(within, max(size - 1, 0))
        if layers is None:
            return index, within < size
        starts = size * jnp.arange(layers, dtype=jnp.int32)
        return starts[:, None] + index[None], jnp.broadcast_to(within < size, (layers, length))

    def make(*args: Any) -> Tree:
        return _made("initialized_slices", init, args, stacked, places)

    return make


def initialized_parts(init: Callable[..., Tree], specs: Tree) -> Callable[..., Tree]:
    """Makes a device's parts of parameters without the whole parameters, with the same numbers.

    It is for parameters that are cut along their dimensions, as in tensor parallelism. See :func:`initialized_slices`
    for the arrays that are never whole.

    Args:
        init: as for :func:`initialized_slices`.
        specs: how the parameters are cut, as in the ``out_specs`` of ``shard_map``: a
            :class:`jax.sharding.PartitionSpec`, or a tree of them that is a prefix of the parameters.

    Returns:
        A function of the arguments of ``init``. It returns this device's parts: each dimension that names axes is
        divided by their size.

    Raises:
        TypeError: a leaf is not an array of numbers: a key of :mod:`jax.random`, for example.
        ValueError: a dimension is no multiple of the size of its axes; a spec has more dimensions than the array; an
            array has 2 ** 31 elements or more.
        NameError: an axis is not bound.

    Differentiation:
        None.

    Order:
        No communication.

    Example:
        >>> import jax
        >>> init = lambda key: jax.random.normal(key, (4, 6))
        >>> make = initialized_parts(init, jax.P(None, "model"))
        >>> parts = jax.vmap(make, None, axis_name="model", axis_size=2)(jax.random.key(0))
        >>> parts.shape, bool((parts[1] == init(jax.random.key(0))[:, 3:]).all())
        ((2, 4, 3), True)
    """

    def places(shape: Shape, spec: Any) -> tuple[Array, Array | None]:
        cuts = [() if names is None else names_of(names) for names in spec]
        expected = f"a spec of at most {len(shape)} dimensions, with sizes of axes that divide {shape}"
        index = jnp.zeros((), jnp.int32)
        for i, length in enumerate(shape):
            names = tuple(cuts[i]) if i < len(cuts) else ()
            devices = axis_size("initialized_parts", names) if names else 1
            _check(length % devices == 0, expected, f"{spec}, with {devices} devices along {list(names)}")
            own = length // devices
            start = lax.axis_index(names) * own if names else 0
            coordinates = (start + jnp.arange(own, dtype=jnp.int32)) * math.prod(shape[i + 1 :])
            index = index[..., None] + coordinates.reshape((1,) * i + (own,))
        _check(len(cuts) <= len(shape), expected, f"{spec}")
        return index, None

    def make(*args: Any) -> Tree:
        return _made("initialized_parts", init, args, specs, places)

    return make


def _check(is_right: bool, expected: str, got: str) -> None:
    if not is_right:
        remedy = "Cut dimensions that are multiples of the number of devices."
        raise ValueError(message("parallel.initialized_parts", expected, got, remedy))


def _made(
    where: str,
    init: Callable[..., Tree],
    args: tuple[Any, ...],
    prefix: Tree,
    places: Callable[[Shape, Any], tuple[Array, Array | None]],
) -> Tree:
    """Returns ``init(*args)``, of each array the elements at some places.

    Args:
        where: the public function.
        init: the initializer.
        args: its arguments.
        prefix: a tree that is a prefix of the parameters, with the second argument of ``places`` for each array.
        places: a function of a shape that returns the flat indices of the elements, and where they count; elsewhere
            are zeros. None: all count.
    """
    closed, shapes = jax.make_jaxpr(lambda *args: jax.tree.map(jnp.asarray, init(*args)), return_shape=True)(*args)
    check_numbers(where, shapes)
    flat = jax.tree.leaves(args)
    closed = jax.make_jaxpr(lambda *args: evaluate(closed, _inlined, *args))(*flat)
    reader = _Reader(closed, flat)
    options = jax.tree.leaves(jax.tree.broadcast(prefix, shapes))
    paths = jax.tree_util.tree_leaves_with_path(shapes)
    leaves = []
    for (path, like), option, var in zip(paths, options, closed.jaxpr.outvars, strict=True):
        if like.size >= 2**31:
            remedy = "Split the array."
            got = f"{like.size} at {name_of(path)}"
            raise ValueError(message(f"parallel.{where}", "arrays of less than 2 ** 31 elements", got, remedy))
        index, counts = places(like.shape, option)
        x = reader.at(var, index) if like.size else jnp.zeros(index.shape, like.dtype)
        leaves.append(x if counts is None else jnp.where(counts, x, jnp.zeros_like(x)))
    return jax.tree.structure(shapes).unflatten(leaves)


def _inlined(eqn: JaxprEqn, operands: list[Array]) -> Any:
    """Evaluates an equation; for a call of another program, the equations inside it."""
    inner = eqn.params["jaxpr"] if eqn.primitive.name in ("jit", "pjit", "closed_call") else called_jaxpr(eqn)
    return rebind(eqn, operands) if inner is None else evaluate(inner, _inlined, *operands)


class _Reader:
    """Computes elements of the results of a program.

    A *whole* value has all its elements. It is computed once.
    """

    def __init__(self, closed: ClosedJaxpr, args: list[Array]) -> None:
        jaxpr = closed.jaxpr
        self._wholes: dict[Var, Array] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True)
        )
        self._producers = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        self._eqns = jaxpr.eqns
        self._found: dict[tuple[Var, int], tuple[Array, Array]] = {}

    def whole(self, atom: Any) -> Array:
        """Returns all elements of a value."""
        if isinstance(atom, Literal):
            return atom.val
        needed: set[int] = set()
        missing = [atom]
        while missing:
            var = missing.pop()
            if var not in self._wholes and self._producers[var] not in needed:
                needed.add(self._producers[var])
                missing.extend(reads(self._eqns[self._producers[var]]))
        for i in sorted(needed):
            eqn = self._eqns[i]
            results = rebind(eqn, [x.val if isinstance(x, Literal) else self._wholes[x] for x in eqn.invars])
            self._wholes.update(zip(eqn.outvars, results, strict=True))
        return self._wholes[atom]

    def at(self, atom: Any, index: Array) -> Array:
        """Returns the elements of a value at flat indices, in an array of the shape of ``index``."""
        if atom.aval.size == 1:
            x = jnp.asarray(self.whole(atom)).reshape(())
            return vary(lax.broadcast(x, index.shape), jax_internals.varying_axes(index))
        if isinstance(atom, Literal) or atom in self._wholes:
            return vary(self._taken(atom, index), jax_internals.varying_axes(index))
        known = self._found.get((atom, id(index)))
        if known is None:
            eqn = self._eqns[self._producers[atom]]
            # The index is kept, too: the id of an object that is gone may become that of another one.
            elements = vary(self._elements(eqn, atom, index), jax_internals.varying_axes(index))
            known = self._found[atom, id(index)] = elements, index
        return known[0]

    def _taken(self, atom: Any, index: Array) -> Array:
        return jnp.ravel(self.whole(atom))[index]

    def _elements(self, eqn: JaxprEqn, atom: Any, index: Array) -> Array:
        name, shape = eqn.primitive.name, atom.aval.shape
        read = functools.partial(self._read, shape=shape, index=index)
        if name in _ELEMENTWISE and len(eqn.outvars) == 1 and not _changes_width(eqn):
            return rebind(eqn, [read(operand) for operand in eqn.invars])[0]
        if name == "squeeze" or (name == "reshape" and eqn.params["dimensions"] is None):
            return self.at(eqn.invars[0], index)
        if name == "random_bits":
            return self._random_bits(eqn, index)
        if name == "iota":
            along = _coordinates(shape, index)[eqn.params["dimension"]]
            return along.astype(eqn.params["dtype"])
        if name == "broadcast_in_dim":
            source = eqn.invars[0].aval.shape
            coordinates = _coordinates(shape, index)
            kept = [coordinates[i] for i in eqn.params["broadcast_dimensions"]]
            return self.at(eqn.invars[0], _flat(source, kept) if kept else index)
        if name == "transpose":
            source = eqn.invars[0].aval.shape
            coordinates = _coordinates(shape, index)
            order = np.argsort(eqn.params["permutation"])
            return self.at(eqn.invars[0], _flat(source, [coordinates[i] for i in order]))
        if name == "slice":
            starts = eqn.params["start_indices"]
            strides = eqn.params["strides"] or (1,) * len(shape)
            coordinates = [
                start + stride * x for start, stride, x in zip(starts, strides, _coordinates(shape, index), strict=True)
            ]
            return self.at(eqn.invars[0], _flat(eqn.invars[0].aval.shape, coordinates))
        if name == "concatenate":
            return self._concatenated(eqn, shape, index)
        return self._taken(atom, index)

    def _read(self, operand: Any, shape: Shape, index: Array) -> Array:
        """Returns the elements of an operand of an elementwise operation, whose dimensions of length 1 are repeated."""
        source = operand.aval.shape
        if source == shape or operand.aval.size == 1:
            return self.at(operand, index)
        return self.at(operand, _flat(source, _coordinates(shape, index)))

    def _random_bits(self, eqn: JaxprEqn, index: Array) -> Array:
        (keys,) = eqn.invars
        is_threefry = "fry" in str(keys.aval.dtype) and jax.config.jax_threefry_partitionable
        if not is_threefry:
            return self._taken(eqn.outvars[0], index)
        data = jax.random.key_data(self.whole(keys)).reshape(-1, 2)
        of_each = math.prod(eqn.params["shape"])
        number, count = lax.div(index, jnp.int32(of_each)), lax.rem(index, jnp.int32(of_each))
        first, second = data[number, 0], data[number, 1]
        count = vary(count.astype(jnp.uint32), jax_internals.varying_axes(first))
        high = jnp.zeros_like(count)
        bits = threefry2x32_p.bind(first, second, high, count)
        width = eqn.params["bit_width"]
        dtype = eqn.outvars[0].aval.dtype
        if width == 64:
            return lax.shift_left(bits[0].astype(dtype), jnp.asarray(32, dtype)) | bits[1].astype(dtype)
        return (bits[0] ^ bits[1]).astype(dtype)

    def _concatenated(self, eqn: JaxprEqn, shape: Shape, index: Array) -> Array:
        dimension = eqn.params["dimension"]
        coordinates = _coordinates(shape, index)
        along, first = coordinates[dimension], 0
        result = None
        for operand in eqn.invars:
            length = operand.aval.shape[dimension]
            if operand.aval.size:
                own = list(coordinates)
                own[dimension] = jnp.clip(along - first, 0, length - 1)
                x = self.at(operand, _flat(operand.aval.shape, own))
                result = x if result is None else jnp.where(along >= first, x, result)
            first += length
        return result


def _changes_width(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "bitcast_convert_type" and eqn.invars[0].aval.shape != eqn.outvars[0].aval.shape


def _coordinates(shape: Shape, index: Array) -> list[Array]:
    """Returns the index of each dimension, for flat indices of an array of this shape."""
    found = []
    for i, length in enumerate(shape):
        stride = math.prod(shape[i + 1 :])
        found.append(lax.rem(lax.div(index, jnp.int32(max(stride, 1))), jnp.int32(max(length, 1))))
    return found


def _flat(shape: Shape, coordinates: list[Array]) -> Array:
    """Returns the flat indices of an array of this shape; in a dimension of length 1 the index is 0."""
    index = jnp.zeros_like(coordinates[0])
    for i, (length, x) in enumerate(zip(shape, coordinates, strict=True)):
        if length > 1:
            index = index + x * math.prod(shape[i + 1 :])
    return index
