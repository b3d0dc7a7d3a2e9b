"""Collectives outside any trace: each call is a compiled program of its own."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
from jax.extend.core import Primitive

from pycollective.ordering import call_site, dispatch
from pycollective.ordering.region import Region


def _compiled(
    primitive: Primitive,
    params: tuple[tuple[str, Any], ...],
    site: int,  # noqa: ARG001 (the program has it as an attribute, so each site has a program)
) -> tuple[Callable[..., Any], Region]:
    region = Region(lambda *operands: primitive.bind(*operands, **dict(params)))
    return jax.jit(region), region


_of_participants: defaultdict[Hashable, Callable[..., tuple[Callable[..., Any], Region]]] = defaultdict(
    lambda: functools.lru_cache(maxsize=4096)(_compiled)
)
"""The programs by who takes part in them."""


def forget(participants: Iterable[Hashable]) -> None:
    """Lets go of the programs of communicators, or parts of them, that are freed. Each takes a megabyte."""
    for freed in participants:
        _of_participants.pop(freed, None)


def apply(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Runs a primitive with our effect outside any trace. It is the implementation rule of our primitives.

    JAX compiles a program once for each combination of shapes, dtypes and parameters, which are all hashable, and for
    each line that makes the call: ranks compare the lines.
    """
    line = call_site.line_of_caller()
    program, region = _of_participants[params["comm"]](
        primitive, tuple(sorted(params.items())), call_site.site_of(line)
    )
    devices = region.devices
    dispatch.wait_for_earlier_programs(dispatch.devices_for(operands, {}) if isinstance(devices, str) else devices)
    outside = call_site.call_outside_jit.set(line)  # if the program is compiled now, it has no line of its own
    try:
        if jax.config.jax_disable_jit:  # JAX compiles its own primitives even then, so we do too
            with jax.disable_jit(False):
                outs = program(*operands)
        else:
            outs = program(*operands)
    finally:
        call_site.call_outside_jit.reset(outside)
    if type(outs) is dispatch.WithCompletion and not jax.tree.leaves(outs.outs):
        outs.completion.block_until_ready()  # there is no result to wait for, so errors must show here
    return dispatch.limit_programs_in_flight(outs)
