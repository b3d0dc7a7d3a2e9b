"""The order of MPI calls inside a program: JAX's ordered effect.

MPI needs every rank to make the same calls in the same order, but XLA's CPU runtime runs independent calls at the same
time. So each of our primitives has an ordered effect, and its lowering takes a token of XLA's and returns a new one.
JAX itself passes the token through scan, while, cond and nested jit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from pycollective.ordering import dispatch, jax_internals
from pycollective.ordering.jaxprs import is_foreign


class OrderedCollective(jax_internals.OrderedEffect):
    """The effect of every primitive of this package: it communicates with other ranks, so its order matters.

    All communicators share one effect. Calls on two communicators must keep one order as well, or ranks that belong to
    both could wait for each other.
    """


effect = OrderedCollective()


@functools.lru_cache(maxsize=4096)
def _effects_of_program(primitive: Primitive, avals: tuple[Any, ...], params: tuple[tuple[str, Any], ...]) -> Any:
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
    closed = jax.make_jaxpr(lambda *operands: primitive.impl(*operands, **dict(params)))(*structs)
    return frozenset({effect} & closed.jaxpr.effects)


def _effects_of_foreign(primitive: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Iterable[Any]:
    """Our effect, if the primitive is another library's and its implementation has our effect; else nothing."""
    if is_foreign(primitive):
        avals = tuple(x.aval for x in operands)
        # A primitive that JAX cannot trace, or whose parameters have no order or hash, holds no collective of ours.
        with contextlib.suppress(
            AssertionError, AttributeError, LookupError, NameError, NotImplementedError, TypeError, ValueError
        ):
            return _effects_of_program(primitive, avals, tuple(sorted(params.items())))
    return frozenset()


jax_internals.report_effects(_effects_of_foreign)


# JAX itself dispatches the programs of plain jax.jit, and ours inside a transform. They wait for earlier programs too.
def _before_dispatch(devices: Sequence[jax.Device]) -> None:
    dispatch.wait_for_earlier_programs(
        dispatch.ONLY_DEVICE if dispatch.local_devices() is dispatch.ONLY_DEVICE else dispatch.by_id(devices)
    )


def _after_dispatch(token: Any) -> None:
    dispatch.limit_programs_in_flight(dispatch.WithCompletion(None, token))


jax_internals.see_each_dispatch(effect, _before_dispatch, _after_dispatch)
