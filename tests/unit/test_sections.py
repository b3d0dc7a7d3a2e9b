"""The sections of programs, read off their jaxprs (``ordering/sections.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

import pycollective as pc
from pycollective.jax_support.jaxprs import all_equations
from pycollective.ordering.effect import effect
from pycollective.ordering.sections import with_sections

X = jnp.ones(3)


@pytest.fixture
def comm() -> pc.Communicator:
    return pc.init()


def marks(function: Callable[..., Any], *args: Any) -> list[tuple[int, bool]]:
    """For each collective of a function, in their order: the number of its section, and whether the call begins it.

    The sections count from 1, and 0 is none.
    """
    jaxpr = with_sections(jax.make_jaxpr(function)(*args).jaxpr, lambda _: True)
    attributes = [eqn.params["passed"].section for eqn in all_equations(jaxpr) if "passed" in eqn.params]
    numbers = {0: 0}
    for attribute in attributes:
        numbers.setdefault(attribute >> 1, len(numbers))
    assert all(0 <= attribute < 1 << 63 for attribute in attributes)
    return [(numbers[attribute >> 1], bool(attribute & 1)) for attribute in attributes]


def attribute(function: Callable[..., Any], *args: Any) -> int:
    """The attribute of the first collective of a function."""
    jaxpr = with_sections(jax.make_jaxpr(function)(*args).jaxpr, lambda _: True)
    first, *_ = (eqn.params["passed"].section for eqn in all_equations(jaxpr) if "passed" in eqn.params)
    return int(first)


def test_calls_in_a_row_are_one_section(comm: pc.Communicator) -> None:
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return pc.pmax(x, comm)

    def function(x: jax.Array) -> jax.Array:
        x = jax.checkpoint(inner)(pc.psum(x, comm))
        return jax.lax.scan(lambda x, _: (inner(x), None), x, None, length=4)[0]

    assert marks(function, X) == [(1, False)] * 3


def test_a_conditional_ends_a_section(comm: pc.Communicator) -> None:
    def function(x: jax.Array) -> jax.Array:
        x = pc.psum(x, comm)
        x = jax.lax.cond(x[0] > 0, lambda x: pc.psum(x, comm), lambda x: pc.pmax(x, comm), x)
        return pc.pmin(pc.pmin(x, comm), comm)

    assert sorted(marks(function, X)) == [(0, False)] * 2 + [(1, False), (2, False), (2, True)]


def test_a_conditional_without_calls_ends_none(comm: pc.Communicator) -> None:
    def function(x: jax.Array) -> jax.Array:
        x = pc.psum(x, comm)
        return pc.psum(jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), comm)

    assert marks(function, X) == [(1, False)] * 2


def test_a_loop_with_a_condition_ends_a_section(comm: pc.Communicator) -> None:
    def function(x: jax.Array) -> jax.Array:
        x = jax.lax.while_loop(lambda x: x[0] < 9, lambda x: pc.psum(x, comm) + 1, pc.psum(x, comm))
        return pc.pmax(x, comm)

    assert marks(function, X) == [(1, False), (0, False), (2, True)]


def test_each_trip_of_a_loop_with_a_conditional_begins_a_section(comm: pc.Communicator) -> None:
    def trip(x: jax.Array, flag: jax.Array) -> tuple[jax.Array, None]:
        x = jax.lax.cond(flag, lambda x: pc.psum(x, comm), lambda x: x, pc.pmax(x, comm))
        return pc.pmin(x, comm), None

    def function(x: jax.Array, flags: jax.Array) -> jax.Array:
        return pc.psum(jax.lax.scan(trip, pc.psum(x, comm), flags)[0], comm)

    found = marks(function, X, jnp.array([True, False]))
    assert sorted(found) == [(0, False), (1, False), (2, True), (3, True), (4, True)]


def test_messages_are_in_no_section(comm: pc.Communicator) -> None:
    def function(x: jax.Array) -> jax.Array:
        pc.send((), comm, dest=0)  # a message without arrays tells what was passed, as a collective does
        return pc.psum(pc.sendrecv(pc.psum(x, comm), comm, source=0, dest=0), comm)

    assert sorted(marks(function, X)) == [(0, False), (1, False), (1, False)]


def test_a_function_in_two_sections_and_in_a_branch(comm: pc.Communicator) -> None:
    """JAX has one program for all its calls. Each place gets the program with its own marks."""

    @jax.jit
    def shared(x: jax.Array) -> jax.Array:
        return pc.psum(x, comm)

    def function(x: jax.Array) -> jax.Array:
        x = shared(pc.pmin(x, comm))
        x = jax.lax.cond(x[0] > 0, shared, lambda x: x, x)
        return pc.pmin(shared(x), comm)

    closed = jax.make_jaxpr(function)(X)
    programs = {id(eqn.params["jaxpr"].jaxpr) for eqn in closed.jaxpr.eqns if eqn.params.get("name") == "shared"}
    assert len(programs) == 1
    assert sorted(marks(function, X)) == [(0, False), (1, False), (1, False), (2, False), (2, True)]


def test_a_function_in_a_loop_and_in_a_branch(comm: pc.Communicator) -> None:
    @jax.jit
    def shared(x: jax.Array) -> jax.Array:
        return pc.psum(x, comm)

    def function(x: jax.Array) -> jax.Array:
        x = jax.lax.scan(lambda x, _: (shared(x), None), x, None, length=2)[0]
        return jax.lax.cond(x[0] > 0, shared, lambda x: x, x)

    assert sorted(marks(function, X)) == [(0, False), (1, False)]


def test_a_function_that_is_called_twice_stays_one(comm: pc.Communicator) -> None:
    @jax.jit
    def shared(x: jax.Array) -> jax.Array:
        return pc.pmax(pc.psum(x, comm), comm)

    jaxpr = with_sections(jax.make_jaxpr(lambda x: shared(shared(shared(x))))(X).jaxpr, lambda _: True)
    first, second, third = (id(eqn.params["jaxpr"].jaxpr) for eqn in jaxpr.eqns)
    assert second == third  # the first one stands where no call has come before
    assert jaxpr.eqns[1].params["jaxpr"] is jaxpr.eqns[2].params["jaxpr"]
    assert len({first, second}) <= 2


def test_each_communicator_begins_its_section(comm: pc.Communicator) -> None:
    other = comm.split(0)
    assert other is not None

    def function(x: jax.Array) -> jax.Array:
        x = jax.lax.cond(x[0] > 0, lambda x: pc.psum(x, comm), lambda x: x, x)
        return pc.psum(pc.psum(pc.psum(pc.psum(x, other), comm), other), comm)

    assert sorted(marks(function, X)) == [(0, False), (1, False), (1, False), (1, True), (1, True)]
    other.free()


def test_a_loop_after_a_conditional_is_a_section_of_its_own(comm: pc.Communicator) -> None:
    """Its first call begins the section in each trip, so what follows the loop must not belong to it."""

    def function(x: jax.Array) -> jax.Array:
        x = jax.lax.cond(x[0] > 0, lambda x: pc.psum(x, comm), lambda x: x, x)
        x = jax.lax.scan(lambda x, _: (pc.pmax(pc.pmin(x, comm), comm), None), x, None, length=3)[0]
        return pc.psum(x, comm)

    assert sorted(marks(function, X)) == [(0, False), (1, False), (1, True), (2, True)]


def test_what_hides_calls_ends_a_section(comm: pc.Communicator) -> None:
    """As another library's operations do, which have the same effect."""
    hidden = Primitive("hidden")
    hidden.def_effectful_abstract_eval(lambda x: (x, {effect}))

    def function(x: jax.Array) -> jax.Array:
        return pc.psum(hidden.bind(pc.psum(x, comm)), comm)

    assert marks(function, X) == [(1, False), (2, True)]


def test_the_number_follows_from_the_calls(comm: pc.Communicator) -> None:
    """It is the same in each trace and process, and another one for other calls, also for those behind the first."""

    def function(x: jax.Array, *, length: int = 3, last: Any = pc.psum, inside: bool = False) -> jax.Array:
        def trip(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            x = pc.psum(x, comm)
            return last(x, comm) if inside else x, None

        x = jax.lax.scan(trip, pc.psum(x, comm), None, length=length)[0]
        return x if inside else last(x, comm)

    def of(**options: Any) -> int:
        return attribute(lambda x: function(x, **options), X)

    assert of() == of()
    another = comm.split(0)
    assert another is not None
    others = [of(length=4), of(last=pc.pmax), of(last=lambda x, comm: pc.psum(x, comm)), of(last=pc.pmean)]
    others += [of(last=lambda x, _: pc.psum(x, another)), attribute(function, jnp.ones(4))]
    others.append(of(inside=True))
    assert len({of(), *others}) == 8
    another.free()


def test_participants_that_share_a_board_are_not_marked(comm: pc.Communicator) -> None:
    jaxpr = jax.make_jaxpr(lambda x: pc.psum(x, comm))(X).jaxpr
    assert with_sections(jaxpr, lambda _: False) is jaxpr
