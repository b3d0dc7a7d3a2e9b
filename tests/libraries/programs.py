"""Runs one device's program, which takes its axis as an argument, in every way that the package has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import pycollective as pc
from tests.cases import values
from tests.collective.programs import once
from tests.spmd.cases import assert_close, own

Array = Any
Program = Callable[[Array, Any], Any]
"""``program(x, axis)``, a function of one device's ``x``. The axis, a name or a communicator, is for pc.psum."""


class Way(NamedTuple):
    """A way to run a program.

    Attributes:
        id: its name in pytest's reports.
        local: the number of devices of each rank that take part.
        run: ``run(program, world)`` is a function from the stacked arrays of this rank's devices to stacked results.
    """

    id: str
    local: int
    run: Callable[[Program, pc.Communicator], Callable[[Array], Any]]


def _on_one_device(fun: Callable[[Array], Any]) -> Callable[[Array], Any]:
    return lambda xs: jax.tree.map(lambda y: y[None], fun(xs[0]))


def _by_name(program: Program, world: pc.Communicator) -> Callable[[Array], Any]:
    return pc.pmap(lambda x: program(x, "i"), "i")


def _over(compiler: Callable[[Any], Any]) -> Callable[[Program, pc.Communicator], Callable[[Array], Any]]:
    return lambda program, world: _on_one_device(compiler(lambda x: program(x, world)))


WAYS = (
    Way("pmap", 2, _by_name),
    Way("name", 1, lambda program, world: _on_one_device(pc.jit(lambda x: program(x, "i"), axis_name="i"))),
    Way("pc.jit", 1, _over(pc.jit)),
    Way("jax.jit", 1, _over(jax.jit)),
    Way("eager", 1, _over(lambda fun: fun)),
)


def name_of(part: Way | Program) -> str:
    """Names it for pytest."""
    return part.id if isinstance(part, Way) else part.__name__


SOME = (WAYS[0], WAYS[2])
"""The ways for programs that are slow to compile."""


@functools.cache
def _oracle(program: Program, total: int, shape: tuple[int, ...]) -> Any:
    mapped = jax.jit(jax.vmap(lambda x: program(x, "i"), axis_name="i"))
    return once(total, lambda: mapped(values((total, *shape))))


def compare(
    world: pc.Communicator,
    way: Way,
    program: Program,
    shape: tuple[int, ...] = (3,),
    tolerance: float = 1e-4,
    reference: Program | None = None,
) -> None:
    """Compares ``program``, run in a way, with :func:`jax.vmap` of it, or of ``reference``, on arrays of ``shape``."""
    total = world.size * way.local
    want = _oracle(program if reference is None else reference, total, shape)
    got = way.run(program, world)(jax.numpy.asarray(own(world, way.local, np.asarray(values((total, *shape))))))
    assert_close(world, way.local, got, want, tolerance)
