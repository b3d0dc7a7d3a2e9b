"""What the user passed to a collective, where the operands of the primitive do not show it.

A sum of bfloat16 numbers travels in float32, one of bools in int32. The transpose of a sum is a sum of the same shape.
Such calls are alike to MPI, but not to the program: ranks compare what the user passed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

_derivative: ContextVar[str] = ContextVar("derivative", default="")
"""What JAX has made of its own collectives, which are replaced now by primitives of this package."""


class Passed(NamedTuple):
    """A parameter of the primitives.

    Attributes:
        dtypes: for each operand the name of the dtype that the user passed.
        derivative: "" for the call that the user made; else what JAX has made of it, such as "transpose of tangent".
    """

    dtypes: tuple[str, ...]
    derivative: str = ""

    @classmethod
    def of(cls, xs: Sequence[Any]) -> Passed:
        """These arrays.

        Example:
            >>> import jax.numpy as jnp
            >>> Passed.of([jnp.zeros(2, "bfloat16")])
            Passed(dtypes=('bfloat16',), derivative='')
        """
        return cls(tuple(str(x.dtype) for x in xs), _derivative.get())

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


@contextlib.contextmanager
def as_transpose() -> Iterator[None]:
    """Collectives that are called inside have come from the transpose of a program."""
    before = _derivative.set("transpose")
    try:
        yield
    finally:
        _derivative.reset(before)
