"""The order in which a program reduces several operands of one shape: it must be the same on all ranks.

A loop over a set of strings has another order in each process. Its reductions are alike: one line, equal shapes. So are
those of two lines whose operands have changed places. So each gets a number, the attribute ``order``. One half is a
hash of how its operands come from the arguments of the program, the other half one of how those of all reductions like
it do, in any order. If the ranks agree on the second and not on the first, they reduce the same operands in another
order. If they agree on neither, they compute other operands, which they may.

A constant does not come from the arguments. A reduction of constants alone has no number: one rank may bring zeros
where another one brings an array.
"""

from __future__ import annotations

import functools
import re
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.mlir import ir

from pycollective.jax_support import jax_internals
from pycollective.jax_support.call_site import as_int64

__all__ = ["forget_program", "number_of", "number_reduction"]


class _Program:
    """What is known of a program while it is lowered.

    Attributes:
        module: its module.
        origins: for each value a hash of how it comes from the arguments; 0, if it does not.
        calls: for each kind the reductions, each with the origins of its operands.
    """

    def __init__(self, module: ir.Module) -> None:
        self.module = module
        self.origins: dict[ir.Value, int] = {}
        self.calls: dict[str, list[tuple[ir.Operation, list[int]]]] = defaultdict(list)


class _State(threading.local):
    """The program that this thread lowers, or has lowered last."""

    program: _Program | None = None


_state = _State()


def number_reduction(module: ir.Module, kind: str, call: ir.Operation, operands: Sequence[Any]) -> None:
    """Numbers a reduction that has just been lowered, and anew the earlier ones that are like it.

    Args:
        module: the module around it.
        kind: what it has in common with those that are like it: the operation, the communicator, shapes and dtypes.
        call: the operation, whose attribute ``order`` is 0.
        operands: its operands.
    """
    if _state.program is None or _state.program.module != module:
        _state.program = _Program(module)
    own = [_origin(operand, _state.program.origins) for operand in operands]
    if not any(own):
        return
    calls = _state.program.calls[kind]
    calls.append((call, own))
    of_all = [origin for _, origins in calls for origin in origins]
    if len(set(of_all)) == 1:
        return  # nothing could be in another order
    together = sum(map(number_of, of_all)) & 0xFFFFFFFF
    for earlier, origins in calls:
        jax_internals.set_attribute(earlier, "order", as_int64(number_of(*origins) << 32 | together))


def forget_program() -> None:
    """Forgets the program that this thread has lowered. Its module is free then."""
    _state.program = None


def _origin(value: ir.Value, known: dict[ir.Value, int]) -> int:
    """A hash of how a value comes from arguments, the same in each process; 0 of a constant.

    It adds those on the way to ``known``.
    """
    path = [value]
    while path:
        owner = path[-1].owner
        if path[-1] in known:
            path.pop()
        elif isinstance(owner, ir.Block):
            known[path[-1]] = number_of(owner.owner.operation.name, ir.BlockArgument(path[-1]).arg_number)
        elif before := [operand for operand in owner.operands if operand not in known]:
            path += before
        else:
            of_operands = [known[x] for x in owner.operands]
            number = number_of(owner.operation.name, *_parameters(owner), *of_operands)
            known |= {result: number_of(number, i) if any(of_operands) else 0 for i, result in enumerate(owner.results)}
    return known[value]


def _parameters(operation: Any) -> Iterable[str]:
    """What tells an operation from others on the same operands: which part it takes, which function it calls."""
    for name in ("start_indices", "callee"):
        if name in operation.attributes:
            yield re.sub(r"_\d+$", "", str(operation.attributes[name]))  # JAX numbers functions of one name


def number_of(*parts: int | str) -> int:
    """A hash of 32 bits that is the same in each process.

    Example:
        >>> number_of("add", 1, 2) == number_of("add", 1, 2) != number_of("add", 2, 1)
        True
    """
    # Python's hash of a tuple of numbers is the same in each process, and a fifth of the time of a checksum.
    return hash(tuple([_number_of_text(part) if isinstance(part, str) else part for part in parts])) & 0xFFFFFFFF


@functools.lru_cache(maxsize=4096)
def _number_of_text(text: str) -> int:
    return zlib.crc32(text.encode())
