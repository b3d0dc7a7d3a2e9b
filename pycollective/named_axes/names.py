"""Names of axes: the names that are bound at a call, and the errors for a name that is not bound."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jax import lax

from pycollective.errors import message
from pycollective.jax_support import jax_internals
from pycollective.ranks.communicator import Communicator
from pycollective.transport.mpi import MPI

AxisName = Hashable


def is_name(axis_name: Any) -> bool:
    """Returns whether ``axis_name`` can be the name of an axis, or a tuple of names: no communicator, no number."""
    if isinstance(axis_name, (tuple, list)):
        return len(axis_name) > 0 and all(is_name(name) for name in axis_name)
    return not (axis_name is None or isinstance(axis_name, (Communicator, MPI.Comm, bool, int, float)))


def by_name(where: str, axis_name: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls one of jax.lax's own functions, which know the named axes.

    Args:
        where: the public function, for messages.
        axis_name: the name of an axis, or a tuple of names.
        function: the function of jax.lax.
        *args: the arguments of the function.
        **kwargs: the keyword arguments of the function.

    Raises:
        NameError: no transform around this call binds the name.
        TypeError: ``axis_name`` cannot be hashed, so it is no name.
    """
    try:
        lax.axis_size(axis_name)
    except TypeError:  # axis_name cannot be hashed
        remedy = "Pass pycollective.world(), or a name that a transform around this call binds."
        raise TypeError(message(where, "a Communicator, or an axis name", repr(axis_name), remedy)) from None
    except NameError:
        bound = jax_internals.bound_axes()
        lacking = [name for name in (axis_name if isinstance(axis_name, tuple) else (axis_name,)) if name not in bound]
        raise NameError(
            message(
                where,
                f"an axis name that a transform around this call binds ({_listed(bound)}), or a Communicator",
                _listed(lacking),
                f"Bind it with pycollective.jit(axis_name={lacking[0]!r}), pmap or shard_map, or pass "
                "pycollective.world().",
            )
        ) from None
    return function(*args, **kwargs)


def names_of(axis_name: AxisName) -> tuple[Hashable, ...]:
    """Returns the names of an axis as a tuple."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def has_types(axis_name: AxisName) -> bool:
    """Returns whether JAX has types that say whether a value varies along the axis (``shard_map(check_vma=True)``)."""
    return varies(lax.axis_index(axis_name), axis_name)


def varies(x: Any, axis_name: AxisName) -> bool:
    """Returns whether a value varies along all names of the axis, by JAX's types; False without types."""
    return jax_internals.varying_axes(x).issuperset(names_of(axis_name))


def in_order(names: Iterable[Hashable]) -> tuple[Hashable, ...]:
    """Returns names in sorted order.

    The ranks compare their programs, so the order must be the same on all ranks. The order of a set is not.
    """
    return tuple(sorted(names, key=str))


def vary(x: Any, names: Iterable[Hashable]) -> Any:
    """Casts ``x`` to a type that also varies along these axes. JAX must have types for them."""
    lacking = in_order(name for name in names if not varies(x, name))
    return lax.pcast(x, lacking, to="varying") if lacking else x


def _listed(names: Sequence[AxisName]) -> str:
    return ", ".join(map(repr, names)) or "none here"


@contextmanager
def explain_unbound_names(*names: AxisName) -> Iterator[None]:
    """Adds a note to JAX's error for an unbound axis name: the names that are bound, and how to bind one.

    Use it around the trace of a user's function.

    Args:
        *names: the axes that are bound only during this trace.
    """
    try:
        yield
    except NameError as error:
        if "unbound axis name" in str(error) and not any(map(_is_ours, getattr(error, "__notes__", ()))):
            bound = _listed([*names, *jax_internals.bound_axes()])
            error.add_note(
                f"{_NOTE} the axis names bound around this call: {bound}. pycollective.jit(axis_name=...), pmap and "
                "shard_map bind one."
            )
        raise


_NOTE = "pycollective:"


def _is_ours(note: str) -> bool:
    return note.startswith(_NOTE)
