"""Checks of the public functions' arguments, made when a program is traced.

Each check returns the argument in one form, or raises an error that names the public function ``where``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp

from pycollective.errors import fail, integer
from pycollective.primitives import dtypes
from pycollective.primitives.blocks import cut
from pycollective.primitives.messages import StatusPlace, barrier
from pycollective.primitives.passed import EMPTY_TREE, leaves_of
from pycollective.ranks.participants import Participants
from pycollective.transport.message_constants import MessageConstant
from pycollective.transport.mpi import MPI

Array = jax.Array
PyTree = Any
Like: TypeAlias = jax.Array | jax.ShapeDtypeStruct
Groups = Sequence[Sequence[int]] | None


def array(where: str, comm: Participants, leaf: Any) -> Array:
    """Returns a leaf as an array. Python scalars take JAX's default dtypes."""
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        return jnp.asarray(leaf)
    except (TypeError, ValueError, OverflowError) as error:
        fail(
            TypeError,
            where,
            comm,
            "arrays, or pytrees of them",
            f"{type(leaf).__name__} ({str(error).splitlines()[0]})",
            "Convert it to an array first.",
        )


def template(where: str, comm: Participants, leaf: Any) -> Like:
    """Returns a leaf that tells the shape and dtype of an array that arrives, as an array if it is no template."""
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else array(where, comm, leaf)


def filled(template: Like) -> Array:
    """Returns what stands for an array that does not arrive: the template itself, or zeros if it has no values."""
    return jnp.zeros(template.shape, template.dtype) if isinstance(template, jax.ShapeDtypeStruct) else template


def map_arrays(where: str, comm: Participants, function: Callable[[Array], Any], tree: PyTree) -> PyTree:
    """Applies ``function`` to each leaf of ``tree`` as an array."""
    return jax.tree.map(lambda leaf: function(array(where, comm, leaf)), tree)


def call_for_leaves(where: str, comm: Participants, call: Callable[[Array], Any], tree: PyTree) -> PyTree:
    """Makes a collective call for each leaf of ``tree``. A tree without leaves makes one call without data."""
    return call_with_leaves(
        lambda leaf: call(array(where, comm, leaf)), tree, without_leaves=lambda: barrier(comm, EMPTY_TREE)
    )


def call_with_leaves(
    call: Callable[..., Any], tree: PyTree, *others: PyTree, without_leaves: Callable[[], object]
) -> PyTree:
    """Maps ``call`` over the leaves of trees. Trees without leaves make one call without data.

    Another rank may pass arrays, and would wait.

    Args:
        call: the call with a leaf of each tree.
        tree: a tree.
        others: more trees, of the same structure.
        without_leaves: the call without data.
    """
    if not jax.tree.leaves(tree):
        without_leaves()
    return jax.tree.map(call, tree, *others)


def call_for_leaves_of_root(where: str, comm: Participants, call: Callable[[Array], Any], tree: PyTree) -> PyTree:
    """As :func:`call_for_leaves`, for a call with a root: all ranks must pass trees of the same structure."""
    if not jax.tree.leaves(tree) and jax.tree.leaves(tree, is_leaf=lambda node: node is None):
        fail(
            TypeError,
            where,
            comm,
            "arrays of the same shapes on all ranks, the root or not",
            repr(tree),
            "Pass zeros of the same shape where a rank has no data, or use comm.mpi.bcast(obj) for objects.",
        )
    with leaves_of(tree):
        return call_for_leaves(where, comm, call, tree)


def rank(where: str, comm: Participants, name: str, value: Any) -> int:
    """Returns ``value``, which must be a rank of ``comm``."""
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
    """Returns ``value``, which must be an axis of an array of ``ndim`` axes, as a number from 0 to ``ndim - 1``."""
    axis = integer(where, comm, name, value)
    if not -ndim <= axis < ndim:
        fail(ValueError, where, comm, f"{name} from {-ndim} to {ndim - 1}", axis, "Choose an axis of the array.")
    return axis % ndim


def op(where: str, comm: Participants, op: Any) -> str:
    """Returns ``op``, which must be the name of a reduction."""
    if not (isinstance(op, str) and op in dtypes.OPS):
        fail(ValueError, where, comm, f"op to be one of {list(dtypes.OPS)}", repr(op), "Choose one of them.")
    return op


@functools.lru_cache(maxsize=256)  # JAX's questions about dtypes cost more than a small call
def _is_number(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_)


def reducible(where: str, comm: Participants, x: Array, op: str) -> Array:
    """Returns ``x``, for whose dtype the reduction ``op`` must be defined."""
    if not _is_number(x.dtype):
        fail(TypeError, where, comm, f"a dtype that {op} is defined for", x.dtype, "Reduce numbers or bools.")
    if op in dtypes.BITWISE and not (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_):
        fail(TypeError, where, comm, f"a dtype that {op} is defined for", x.dtype, "Reduce integers or bools.")
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
    """Returns the group of ``groups`` that this rank is in; ``comm`` itself for ``groups=None``."""
    if groups is None:
        return comm
    try:
        listed = [list(group) for group in groups]
    except TypeError:
        expected, remedy = "axis_index_groups: lists of ranks, or None", "Write [[0, 1], [2, 3]], say."
        fail(TypeError, where, comm, expected, repr(groups), remedy)
    canonical = tuple(tuple(integer(where, comm, "axis_index_groups", rank) for rank in group) for group in listed)
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
    return comm._groups(canonical)


def one_block_per_rank(where: str, comm: Participants, x: Array, axis: int) -> Array:
    """Cuts ``axis`` into one block for each rank; the blocks lie along a new first axis."""
    if x.shape[axis] % comm.size:
        fail(
            ValueError,
            where,
            comm,
            f"the length of axis {axis} to be a multiple of the {comm.size} ranks",
            f"shape {tuple(x.shape)}",
            "Pad it, or use a communicator whose size divides it.",
        )
    return cut(x, axis, comm.size)


def one_entry_per_rank(where: str, comm: Participants, x: Array, axis: int, name: str) -> Array:
    """Moves ``axis``, which must have one entry for each rank, to the front."""
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


def tag(
    where: str, comm: Participants, name: str, value: int | MessageConstant, allowed: Sequence[MessageConstant] = ()
) -> int | MessageConstant:
    """Returns ``value``, which must be the tag of a message, or one of the constants that are ``allowed``."""
    if isinstance(value, MessageConstant) and value in allowed:
        return value
    largest = cast("int", MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))  # MPI attaches it to COMM_WORLD alone
    return _number_or_constant(where, comm, name, value, range(largest + 1), allowed, "MPI has no other tags.")


def status(where: str, comm: Participants, value: Any) -> StatusPlace | None:
    """Returns the place of ``value``, which must be an mpi4py ``Status`` or None."""
    if value is not None and not isinstance(value, MPI.Status):
        fail(TypeError, where, comm, "status to be an mpi4py.MPI.Status, or None", repr(value), "Leave it out.")
    return None if value is None else StatusPlace(value)


def rank_or_constant(
    where: str, comm: Participants, name: str, value: int | MessageConstant, allowed: Sequence[MessageConstant]
) -> int | MessageConstant:
    """Returns ``value``, which must be a rank of ``comm``, or one of the constants that are ``allowed``."""
    if isinstance(value, MessageConstant) and value in allowed:
        return value
    remedy = "Ranks count from 0 in each communicator."
    return _number_or_constant(where, comm, name, value, range(comm.size), allowed, remedy)


def _number_or_constant(
    where: str,
    comm: Participants,
    name: str,
    value: Any,
    numbers: range,
    allowed: Sequence[MessageConstant],
    remedy: str,
) -> int:
    """Returns ``value``, which must be one of ``numbers``; the error names what else is ``allowed``."""
    expected = " or ".join([f"{name} from 0 to {numbers[-1]}", *map(repr, allowed)])
    if value is None or isinstance(value, MessageConstant):
        instead = " ".join(f"Pass pycollective.{each.name} for {each.meaning}." for each in allowed) or "Pass a number."
        fail(TypeError, where, comm, expected, repr(value), instead)
    number = integer(where, comm, name, value)
    if number not in numbers:
        fail(ValueError, where, comm, expected, number, remedy)
    return number
