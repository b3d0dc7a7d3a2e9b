"""A candidate, compiled for as many virtual devices as its mesh has."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from pycollective.planning.by_compiling.candidates import Candidate, Spec
from pycollective.planning.by_compiling.program_work import (
    Beside,
    Communication,
    Convolution,
    Product,
    Stream,
    Work,
    work_of,
)

READY = "ready"
"""What a worker answers when it has started."""


class Request(NamedTuple):
    """What a worker compiles.

    Attributes:
        candidate: how the arguments are spread.
        outs: for each result the place of the argument that it replaces in the next step, or None.
        donated: the places of the arguments whose memory the results may take.
    """

    candidate: Candidate
    outs: tuple[int | None, ...]
    donated: tuple[int, ...]


class Compiled(NamedTuple):
    """What a worker finds.

    Attributes:
        work: what each device does.
        memory: the bytes that a device needs at most, by XLA's account.
        out_specs: how each result is spread.
    """

    work: Work
    memory: int
    out_specs: tuple[Spec, ...]


_ITEMS = {item.__name__: item for item in (Product, Convolution, Stream)}


def as_json(found: Compiled) -> str:
    """What a worker has found, as :func:`from_json` reads it."""
    doubtful = {why: _as_rows(items) for why, items in found.work.doubtful.items()}
    communication = list(found.work.communication.items())
    beside = [[one.communication, one.times, _as_rows(one.computing)] for one in found.work.beside]
    work = [_as_rows(found.work.computing), communication, found.work.scratch, doubtful, beside]
    return json.dumps([*work, found.memory, found.out_specs])


def _as_rows(items: Counter[Any]) -> list[Any]:
    return [[type(item).__name__, item, times] for item, times in items.items()]


def _from_rows(rows: Any) -> Counter[Any]:
    return Counter({_ITEMS[name](*_tuple(item)): times for name, item, times in rows})


def from_json(text: str) -> Compiled:
    """Reads what :func:`as_json` has written.

    Raises:
        ValueError: the text is something else.
    """
    try:
        computing, communication, scratch, doubtful, beside, memory, out_specs = json.loads(text)
        work = Work(
            _from_rows(computing),
            Counter({Communication(*_tuple(item)): times for item, times in communication}),
            scratch,
            {why: _from_rows(rows) for why, rows in doubtful.items()},
            tuple(Beside(Communication(*_tuple(item)), times, _from_rows(rows)) for item, times, rows in beside),
        )
        return Compiled(work, memory, _tuple(out_specs))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no {Compiled.__name__}: {error!r}") from error


def _tuple(value: Any) -> Any:
    """JSON has one kind of sequence."""
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def compile_candidate(step: jax.export.Exported, request: Request) -> Compiled:
    """Compiles a program for as many devices as its mesh has; JAX must have them."""
    mesh = mesh_of(request.candidate, jax.devices())
    shardings = [NamedSharding(mesh, jax.P(*spec)) for spec in request.candidate.specs]
    outs = [None if place is None else shardings[place] for place in request.outs]
    program = jax.jit(step.call, in_shardings=tuple(shardings), out_shardings=outs, donate_argnums=request.donated)
    compiled = program.lower(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in step.in_avals)).compile()
    stats: Any = compiled.memory_analysis()
    arrays = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    specs = tuple(_spec_of(sharding) for sharding in compiled.output_shardings)
    return Compiled(work_of(compiled.as_text(), mesh.size), arrays + stats.temp_size_in_bytes, specs)


def mesh_of(candidate: Candidate, devices: list[jax.Device]) -> Mesh:
    """The mesh of a candidate. Neighbours along the last axis are on one host where they can be."""
    sizes = candidate.mesh
    table = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(table, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _spec_of(sharding: Any) -> Spec:
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
