"""The native transport: each operation of a program is a call of one handler of the compiled library."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from pycollective.config import config
from pycollective.transport import native
from pycollective.transport.protocol import HandlerCall, Structs


class Native:
    """See ``protocol.Transport``."""

    name = "native"

    open = staticmethod(native.add_communicator)
    open_part = staticmethod(native.add_part)
    free = staticmethod(native.free_communicator)

    def check(self, _: Sequence[jax.Device]) -> None:
        """Serves all devices that JAX has."""

    def lower_operation(
        self,
        operation: str,
        attributes: dict[str, Any],
        in_place: tuple[bool, ...],
        operands: Structs,
        results: Structs,
    ) -> HandlerCall:
        """The handler of the operation's name; the one that runs beside computation where that pays."""
        nbytes = sum(x.size * x.dtype.itemsize for x in operands)
        large = config.overlap == "on" or nbytes >= _LEAST_OVERLAPPED_BYTES
        if not (large and self.overlaps(attributes["comm"][0])):
            return HandlerCall(_rule(operation, in_place), attributes)
        results_rule = native.results_lowering(len(results)) if results else None
        return HandlerCall(_rule(f"async_{operation}", in_place), attributes, results_rule)

    def overlaps(self, number: int) -> bool:
        """Whether large arrays between these ranks travel while the program computes: between hosts, or if asked to."""
        return config.overlap == "on" or (config.overlap == "auto" and native.spans_hosts(number))


_LEAST_OVERLAPPED_BYTES = 512 << 10
"""Operands of fewer bytes together have travelled before XLA has found other work (docs/performance.md)."""


_rule = functools.cache(native.ffi_lowering)
