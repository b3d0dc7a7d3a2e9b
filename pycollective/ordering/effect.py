"""The order of MPI calls inside a program: JAX's ordered effect.

In MPI all ranks must make the same calls in the same order, but XLA's CPU runtime runs independent calls at the same
time. So each of our primitives has an ordered effect. Its lowering takes a token of XLA and returns a new token. JAX
passes the token through scan, while, cond and nested jit.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from pycollective.errors import message
from pycollective.jax_support import jax_dispatch, jax_internals
from pycollective.jax_support.jaxprs import is_foreign, manual_sizes
from pycollective.ordering import dispatch, transforms

_HASH_OF_MPI4JAX = hash(int(hashlib.md5(b"I love mpi4jax very much", usedforsecurity=False).hexdigest(), 16))
"""The constant hash of mpi4jax's effect."""


def _is_of_mpi4jax(kind: object) -> bool:
    return type(kind).__module__.partition(".")[0] == "mpi4jax"


class OrderedCollective(jax_internals.OrderedEffect):
    """The effect of all primitives of this package: they communicate with other ranks, so their order matters.

    All communicators share one effect, since calls on two communicators need one order as well: otherwise ranks that
    belong to both could deadlock. For the same reason our effect is equal to mpi4jax's effect and has the same hash.
    JAX keeps effects in sets and tokens in dictionaries. So for JAX both are one effect, and one token passes through
    the calls of both packages. This works without an import of mpi4jax, which may come before or after ours.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) or (_is_of_mpi4jax(other) and type(other).__name__ == "OrderedMPIEffect")

    def __hash__(self) -> int:
        return _HASH_OF_MPI4JAX


effect = OrderedCollective()
transforms.mask_batched_loops(effect)


def _check_mpi4jax(kind: Any, primitive: Primitive) -> None:
    """Refuses a call of mpi4jax without an order with our calls, or in a program on several devices.

    Args:
        kind: the effect of the call.
        primitive: the primitive of the call, or a primitive with a program that makes it.
    """
    if kind != effect or hash(kind) != hash(effect):
        raise RuntimeError(
            message(
                "ordering",
                "mpi4jax 0.9, whose calls keep one order with ours",
                f"one whose {primitive} has the effect {kind!r}",
                "Install mpi4jax 0.9, or import pycollective.compat.mpi4jax in its place.",
            )
        )
    if math.prod(manual_sizes(jax.sharding.get_abstract_mesh())) > 1:
        raise NotImplementedError(
            message(
                "ordering",
                "mpi4jax's calls in programs on one device of each rank",
                f"{primitive} in a program on several",
                "Import pycollective.compat.mpi4jax in its place.",
            )
        )
    jax_internals.allow_in_checkpoint(kind)  # a program with calls of both packages has one of the two objects


@functools.lru_cache(maxsize=4096)
def _effects_of_program(primitive: Primitive, avals: tuple[Any, ...], params: tuple[tuple[str, Any], ...]) -> Any:
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
    closed = jax.make_jaxpr(lambda *operands: primitive.impl(*operands, **dict(params)))(*structs)
    return frozenset({effect} & closed.jaxpr.effects)


def _effects_of(
    primitive: Primitive, operands: Sequence[Any], params: dict[str, Any], declared: Iterable[Any]
) -> Iterable[Any]:
    """Returns the effects that a primitive declares.

    A primitive of another library may declare none although its implementation has our effect: then it is our effect.
    """
    if declared:
        for kind in declared:
            if _is_of_mpi4jax(kind):
                _check_mpi4jax(kind, primitive)
        return declared
    if is_foreign(primitive):
        avals = tuple(x.aval for x in operands)
        # A primitive that JAX cannot trace, or whose parameters cannot be sorted or hashed, has no collective of ours.
        with contextlib.suppress(
            AssertionError, AttributeError, LookupError, NameError, NotImplementedError, TypeError, ValueError
        ):
            return _effects_of_program(primitive, avals, tuple(sorted(params.items())))
    return frozenset()


jax_internals.report_effects(_effects_of)
jax_internals.keep_in_loops(effect)


# JAX itself dispatches the programs of plain jax.jit, and our programs inside a transform. Through this hook they wait
# for earlier programs as well.
def _before_dispatch(devices: Sequence[jax.Device]) -> None:
    dispatch.wait_for_earlier_programs(dispatch.devices_of_program(devices))


jax_dispatch.keep_tokens_out_of_cache()
jax_dispatch.call_programs_compiled_ahead_with_tokens()
jax_dispatch.see_each_dispatch(effect, _before_dispatch, dispatch.limit_completions_in_flight)


# XLA of JAX 0.12 has a pass that inlines a function whose only operand is a token, and makes the function's constants
# depend on the token. If an equal constant exists outside the function, a later pass merges the two constants. That
# pass cannot remove the one that depends on the token, and ends the process. A collective of constants makes such a
# function. So does a collective of arrays without elements, which are constants for XLA. Without the first pass the
# function is inlined later, and its constants have no dependency.
def _before_compilation(module: Any, options: Any) -> None:
    bytecode = io.BytesIO()
    module.operation.write_bytecode(file=bytecode)
    if b"pycollective_" in bytecode.getvalue():  # the name of a handler
        jax_dispatch.disable_pass(options, "nullary-function-wrap-inliner")


if jax.__version_info__ >= (0, 12):
    jax_dispatch.see_each_compilation(before=_before_compilation)
