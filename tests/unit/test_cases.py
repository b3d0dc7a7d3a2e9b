"""The tables of the tests under mpirun."""

from __future__ import annotations

from typing import Any

import jax

import pycollective as pc
from pycollective.transport import native
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


def test_each_operation_has_a_case() -> None:
    """But a message alone, and a barrier, which have no values to compare with a reference."""
    found = {primitive.name for primitive in primitives(EACH_PRIMITIVE, pc.init())}
    assert set(native.host_targets()) - found == {"barrier", "recv", "send"}
