"""The transport whose data mpi4jax carries, between two handlers of the native library.

An operation becomes mpi4jax's function of that name, or is made of others (``mpi4jax_operations.py``). The native
library still knows the communicators: before each operation one handler looks for the communicator, compares the call
with the other ranks' and tells the watchdog; another one behind it tells that the operation has ended
(``native/xla/guards.cc``). So the order, the agreement and the reports are those of the native transport. An error
inside MPI is mpi4jax's: it ends the job by ``MPI_Abort``, with its own message.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

import jax

from pycollective.errors import message
from pycollective.transport import mpi4jax_operations as operations
from pycollective.transport import native
from pycollective.transport.mpi import MPI
from pycollective.transport.protocol import Composition, HandlerCall, Structs

_INSTALL = "Install it (pip install mpi4jax; it needs the mpicc of the machine's MPI), or leave transport out."
_MOST_ELEMENTS = 2**31 - 1
"""mpi4jax hands MPI its counts as ints."""


class ByMpi4jax:
    """See ``protocol.Transport``.

    Raises:
        ImportError: mpi4jax cannot be imported, or was built for another MPI library.
    """

    name = "mpi4jax"

    def __init__(self) -> None:
        try:
            self._mpi4jax = importlib.import_module("mpi4jax")
        except (ImportError, RuntimeError) as error:  # a RuntimeError if it was built for another MPI library
            raise ImportError(message("init", "mpi4jax for transport='mpi4jax'", str(error), _INSTALL)) from error
        self._ranks: dict[int, operations.Ranks] = {}
        # One for all messages, which are received one after another: programs hold its address.
        self._status = MPI.Status()

    def check(self, devices: Sequence[jax.Device]) -> None:
        """Serves one CPU device of each rank."""
        if len(devices) != 1 or devices[0].platform != "cpu":
            raise ValueError(
                message(
                    "init",
                    "one CPU device for each rank with transport='mpi4jax'",
                    list(devices),
                    "Give devices=1 and start more ranks, or leave transport out.",
                )
            )

    def open(self, whole: native.Whole) -> int:
        """Makes a communicator known to the handlers and to this object."""
        number = native.add_communicator(whole)
        main, members = whole.main, tuple(range(whole.main.size))
        self._ranks[number] = operations.Ranks(main, whole.auxiliary, main.rank, members, all_in_order=True)
        return number

    def open_part(self, part: native.Part) -> int:
        """Makes a part of a communicator known to the handlers and to this object."""
        number = native.add_part(part)
        of, members = self._ranks[part.whole], tuple(part.members)
        self._ranks[number] = of._replace(rank=part.rank, members=members or of.members, all_in_order=not members)
        return number

    def free(self, number: int) -> None:
        """Frees a communicator and its parts. All its ranks must make this call."""
        native.free_communicator(number)
        main = self._ranks[number].main
        self._ranks = {other: ranks for other, ranks in self._ranks.items() if ranks.main is not main}

    def overlaps(self, _: int) -> bool:
        """Never: mpi4jax's functions wait."""
        return False

    def lower_operation(
        self,
        operation: str,
        attributes: dict[str, Any],
        _: tuple[bool, ...],
        operands: Structs,
        results: Structs,
    ) -> Composition:
        """mpi4jax's function of the operation's name, or one made of others."""
        comm = attributes["comm"]
        ranks = self._ranks[comm[0]]
        op = attributes.get("op", -1)
        _check(operation, op, operands, results)
        calls = (operations.OfAll if ranks.all_in_order else operations.OfSome)(self._mpi4jax, ranks, results)
        own = {name: value for name, value in attributes.items() if name in operations.ATTRIBUTES[operation]}
        guard = {"comm": comm, "operation": native.host_targets().index(operation)}
        compared = {"op": op, "root": attributes.get("root", -1), "pattern": _pattern(attributes, operands)}
        before = {**guard, **compared, "process": native.this_process()}
        after = {**guard, "check": 0, "status": 0, "copy_to": 0, "status_bytes": MPI._sizeof(MPI.Status)}
        if "status" in attributes:
            own["status"] = self._status
            check = int(attributes["source"] != MPI.PROC_NULL)
            after |= {"check": check, "status": MPI._addressof(self._status), "copy_to": attributes["status"]}
        return Composition(
            HandlerCall(native.ffi_lowering("enter"), before),
            functools.partial(getattr(calls, operation), **own),
            HandlerCall(native.ffi_lowering("leave"), after),
        )


def _check(operation: str, op: int, operands: Structs, results: Structs) -> None:
    """Raises NotImplementedError for what mpi4jax cannot carry."""

    def refuse(expected: str, got: object, remedy: str) -> NoReturn:
        raise NotImplementedError(message(operation, f"{expected} with transport='mpi4jax'", got, remedy))

    if operation not in operations.ATTRIBUTES:
        refuse(f"one of {', '.join(operations.ATTRIBUTES)}", operation, "Leave transport out.")
    if op >= 0 and native.op_names()[op] not in operations.MPI_OPS:
        kinds = f"a reduction of {', '.join(operations.MPI_OPS)}"
        refuse(kinds, native.op_names()[op], "Leave out wire_dtype, or transport.")
    largest = max((struct.size for struct in (*operands, *results)), default=0)
    if largest > _MOST_ELEMENTS:
        refuse(f"arrays of at most {_MOST_ELEMENTS} elements", largest, "Send them in parts, or leave transport out.")


def _pattern(attributes: dict[str, Any], operands: Structs) -> int:
    """What the ranks compare besides dtype, count, reduction and root."""
    if len(operands) > 1:
        return zlib.crc32(repr([(struct.size, str(struct.dtype)) for struct in operands]).encode())
    pattern: int = attributes.get("pattern", 0)
    return pattern
