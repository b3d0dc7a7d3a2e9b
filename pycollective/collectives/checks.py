"""Checks of arguments when a program is traced, and what the public functions share besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from pycollective.errors import fail, integer
from pycollective.primitives import dtypes
from pycollective.primitives.blocks import cut
from pycollective.ranks.participants import Participants
from pycollective.transport.mpi import MPI

Array = jax.Array
PyTree = Any
Groups = Sequence[Sequence[int]] | None


def array(where: str, comm: Participants, leaf: Any) -> Array:
    """A leaf as an array. Python scalars take JAX's default dtypes."""
    if isinstance(leaf, jax.core.Tracer):
        return leaf
    try:
        return jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        fail(
            TypeError,
            where,
            comm,
            "arrays, or pytrees of them",
            f"{type(leaf).__name__} ({str(error).splitlines()[0]})",
            "Convert it to an array first.",
        )


def map_arrays(where: str, comm: Participants, function: Callable[[Array], Any], tree: PyTree) -> PyTree:
    """Maps ``function`` over the leaves of ``tree`` as arrays."""
    return jax.tree.map(lambda leaf: function(array(where, comm, leaf)), tree)


def rank(where: str, comm: Participants, name: str, value: Any) -> int:
    """A rank of ``comm``."""
    rank = integer(where, comm, name, value)
    if not 0 <= rank < comm.size:
        fail(
            ValueError,
            where,
            comm,
            f"{name} from 0 to {comm.size - 1}",
            rank,
            "Ranks count from 0 in each communicator.",
        )
    return rank


def axis(where: str, comm: Participants, name: str, value: Any, ndim: int) -> int:
    """An axis of an array of ``ndim`` axes, counted from the front."""
    axis = integer(where, comm, name, value)
    if not -ndim <= axis < ndim:
        fail(ValueError, where, comm, f"{name} from {-ndim} to {ndim - 1}", axis, "Choose an axis of the array.")
    return axis % ndim


def op(where: str, comm: Participants, op: Any) -> str:
    """The name of a reduction."""
    if op not in dtypes.OPS:
        fail(ValueError, where, comm, f"op to be one of {list(dtypes.OPS)}", repr(op), "Choose one of them.")
    return str(op)


def reducible(where: str, comm: Participants, x: Array, op: str) -> Array:
    """``x``, whose dtype has the reduction ``op``."""
    if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_):
        fail(TypeError, where, comm, f"a dtype that {op} is defined for", x.dtype, "Reduce numbers or bools.")
    if op in ("min", "max") and jnp.issubdtype(x.dtype, jnp.complexfloating):
        fail(
            TypeError,
            where,
            comm,
            f"a dtype that {op} is defined for",
            x.dtype,
            "Complex numbers have no order: reduce abs(x), or the parts.",
        )
    return x


def group(where: str, comm: Participants, groups: Groups, *, equal: bool) -> Participants:
    """This rank's group."""
    if groups is None:
        return comm
    canonical = tuple(tuple(integer(where, comm, "axis_index_groups", rank) for rank in group) for group in groups)
    if sorted(rank for group in canonical for rank in group) != list(range(comm.size)):
        fail(
            ValueError,
            where,
            comm,
            f"axis_index_groups with each rank from 0 to {comm.size - 1} once",
            canonical,
            "List every rank in exactly one group.",
        )
    if equal and len({len(group) for group in canonical}) > 1:
        fail(
            ValueError, where, comm, "axis_index_groups of equal sizes", canonical, "The result's shape depends on it."
        )
    return comm.groups(canonical)


def divide(where: str, comm: Participants, x: Array, axis: int) -> Array:
    """Cuts ``axis`` into (size, rest) and moves the first of them to the front."""
    if x.shape[axis] % comm.size:
        fail(
            ValueError,
            where,
            comm,
            f"axis {axis} to divide by the {comm.size} ranks",
            f"shape {tuple(x.shape)}",
            "Pad it, or use a communicator whose size divides it.",
        )
    return cut(x, axis, comm.size)


def counts_ranks(where: str, comm: Participants, x: Array, axis: int, name: str) -> Array:
    """Checks that ``axis`` has one entry for each rank and moves it to the front."""
    if x.shape[axis] != comm.size:
        fail(
            ValueError,
            where,
            comm,
            f"{name} {axis} of length {comm.size}, one entry for each rank",
            f"shape {tuple(x.shape)}",
            "Reshape the array, or pass tiled=True where the operation has it.",
        )
    return jnp.moveaxis(x, axis, 0)


def tag(where: str, comm: Participants, name: str, value: int | None, wildcard: int | None) -> int:
    """A message tag. ``wildcard``: what None stands for, or None if a tag must be given."""
    if value is None and wildcard is not None:
        return wildcard
    tag = integer(where, comm, name, value)
    largest = cast("int", MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))  # MPI attaches it to the world alone
    if not 0 <= tag <= largest:
        fail(ValueError, where, comm, f"{name} from 0 to {largest}", tag, "MPI has no other tags.")
    return tag


def peer(where: str, comm: Participants, name: str, value: int | None, wildcard: int) -> int:
    """A rank of ``comm``, or ``wildcard`` for None."""
    return wildcard if value is None else rank(where, comm, name, value)
