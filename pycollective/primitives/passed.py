"""What the user passed to a collective, where the operands of the primitive do not show it.

A sum of bfloat16 numbers travels in float32, one of bools in int32. The transpose of a sum is a sum of the same shape.
Such calls are alike to MPI, but not to the program: ranks compare what the user passed. A tree without arrays makes a
call as well, without data: another rank may pass arrays, and would wait.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax

T = TypeVar("T")

_tree: ContextVar[int] = ContextVar("tree", default=0)
"""The structure of the tree whose leaves are passed now."""

_derivative: ContextVar[str] = ContextVar("derivative", default="")
"""What JAX has made of its own collectives, which are replaced now by primitives of this package."""

_program: ContextVar[int] = ContextVar("program", default=0)
"""The program over named axes whose collectives are replaced now."""


_name = functools.lru_cache(maxsize=256)(str)  # of a dtype: NumPy puts the name together at each call


class Passed(NamedTuple):
    """A parameter of the primitives.

    Attributes:
        dtypes: for each operand the name of the dtype that the user passed.
        derivative: "" for the call that the user made; else what JAX has made of it, such as "transpose of tangent".
        tree: of a call with a root, a hash of the paths to the leaves of its tree; 0: it is compared by other means.
        program: of a collective over named axes, a hash of all collectives of the program; else 0.
        order: of a reduction, its number among those that are alike (``ordering/operand_order.py``); None: it has none.
        section: the section of the program to which the call belongs (``ordering/sections.py``); 0: it is in none.
    """

    dtypes: tuple[str, ...]
    derivative: str = ""
    tree: int = 0
    program: int = 0
    order: int | None = None
    section: int = 0

    @classmethod
    def of(cls, xs: Sequence[Any]) -> Passed:
        """These arrays.

        Example:
            >>> import jax.numpy as jnp
            >>> Passed.of([jnp.zeros(2, "bfloat16")])
            Passed(dtypes=('bfloat16',), derivative='', tree=0, program=0, order=None, section=0)
        """
        return cls(tuple([_name(x.dtype) for x in xs]), _derivative.get(), _tree.get(), _program.get())

    def at(self, places: Sequence[int]) -> Passed:
        """Some of the operands."""
        return self._replace(dtypes=tuple(self.dtypes[place] for place in places))

    def tangent(self) -> Passed:
        """The call for the tangents."""
        return self._derived("tangent")

    def transpose(self) -> Passed:
        """The call for the cotangents.

        Example:
            >>> Passed(("float32",)).tangent().transpose().derivative
            'transpose of tangent'
        """
        return self._derived("transpose")

    def _derived(self, kind: str) -> Passed:
        return self._replace(derivative=f"{kind} of {self.derivative}" if self.derivative else kind)


NOTHING = Passed(())
"""Of a call that has no operand, or whose operands are what the user passed."""

EMPTY_TREE = Passed(("an empty tree",))
"""A tree without arrays, for which the primitive has no operand, or one without elements."""


@contextlib.contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Gives a variable a value while the code inside runs."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def as_transpose() -> AbstractContextManager[None]:
    """Collectives that are called inside have come from the transpose of a program."""
    return _set(_derivative, "transpose")


def part_of(program: int) -> AbstractContextManager[None]:
    """Collectives that are called inside belong to this program over named axes."""
    return _set(_program, program)


def leaves_of(tree: Any) -> AbstractContextManager[None]:
    """Collectives that are called inside pass the leaves of this tree; ranks compare its structure.

    The paths alone count: what a node of a class holds beside its leaves may differ between processes.
    """
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return _set(_tree, 0 if paths == [""] else zlib.crc32(repr(paths).encode()) | 1)
