"""Which dimensions of an array are cut, and among which devices."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
from jax import lax

from pycollective.errors import fail
from pycollective.named_axes.names import by_name, is_name, names_of
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.world import given_or_world

Group = Hashable
"""The devices among which a dimension is cut: a communicator, the name of an axis, or a tuple of names."""

Spec = Any
"""A :class:`jax.P` with a group or None for each dimension, or the group of dimension 0. None: the world."""


def group_of(where: str, given: Any) -> Group:
    """Returns a group in one form; None is the world.

    Raises:
        TypeError: it is neither a communicator nor a name.
        NameError: no transform around the call binds the name.
    """
    if not is_name(given):
        return given_or_world(where, given)
    group = given[0] if isinstance(given, tuple) and len(given) == 1 else given
    by_name(where, group, lax.axis_size, group)
    return group


def groups_of(where: str, spec: Spec, ndim: int) -> list[Group | None]:
    """Returns for each of ``ndim`` dimensions the group among which it is cut, or None.

    Raises:
        TypeError: an entry of ``spec`` is neither a communicator nor a name.
        ValueError: ``spec`` has more entries than the array has dimensions, or names a device axis twice.
        NameError: no transform around the call binds a name.
    """
    entries = list(spec) if isinstance(spec, jax.P) else [group_of(where, spec)]
    if len(entries) > ndim:
        expected = f"a spec with at most {ndim} entries, one for each dimension"
        fail(ValueError, where, None, expected, str(spec), "Transform an array with more dimensions.")
    groups = [None if entry in (None, ()) else group_of(where, entry) for entry in entries]
    members = [member for group in groups if group is not None for member in _members(group)]
    if len(set(members)) < len(members):
        remedy = "Cut each dimension among other devices, e.g. along two axes of a mesh."
        fail(ValueError, where, None, "a spec with each axis or communicator once", str(spec), remedy)
    return groups + [None] * (ndim - len(groups))


def _members(group: Group) -> tuple[Hashable, ...]:
    return (group,) if isinstance(group, Communicator) else names_of(group)


def block_length(length: int, size: int) -> int:
    """Returns the length of one block of a dimension that is cut among ``size`` devices, rounded up."""
    return -(-length // size)
