"""Checks of arguments when a program is traced, and what the public functions share besides."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp
from jax import lax

from pycollective import ordering, primitives
from pycollective.blocks import cut
from pycollective.communicator import Communicator, world
from pycollective.errors import message
from pycollective.members import Members
from pycollective.mpi import MPI
from pycollective.processes import is_forked, refuse_child

Array = jax.Array
PyTree = Any
AxisName = Hashable
Groups = Sequence[Sequence[int]] | None


def fail(kind: type[Exception], where: str, comm: Members | None, expected: Any, got: Any, remedy: str) -> NoReturn:
    """Raises ``kind`` with a message in the form of :mod:`pycollective.errors`."""
    rank, size = (comm.rank, comm.size) if comm is not None else (None, None)
    raise kind(message(where, expected, got, remedy, rank=rank, size=size))


def communicator(where: str, axis_name: Any) -> Communicator:
    """The communicator that ``axis_name`` stands for."""
    if is_forked():
        refuse_child(where)
    comm = world() if axis_name is None else axis_name
    if not isinstance(comm, Communicator):
        remedy = "Pass pycollective.world(), a split of it, or pycollective.Communicator(mpi4py communicator)."
        if isinstance(comm, (str, tuple, list)):
            remedy = "This operation has no form over axis names. " + remedy
        fail(TypeError, where, None, "a Communicator", repr(axis_name), remedy)
    comm.check_live(where)
    return comm


def later(where: str, comm: Any) -> Callable[[], Communicator]:
    """What gives the communicator ``comm``, or the world for None, when it is needed.

    Decorating a function must not start MPI: a module that one rank alone imports may do that.
    """
    if comm is not None:
        communicator(where, comm)
    return partial(communicator, where, comm)


def is_name(axis_name: Any) -> bool:
    """Whether ``axis_name`` is a name, or a tuple of names, bound by a JAX transform."""
    if isinstance(axis_name, (tuple, list)):
        return len(axis_name) > 0 and all(is_name(name) for name in axis_name)
    return not (axis_name is None or isinstance(axis_name, (Communicator, MPI.Comm, bool, int, float)))


def by_name(where: str, axis_name: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args)``, one of jax.lax's own, which know the named axes."""
    try:
        lax.axis_size(axis_name)
    except NameError:
        bound = ordering.bound_axes()
        lacking = [name for name in (axis_name if isinstance(axis_name, tuple) else (axis_name,)) if name not in bound]
        raise NameError(
            message(
                where,
                f"an axis name that a transform around this call binds ({_these(bound)}), or a Communicator",
                _these(lacking),
                f"Bind it with pycollective.jit(axis_name={lacking[0]!r}), pmap or shard_map, or pass "
                "pycollective.world().",
            )
        ) from None
    return function(*args, **kwargs)


def _these(names: Sequence[AxisName]) -> str:
    return ", ".join(map(repr, names)) or "none here"


@contextmanager
def naming_axes(*names: AxisName) -> Iterator[None]:
    """Adds to JAX's error about an unbound axis what is bound, and what binds: for a trace of a user's function herein.

    Args:
        names: of the axes that are bound during that trace alone.
    """
    try:
        yield
    except NameError as error:
        if "unbound axis name" in str(error) and not any(map(_is_ours, getattr(error, "__notes__", ()))):
            bound = _these([*names, *ordering.bound_axes()])
            error.add_note(
                f"{_NOTE} the axis names bound around this call: {bound}. pycollective.jit(axis_name=...), pmap and "
                "shard_map bind one."
            )
        raise


_NOTE = "pycollective:"


def _is_ours(note: str) -> bool:
    return note.startswith(_NOTE)


def array(where: str, comm: Members, leaf: Any) -> Array:
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


def map_arrays(where: str, comm: Members, function: Callable[[Array], Any], tree: PyTree) -> PyTree:
    """Maps ``function`` over the leaves of ``tree`` as arrays."""
    return jax.tree.map(lambda leaf: function(array(where, comm, leaf)), tree)


def integer(where: str, comm: Members, name: str, value: Any) -> int:
    """A Python integer, known while tracing."""
    try:
        return operator.index(value)
    except TypeError:
        fail(TypeError, where, comm, f"{name} to be an integer", repr(value), "It is fixed when the program is traced.")


def rank(where: str, comm: Members, name: str, value: Any) -> int:
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


def axis(where: str, comm: Members, name: str, value: Any, ndim: int) -> int:
    """An axis of an array of ``ndim`` axes, counted from the front."""
    axis = integer(where, comm, name, value)
    if not -ndim <= axis < ndim:
        fail(ValueError, where, comm, f"{name} from {-ndim} to {ndim - 1}", axis, "Choose an axis of the array.")
    return axis % ndim


def op(where: str, comm: Members, op: Any) -> str:
    """The name of a reduction."""
    if op not in primitives.OPS:
        fail(ValueError, where, comm, f"op to be one of {list(primitives.OPS)}", repr(op), "Choose one of them.")
    return str(op)


def reducible(where: str, comm: Members, x: Array, op: str) -> Array:
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


def group(where: str, comm: Members, groups: Groups, *, equal: bool) -> Members:
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


def divide(where: str, comm: Members, x: Array, axis: int) -> Array:
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


def counts_ranks(where: str, comm: Members, x: Array, axis: int, name: str) -> Array:
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


def tag(where: str, comm: Members, name: str, value: int | None, wildcard: int | None) -> int:
    """A message tag. ``wildcard``: what None stands for, or None if a tag must be given."""
    if value is None and wildcard is not None:
        return wildcard
    tag = integer(where, comm, name, value)
    largest = cast("int", MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))  # MPI attaches it to the world alone
    if not 0 <= tag <= largest:
        fail(ValueError, where, comm, f"{name} from 0 to {largest}", tag, "MPI has no other tags.")
    return tag


def peer(where: str, comm: Members, name: str, value: int | None, wildcard: int) -> int:
    """A rank of ``comm``, or ``wildcard`` for None."""
    return wildcard if value is None else rank(where, comm, name, value)
