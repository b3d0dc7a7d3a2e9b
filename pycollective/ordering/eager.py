"""Collectives outside any trace: each call is a compiled program of its own."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
from jax.extend.core import Primitive

from pycollective.jax_support import call_site
from pycollective.ordering import dispatch
from pycollective.ordering.region import Region


class _Lent:
    """Stands for the participants of a program in JAX's caches, so that a cached program keeps no communicator alive.

    Attributes:
        owner: the participants during a call; None between calls.
    """

    def __init__(self) -> None:
        self.owner: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.owner, name)


def _compiled(
    primitive: Primitive,
    params: tuple[tuple[str, Any], ...],
    local_axes: Hashable,  # noqa: ARG001 (part of the cache's key: participants with other axes have other programs)
    site: int,  # noqa: ARG001 (part of the cache's key: the site is an attribute of the program)
) -> tuple[Callable[..., Any], Region, _Lent]:
    lent = _Lent()
    region = Region(lambda *operands: primitive.bind(*operands, comm=lent, **dict(params)))
    return jax.jit(region), region, lent


_of_participants: defaultdict[Hashable, Callable[..., tuple[Callable[..., Any], Region, _Lent]]] = defaultdict(
    lambda: functools.lru_cache(maxsize=4096)(_compiled)
)
"""The programs, by the keys of their participants."""


def forget(keys: Iterable[Hashable]) -> None:
    """Drops the programs of communicators, or of parts of them, that were freed. A program takes a megabyte."""
    for key in keys:
        _of_participants.pop(key, None)


def apply(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Runs a primitive with our effect outside any trace. It is the implementation rule of our primitives.

    JAX compiles one program for each combination of shapes, dtypes, parameters and line of the call. The ranks compare
    the lines.
    """
    line = call_site.line_of_caller()
    comm = params.pop("comm")
    program, region, lent = _of_participants[comm._key](
        primitive, tuple(sorted(params.items())), comm._local_axes, call_site.site_of(line)
    )
    devices = region.devices
    dispatch.wait_for_earlier_programs(dispatch.devices_for(operands, {}) if isinstance(devices, str) else devices)
    lent.owner = comm
    outside = call_site.call_outside_jit.set(line)  # used if the program is compiled in this call
    try:
        if jax.config.jax_disable_jit:  # JAX compiles its own primitives even then, and so does this function
            with jax.disable_jit(False):
                outs = program(*operands)
        else:
            outs = program(*operands)
    finally:
        call_site.call_outside_jit.reset(outside)
        lent.owner = None
    results = dispatch.results_of(outs)
    if not any(x.size for x in jax.tree.leaves(results)):
        jax.block_until_ready(outs)  # a result without elements is never read, so its errors must be raised here
        return results
    return dispatch.limit_programs_in_flight(outs)
