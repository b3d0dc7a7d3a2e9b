"""What a transport is to the rest of the package. There are two: ``handlers.py`` and ``by_mpi4jax.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from pycollective.transport.native import Part, Whole

Structs = Sequence[jax.ShapeDtypeStruct]
"""Shapes and dtypes."""


class HandlerCall(NamedTuple):
    """A call of one handler of the native library.

    Attributes:
        rule: a lowering rule of JAX's FFI, whose first operand and first result are tokens.
        attributes: the attributes of the handler.
        results_rule: the rule of a handler without tokens that gets the results and has them as its own; None: there is
            none.
    """

    rule: Callable[..., Any]
    attributes: dict[str, Any]
    results_rule: Callable[..., Any] | None = None


class Composition(NamedTuple):
    """An operation in terms of another library's JAX functions, between two calls of handlers.

    Attributes:
        before: a call that gets the operands and has no results.
        fun: a function from the operands to the results, as a sequence.
        after: a call that gets the results and has none.
    """

    before: HandlerCall
    fun: Callable[..., Sequence[Any]]
    after: HandlerCall


class Transport(Protocol):
    """Carries the operations of programs on CPU devices.

    Attributes:
        name: its name, the argument ``transport`` of :func:`pycollective.init`.
    """

    name: str

    def lower_operation(
        self,
        operation: str,
        attributes: dict[str, Any],
        in_place: tuple[bool, ...],
        operands: Structs,
        results: Structs,
        /,
    ) -> HandlerCall | Composition:
        """Returns what an operation becomes in a program.

        Args:
            operation: one of ``native.host_targets()``.
            attributes: the attributes of its handler.
            in_place: for each operand, whether the result of the same number may take its buffer.
            operands: the operands.
            results: the results.
        """

    def overlaps(self, number: int, /) -> bool:
        """Returns whether large arrays between these ranks travel while the program computes.

        Args:
            number: what ``open`` or ``open_part`` returned. The answer is the same on all its ranks.
        """

    def open(self, whole: Whole) -> int:
        """See ``native.add_communicator``."""

    def open_part(self, part: Part) -> int:
        """See ``native.add_part``."""

    def free(self, number: int) -> None:
        """See ``native.free_communicator``."""

    def check(self, devices: Sequence[jax.Device], /) -> None:
        """Raises ValueError if it cannot serve these devices of a rank."""
