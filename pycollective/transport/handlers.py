"""The native transport: each operation of a program is a call of one handler of the compiled library."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

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

    def form(
        self,
        operation: str,
        attributes: dict[str, Any],
        in_place: tuple[bool, ...],
        *_: Structs,
    ) -> HandlerCall:
        """The handler of the operation's name."""
        return HandlerCall(_rule(operation, in_place), attributes)


_rule = functools.cache(native.ffi_lowering)
