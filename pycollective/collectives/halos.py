"""Exchanges between neighbours in a Cartesian grid of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.collectives import checks
from pycollective.collectives.checks import Array, PyTree
from pycollective.errors import fail, integer, sequence
from pycollective.primitives import dtypes, exchanges
from pycollective.primitives.messages import barrier
from pycollective.primitives.passed import EMPTY_TREE, Passed
from pycollective.ranks.communicator import CartCommunicator
from pycollective.ranks.participants import Participants, Perm
from pycollective.ranks.world import given_or_world

_WIDTH_REMEDY = "Pass 1, say, or for each axis of the grid a number or a pair (before, after)."


def update_halos(
    x: PyTree,
    comm: CartCommunicator,
    width: int | Sequence[int | tuple[int, int]] = 1,
    *,
    axes: Sequence[int] | None = None,
) -> PyTree:
    """Copies the neighbours' edges into the halos of this rank's arrays, along each axis of a grid of ranks.

    Each rank has a block of a larger array, and around it a halo: at each end of a dimension that is cut some entries
    of the neighbour's block. With ``b`` entries before and ``a`` after the block, of ``n`` in all,
    ``y[:b] = x_below[n - a - b : n - a]`` and ``y[n - a :] = x_above[b : b + a]``. Beyond an open edge of the grid the
    halo keeps its values, a boundary condition for instance.

    The axes are exchanged one after another, so corners get the entries of diagonal neighbours. All arrays travel in
    one message to each neighbour, whatever their dtypes.

    Args:
        x: an array or a pytree of arrays, the halos included. Neighbours along an axis must have equal shapes in the
            other dimensions; blocks along the axis may have different lengths.
        comm: a communicator of :func:`make_cart`.
        width: the widths of the halos, the same on all ranks: one number for all, or for each axis of the grid a number
            or a pair ``(before, after)``. Default 1.
        axes: for each axis of the grid the dimension of the arrays that it cuts. Negative numbers count from the last
            dimension. Default: the first dimensions.

    Returns:
        The arrays with the new halos, of the shapes and dtypes of ``x``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value; for a block that is
            narrower than the halo that it fills.

    Shape:
        That of ``x``.

    Dtypes:
        All, and keys of :mod:`jax.random`.

    Differentiation:
        The transpose adds the cotangents of the halos to those of the neighbours' edges. Cotangents of different dtypes
        travel in different messages.

    Order:
        Program order: two permutations of the ranks of a line, for each axis of the grid.

    Source:
        MPI_Neighbor_alltoall (MPI standard, 8.6).

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> cart = pc.make_cart((0,), periods=True)
        >>> below, above = cart.shift(0)
        >>> height, wet = jnp.full(4, cart.rank), jnp.ones((4, 2), bool)  # the block has two entries
        >>> height, wet = pc.update_halos((height, wet), cart)
        >>> height.tolist() == [below, cart.rank, cart.rank, above]
        True
    """
    where = "update_halos"
    grid = given_or_world(where, comm)
    if not isinstance(grid, CartCommunicator):
        fail(
            TypeError, where, grid, "a Cartesian communicator", repr(comm), "Pass one of pycollective.make_cart(dims)."
        )
    widths = _widths(where, grid, width)
    cut = tuple(range(len(grid.dims))) if axes is None else sequence(where, grid, "axes", axes)
    if len(cut) != len(grid.dims):
        fail(
            ValueError,
            where,
            grid,
            f"axes for the {len(grid.dims)} axes of the grid",
            cut,
            "Name a dimension for each.",
        )
    leaves, tree = jax.tree.flatten(x)
    fields = [checks.array(where, grid, leaf) for leaf in leaves]
    along = [[checks.axis(where, grid, "axes", number, field.ndim) for number in cut] for field in fields]
    for field, numbers in zip(fields, along, strict=True):
        _check_lengths(where, grid, field, numbers, widths)
    for axis, (before, after) in enumerate(widths):
        fields = _update_along(grid, axis, fields, [numbers[axis] for numbers in along], before, after)
    return jax.tree.unflatten(tree, fields)


def _widths(where: str, grid: CartCommunicator, width: int | Sequence[int | tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the widths before and after the block for each axis of the grid."""
    given = list(width) if isinstance(width, Sequence) else [width] * len(grid.dims)
    pairs = [tuple(each) if isinstance(each, Sequence) else (each, each) for each in given]
    if len(pairs) != len(grid.dims) or any(len(pair) != 2 for pair in pairs):
        fail(ValueError, where, grid, f"a width for each of {len(grid.dims)} axes", repr(width), _WIDTH_REMEDY)
    widths = [(integer(where, grid, "width", b), integer(where, grid, "width", a)) for b, a in pairs]
    if min(map(min, widths)) < 0:
        fail(ValueError, where, grid, "widths of zero or more", repr(width), _WIDTH_REMEDY)
    return widths


def _check_lengths(
    where: str, grid: CartCommunicator, field: Array, along: Sequence[int], widths: Sequence[tuple[int, int]]
) -> None:
    """Raises ValueError if two axes of the grid cut one dimension, or if a block is narrower than a halo."""
    if len(set(along)) < len(along):
        fail(ValueError, where, grid, "a dimension of its own for each axis of the grid", along, "Name each one once.")
    for dimension, (before, after) in zip(along, widths, strict=True):
        block, least = field.shape[dimension] - before - after, max(before, after, 1)
        if block < least:
            fail(
                ValueError,
                where,
                grid,
                f"{least} or more entries between halos of {before} and {after} in dimension {dimension}",
                f"{block} of shape {tuple(field.shape)}",
                "Include the halos in the array, or use fewer ranks.",
            )


def _update_along(
    grid: CartCommunicator, axis: int, fields: list[Array], along: Sequence[int], before: int, after: int
) -> list[Array]:
    """Updates the halos along one axis of the grid; ``along``: the dimension of each field that the axis cuts."""
    n, ring, coord = grid.dims[axis], grid.periods[axis], grid.coords[axis]
    up = tuple((i, (i + 1) % n) for i in range(n) if ring or i < n - 1)
    down = tuple((dest, source) for source, dest in up)
    lengths = [field.shape[dimension] for field, dimension in zip(fields, along, strict=True)]
    # For each direction: the width of the message, where its entries begin, where they go, and whether one comes.
    steps = [
        (up, before, [length - after - before for length in lengths], [0] * len(fields), ring or coord > 0),
        (down, after, [before] * len(fields), [length - after for length in lengths], ring or coord < n - 1),
    ]
    updated = fields
    for perm, width, starts, places, exists in steps:
        if width == 0 or not perm:
            continue
        edges = [
            lax.slice_in_dim(field, start, start + width, axis=dimension)
            for field, start, dimension in zip(fields, starts, along, strict=True)
        ]
        if n > 1:
            edges = _permute_together(grid._line(axis), perm, edges)

        def written(
            field: Array, edge: Array, place: int, dimension: int, width: int = width, new: bool = exists
        ) -> Array:
            # A choice, and not an "if": a rank at an open edge must have the same derivatives as all others.
            old = lax.slice_in_dim(field, place, place + width, axis=dimension)
            return lax.dynamic_update_slice_in_dim(field, jnp.where(new, edge, old), place, dimension)

        updated = list(map(written, updated, edges, places, along))
    return updated


def _permute_together(comm: Participants, perm: Perm, xs: Sequence[Array]) -> list[Array]:
    """Permutes arrays between ranks in one message: those of one dtype as a vector, those of several as bytes."""
    if not xs:
        barrier(comm, EMPTY_TREE)  # another rank may pass arrays
        return []
    wires = [dtypes.to_wire(x) for x in xs]
    permute = _by_dtype if len({wire.dtype for wire in wires}) == 1 else _as_bytes
    return [dtypes.from_wire(y, x) for y, x in zip(permute(comm, perm, wires), xs, strict=True)]


def _by_dtype(comm: Participants, perm: Perm, xs: Sequence[Array], *, tangents: bool = False) -> list[Array]:
    """Permutes arrays, in a message for each dtype. ``tangents``: whether they are tangents of arrays sent before."""
    moved: dict[int, Array] = {}
    for dtype in dict.fromkeys(x.dtype for x in xs):
        places = [place for place, x in enumerate(xs) if x.dtype == dtype]
        vector = jnp.concatenate([xs[place].ravel() for place in places])
        passed = Passed.of([vector]).tangent() if tangents else None
        vector = exchanges.ppermute(vector, comm=comm, perm=perm, passed=passed)
        ends = np.cumsum([xs[place].size for place in places])
        parts = jnp.split(vector, ends[:-1])
        moved |= {place: part.reshape(xs[place].shape) for place, part in zip(places, parts, strict=True)}
    return [moved[place] for place in range(len(xs))]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _as_bytes(comm: Participants, perm: Perm, xs: Sequence[Array]) -> list[Array]:
    """Permutes arrays of several dtypes in one message."""
    integers = [dtypes.bits(x) for x in xs]
    [moved] = _by_dtype(comm, perm, [jnp.concatenate([_bytes(each) for each in integers])])
    ends = np.cumsum([each.size * each.dtype.itemsize for each in integers])
    parts = jnp.split(moved, ends[:-1])
    return [dtypes.from_bits(_from_bytes(part, each), x) for part, each, x in zip(parts, integers, xs, strict=True)]


@_as_bytes.defjvp
def _as_bytes_jvp(comm: Participants, perm: Perm, primals: Any, tangents: Any) -> tuple[list[Array], list[Array]]:
    # Bytes have no derivatives, and the permutation is linear.
    ((xs,), (given,)) = primals, tangents
    places = [place for place, t in enumerate(given) if t.dtype != jax.dtypes.float0]
    moved = dict(zip(places, _by_dtype(comm, perm, [given[i] for i in places], tangents=True), strict=True))
    return _as_bytes(comm, perm, xs), [moved.get(place, t) for place, t in enumerate(given)]


def _bytes(x: Array) -> Array:
    """The bytes of unsigned integers, as a vector."""
    return lax.bitcast_convert_type(x, jnp.uint8).ravel()


def _from_bytes(x: Array, like: Array) -> Array:
    """The inverse of :func:`_bytes`, for an array of the shape and dtype of ``like``."""
    size = like.dtype.itemsize
    return lax.bitcast_convert_type(x.reshape(like.shape if size == 1 else (*like.shape, size)), like.dtype)
