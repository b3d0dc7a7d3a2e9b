"""The tables of the tests under mpirun."""

from __future__ import annotations

from typing import Any

import jax

import pycollective as pc
from tests.cases import CASES, EACH_PRIMITIVE, Case, operands


def primitives(cases: tuple[Case, ...], world: pc.Communicator) -> set[Any]:
    """Those of the package, in the cases' programs."""
    found = set()
    for case in cases:
        jaxpr = jax.make_jaxpr(lambda x, case=case: case.call(x, world))(operands(case, world)[0])
        found |= {equation.primitive for equation in jaxpr.jaxpr.eqns if "comm" in equation.params}
    return found


def test_one_operation_of_each_primitive() -> None:
    world = pc.world()
    assert len(primitives(CASES, world)) > 10
    assert primitives(EACH_PRIMITIVE, world) == primitives(CASES, world)
