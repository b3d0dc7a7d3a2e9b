"""The order in which a program reduces several operands of one shape: it must be the same on all ranks.

A loop over a set of strings has another order in each process. Its reductions have one line and equal shapes, so the
comparison of lines and shapes does not find a difference. Nor does it if the operands of two reductions have changed
places. So each reduction gets a number, its attribute ``order``. The high 32 bits hash how its operands are computed
from the program's arguments. The low 32 bits hash the same over all reductions of its kind, in any order. If two ranks
have equal low bits and other high bits, they reduce the same operands in another order, which is an error. If the low
bits differ, the ranks compute other operands, which is allowed.

A constant is not computed from the arguments. A reduction of constants has the number 0, since one rank may pass zeros
where another rank passes an array.

In a region the reductions get their numbers by a pass over its program (:func:`with_numbers`). A program of plain
:func:`jax.jit` is seen only while JAX lowers it, one call at a time (:func:`number_reduction`).
"""

from __future__ import annotations

import functools
import operator
import re
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.core.primitives import cond_p
from jax.extend.mlir import ir

from pycollective.jax_support import jax_dispatch, jax_internals
from pycollective.jax_support.call_site import as_int64
from pycollective.jax_support.jaxprs import PLAIN, inner_jaxprs, map_jaxprs

__all__ = ["REDUCTIONS", "Origins", "number_of", "number_reduction", "with_numbers"]

REDUCTIONS = frozenset({"allreduce", "reduce_scatter"})
"""Primitives that combine the operands of all ranks alike."""

_PARAMETERS = {"slice": "start_indices", "jit": "name", "pjit": "name"}
"""For primitives the parameter that tells an equation from others with the same operands."""


class Origins:
    """How the values of a program come from its inputs, as numbers that are the same in each process; 0 of a constant.

    Args:
        inputs: the inputs of the program.
        numbers: a number for each of them.
    """

    def __init__(self, inputs: Iterable[Var], numbers: Iterable[int]) -> None:
        self._known = dict(zip(inputs, numbers, strict=True))

    def add(self, eqn: JaxprEqn) -> tuple[list[int], int]:
        """Takes the next equation of the program. Returns the numbers of its operands, and that of its first result."""
        known = self._known
        operands = [0 if type(atom) is Literal else known.get(atom, 0) for atom in eqn.invars]
        if not any(operands):
            return operands, 0
        name = eqn.primitive.name
        parameters = [_number_of_text(str(eqn.params[_PARAMETERS[name]]))] if name in _PARAMETERS else ()
        own = _hash((_number_of_text(name), *parameters, *operands))
        for i, var in enumerate(eqn.outvars):
            known[var] = _hash((own, i)) if i else own
        return operands, own


def with_numbers(jaxpr: Any) -> Any:
    """A whole program, each of whose reductions has its number in the parameter ``passed``."""
    calls: dict[Any, list[tuple[int, list[int]]]] = defaultdict(list)  # for each kind ids of equations, and origins
    visited: set[int] = set()

    def collect(jaxpr: Any, inputs: Sequence[int]) -> None:
        visited.add(id(jaxpr))
        origins = Origins(jaxpr.invars, inputs)
        for eqn in jaxpr.eqns:
            operands, _ = origins.add(eqn)
            if eqn.primitive.name in REDUCTIONS and any(operands):
                calls[_kind(eqn)].append((id(eqn), operands))
            for inner in () if eqn.primitive in PLAIN else inner_jaxprs(eqn):
                if id(inner) in visited:
                    continue
                if eqn.primitive is cond_p:  # ranks may make one call in two branches
                    collect(inner, operands[1:])
                else:
                    collect(inner, [number_of(eqn.primitive.name, i) for i in range(len(inner.invars))])

    def numbered(jaxpr: Any) -> Any:
        eqns = [_with_number(eqn, found) if eqn.primitive.name in REDUCTIONS else eqn for eqn in jaxpr.eqns]
        return jaxpr if all(map(operator.is_, eqns, jaxpr.eqns)) else jaxpr.replace(eqns=eqns)

    collect(jaxpr, range(1, len(jaxpr.invars) + 1))
    found: dict[int, int] = {}
    for alike in calls.values():
        ids, origins = zip(*alike, strict=True)
        found |= zip(ids, _orders(origins), strict=True)
    return map_jaxprs(jaxpr, numbered)


def _with_number(eqn: JaxprEqn, numbers: dict[int, int]) -> JaxprEqn:
    passed = eqn.params["passed"]._replace(order=numbers.get(id(eqn), 0))
    return eqn.replace(params={**eqn.params, "passed": passed})


def _kind(eqn: JaxprEqn) -> Any:
    """What a reduction has in common with those that are like it."""
    params = eqn.params
    own = [params[name] for name in sorted(params) if name not in ("passed", "in_place")]
    types = [(var.aval.shape, var.aval.dtype) for var in eqn.invars]
    return (eqn.primitive, *own, params["passed"].dtypes, *types)


def _orders(alike: Sequence[Sequence[int]]) -> list[int]:
    """The numbers of reductions that are alike, each of which has the origins of its operands."""
    of_all = [origin for origins in alike for origin in origins]
    if len(set(of_all)) == 1:
        return [0] * len(alike)  # nothing could be in another order
    together = sum(map(number_of, of_all)) & 0xFFFFFFFF
    return [as_int64(number_of(*origins) << 32 | together) for origins in alike]


class _Program:
    """The reductions of a program that is being lowered.

    Attributes:
        module: the module of the program.
        origins: for each value a hash of how it is computed from the arguments; 0 for a constant.
        calls: for each kind the reductions, each with the origins of its operands.
    """

    def __init__(self, module: ir.Module) -> None:
        self.module = module
        self.origins: dict[ir.Value, int] = {}
        self.calls: dict[str, list[tuple[ir.Operation, list[int]]]] = defaultdict(list)


class _State(threading.local):
    """The program that this thread lowers now, or has lowered last."""

    program: _Program | None = None


_state = _State()


def number_reduction(module: ir.Module, kind: str, call: ir.Operation, operands: Sequence[Any]) -> None:
    """Numbers a reduction that has just been lowered, and renumbers the earlier reductions of its kind.

    Args:
        module: the module of the reduction.
        kind: the kind of the reduction: the operation, the communicator, shapes and dtypes.
        call: the reduction in the module, whose attribute ``order`` is 0.
        operands: the operands of the reduction.
    """
    if _state.program is None or _state.program.module != module:
        _state.program = _Program(module)
    own = [_origin(operand, _state.program.origins) for operand in operands]
    if not any(own):
        return
    calls = _state.program.calls[kind]
    calls.append((call, own))
    for (earlier, _), order in zip(calls, _orders([origins for _, origins in calls]), strict=True):
        jax_internals.set_attribute(earlier, "order", order)


def _forget_program(*_: Any) -> None:
    """Forgets the program that this thread has lowered, so that its module and its communicators can be freed."""
    _state.program = None


jax_dispatch.see_each_compilation(before=_forget_program)


def _origin(value: ir.Value, known: dict[ir.Value, int]) -> int:
    """Returns a hash of how a value is computed from the arguments, the same in all processes; 0 for a constant.

    The hashes of the values that it depends on are added to ``known``.
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
    """Yields the attributes that distinguish operations on the same operands: a slice's start, a called function."""
    for name in ("start_indices", "callee"):
        if name in operation.attributes:
            yield re.sub(r"_\d+$", "", str(operation.attributes[name]))  # JAX numbers functions of one name


def number_of(*parts: int | str) -> int:
    """Returns a hash of 32 bits that is the same in all processes.

    Example:
        >>> number_of("add", 1, 2) == number_of("add", 1, 2) != number_of("add", 2, 1)
        True
    """
    return _hash(tuple([_number_of_text(part) if isinstance(part, str) else part for part in parts]))


def _hash(numbers: tuple[int, ...]) -> int:
    # Python's hash of a tuple of numbers is the same in each process, and a fifth of the time of a checksum.
    return hash(numbers) & 0xFFFFFFFF


@functools.lru_cache(maxsize=4096)
def _number_of_text(text: str) -> int:
    return zlib.crc32(text.encode())
