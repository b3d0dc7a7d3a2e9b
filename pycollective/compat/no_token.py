"""Refuses ``y, token = allreduce(...)``: before mpi4jax 0.8 its functions returned an array and a token."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar, cast

import pycollective as pc
from pycollective.errors import fail

__all__ = ["returns_no_token"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def returns_no_token(function: _Function) -> _Function:
    """Makes ``y, token = function(...)`` an error. Without it, ``y`` and ``token`` would be the rows of the result.

    This is only needed for a result with two rows, since Python raises an error for another number. The result is an
    array of JAX, which can be iterated over, so the check reads the caller's bytecode. It does not find an assignment
    that follows later: of a result that has a name first, or that a function returns.
    """

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        y = function(*args, **options)
        if y.shape[:1] == (2,) and _is_unpacked_into_two(sys._getframe(1).f_code, sys._getframe(1).f_lasti):
            name = f"compat.{function.__name__}"
            remedy = "Write y = ... without a token, as for mpi4jax 0.8 and later; and then a, b = y for the two rows."
            fail(TypeError, name, pc.world(), "one name for the result, an array", "two names for its two rows", remedy)
        return y

    return cast("_Function", checked)


_seen: dict[tuple[int, int], tuple[CodeType, bool]] = {}
"""The results of :func:`_is_unpacked_into_two`, by the identity of the code and the place. They keep the code alive."""


def _is_unpacked_into_two(code: CodeType, place: int) -> bool:
    """Whether the bytecode's instruction after ``place`` unpacks a sequence of two."""
    key = id(code), place
    if key not in _seen:
        after = (step for step in dis.get_instructions(code) if step.offset > place)
        step = next(after, None)
        _seen[key] = code, step is not None and step.opname == "UNPACK_SEQUENCE" and step.arg == 2
    return _seen[key][1]
