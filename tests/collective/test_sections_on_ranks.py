"""Sections: calls that each run of a program makes in the same order are compared in its first run, then once a run.

All ranks are on one host here, where each call is compared on the board. With ``PYCOLLECTIVE_SHARED_MEMORY=off`` they
compare by messages, as between hosts (native/calls/comparison.h); ``tests/e2e/test_hosts.py`` has both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import pycollective as pc
from pycollective.config import config
from pycollective.transport import native
from tests.collective.programs import RUNTIME_ERRORS

BY_MESSAGES = config.shared_memory == "off"
pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="LOUD: one rank has nobody to differ from"),
    pytest.mark.skipif(config.check.when != 2, reason="LOUD: PYCOLLECTIVE_CHECK leaves calls out, or compares each"),
]

X = np.arange(10_000, dtype=np.float32)  # too large to travel with a comparison


def made(call: Callable[[], Any]) -> tuple[np.ndarray, int]:
    """The result of a call, and the number of comparisons by messages that it has made."""
    before = native.comparisons()
    result = np.asarray(call())
    return result, native.comparisons() - before


def check_comparisons(
    run: Callable[[jax.Array], jax.Array], want: np.ndarray, *, first: int, later: int, x: Any = X
) -> None:
    """The first run of a program makes so many comparisons, and each later one so many."""
    expected = [first, later, later] if BY_MESSAGES else [0, 0, 0]
    for count in expected:
        result, comparisons = made(lambda: run(x))
        np.testing.assert_allclose(result, want, rtol=1e-6)
        assert comparisons == count


def test_calls_of_an_exported_program_are_in_no_section(world: pc.Communicator) -> None:
    # It may be called in a loop whose number of trips depends on data: what a run will call is not known.
    inner = pc.jit(lambda x: pc.pmax(pc.psum(x, world), world) / world.size)
    exported = jax.export.export(inner, disabled_checks=pc.export_checks())(X)

    @pc.jit
    def program(x: jax.Array, trips: int) -> jax.Array:
        return jax.lax.fori_loop(0, trips, lambda _, x: exported.call(x), x)

    check_comparisons(lambda x: program(x, 2), X, first=4, later=4)


def test_a_program_compares_once_in_later_runs(world: pc.Communicator) -> None:
    @pc.jit
    def program(x: jax.Array) -> jax.Array:
        total = pc.psum(x, world)
        largest = pc.pmax(jnp.max(x, keepdims=True) + jnp.zeros(len(X)), world)
        pc.barrier(world)  # MPI's own, where it is not compared
        return total + jnp.sum(pc.all_gather(x, world), axis=0) + largest[0]

    check_comparisons(program, 2 * world.size * X + X[-1], first=4, later=1)


def test_loops_of_a_known_length_belong_to_the_section(world: pc.Communicator) -> None:
    @pc.jit
    def program(x: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.jit(lambda x: pc.psum(x, world) / world.size)(x), None

        return pc.psum(jax.lax.scan(step, x, None, length=5)[0], world)

    check_comparisons(program, world.size * X, first=6, later=1)


def test_small_sums_travel_with_a_comparison_in_each_run(world: pc.Communicator) -> None:
    """Their bits are the same in each run, and on each rank."""

    @pc.jit
    def program(x: jax.Array) -> jax.Array:
        return pc.psum(pc.psum(x, world)[:7] / 3, world)

    bits = set()
    for count in (2, 2, 2):
        result, comparisons = made(lambda: program(X * 0.1 + world.rank))
        bits |= set(MPI.COMM_WORLD.allgather(result.tobytes()))
        assert comparisons == (count if BY_MESSAGES else 0)
    assert len(bits) == 1


def test_small_collectives_travel_with_the_comparison_that_they_need(world: pc.Communicator) -> None:
    """In later runs sums alone do, so that their bits stay the same."""

    @pc.jit
    def program(x: jax.Array) -> jax.Array:
        blocks = jnp.outer(jnp.arange(1.0, world.size + 1), x)
        gathered = pc.all_gather(x, world)
        return jnp.concatenate([gathered, pc.all_to_all(blocks, world, 0, 0), pc.psum_scatter(blocks, world)[None]])

    of = np.random.default_rng(3).normal(size=(world.size, 5)).astype(np.float32)
    own = (world.rank + 1) * of
    for count in (3, 2, 2):
        result, comparisons = made(lambda: program(of[world.rank]))
        assert comparisons == (count if BY_MESSAGES else 0)
        np.testing.assert_array_equal(result[:-1], np.concatenate([of, own]))
        np.testing.assert_allclose(result[-1], own.sum(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loop", [False, True])
def test_calls_that_depend_on_data_are_compared_one_by_one(loop: bool, world: pc.Communicator) -> None:
    """What follows them is a section of its own, also in the next trip of a loop."""

    @pc.jit
    def program(x: jax.Array, flags: jax.Array) -> jax.Array:
        def step(x: jax.Array, flag: jax.Array) -> tuple[jax.Array, None]:
            x = pc.psum(pc.psum(x, world) / world.size, world) / world.size
            x = jax.lax.cond(flag, lambda x: pc.psum(x, world) / world.size, lambda x: x, x)
            return pc.pmax(pc.pmax(x, world), world), None

        return jax.lax.scan(step, x, flags)[0] if loop else step(x, flags[0])[0]

    flags = jnp.array([True, False, True])[: 3 if loop else 1]
    taken = 2 if loop else 1
    # A loop has a section before the conditional and one behind it, in each trip.
    first, later = 4 * len(flags) + taken, 2 * len(flags) + taken
    check_comparisons(lambda x: program(x, flags), X, first=first - (4 if loop else 0), later=later)
    other = flags.at[0].set(world.rank != 0)
    with pytest.raises(RUNTIME_ERRORS, match="CollectiveMismatch"):
        jax.block_until_ready(program(X, other))
    np.testing.assert_array_equal(program(X, flags), X)


def test_a_function_that_is_called_before_and_after(world: pc.Communicator) -> None:
    @jax.jit
    def twice(x: jax.Array) -> jax.Array:
        return pc.psum(pc.psum(x, world), world) / world.size**2

    @pc.jit
    def program(x: jax.Array) -> jax.Array:
        x = twice(x)
        x = jax.lax.cond(x[1] > 0, lambda x: pc.psum(x, world) / world.size, lambda x: x, x)
        return pc.pmax(pc.pmax(twice(x), world), world)

    check_comparisons(program, X, first=7, later=3)


def test_a_function_in_a_loop_and_in_a_branch(world: pc.Communicator) -> None:
    """The branch makes calls of a function that a section has, too. Ranks that take other branches get an error."""
    total, largest = jax.jit(lambda x: pc.psum(x, world) / world.size), jax.jit(lambda x: pc.pmax(x, world))

    @pc.jit
    def program(x: jax.Array, flag: jax.Array) -> jax.Array:
        x = jax.lax.scan(lambda x, _: (largest(total(x)), None), x, None, length=1)[0]
        return jax.lax.cond(flag, total, largest, x)

    check_comparisons(lambda x: program(x, True), X, first=3, later=2)
    with pytest.raises(RUNTIME_ERRORS, match="CollectiveMismatch"):
        jax.block_until_ready(program(X, world.rank == 0))
    np.testing.assert_array_equal(program(X, False), X)


def test_two_communicators_in_trips_of_a_loop(world: pc.Communicator) -> None:
    """Each of them begins its section. On one of them the rank is alone, and waits for nobody."""
    own = world.split(color=world.rank)
    assert own is not None

    @pc.jit
    def program(x: jax.Array, flags: jax.Array) -> jax.Array:
        def trip(x: jax.Array, flag: jax.Array) -> tuple[jax.Array, None]:
            x = jax.lax.cond(flag, lambda x: pc.pmax(x, world), lambda x: x, x)
            return pc.psum(pc.psum(x, own), world) / world.size, None

        return jax.lax.scan(trip, x, flags)[0]

    flags = jnp.array([False, True, False])
    for _ in range(3):
        np.testing.assert_allclose(program(X, flags), X, rtol=1e-6)
    with pytest.raises(RUNTIME_ERRORS, match="CollectiveMismatch"):
        jax.block_until_ready(program(X, flags.at[1].set(world.rank != 0)))
    np.testing.assert_allclose(program(X, flags), X, rtol=1e-6)


def test_trips_of_a_loop_after_a_conditional(world: pc.Communicator) -> None:
    """Programs that differ in the length of a loop alone, on two ranks, after both have run on all."""

    def program(x: jax.Array, length: int) -> jax.Array:
        x = jax.lax.cond(x[1] > 0, lambda x: pc.psum(x, world) / world.size, lambda x: x, x)
        x = jax.lax.scan(lambda x, _: (pc.pmin(pc.pmax(x, world), world), None), x, None, length=length)[0]
        return pc.psum(x, world) / world.size

    programs = [pc.jit(lambda x, length=length: program(x, length)) for length in (2, 3)]
    for _ in range(3):
        for each in programs:
            np.testing.assert_allclose(each(X), X, rtol=1e-6)
    with pytest.raises(RUNTIME_ERRORS, match="CollectiveMismatch"):
        jax.block_until_ready(programs[int(world.rank == 0)](X))


def test_another_program_with_the_same_first_call(world: pc.Communicator) -> None:
    def head(x: jax.Array) -> jax.Array:
        return pc.psum(x, world)

    def sums(x: jax.Array) -> jax.Array:
        return pc.psum(head(x), world) / world.size**2

    def gathers(x: jax.Array) -> jax.Array:
        return pc.all_gather(head(x), world)[0] / world.size

    programs = [pc.jit(sums), pc.jit(gathers)]
    for _ in range(3):
        for program in programs:
            np.testing.assert_array_equal(program(X), X)
    with pytest.raises(RUNTIME_ERRORS, match=r"(?s)allreduce.*allgather|allgather.*allreduce"):
        jax.block_until_ready(programs[world.rank % 2](X))
    for program in programs:
        np.testing.assert_array_equal(program(X), X)


def test_one_program_here_and_two_there(world: pc.Communicator) -> None:
    """Ranks may cut their calls into other programs. Then no call of theirs is covered by another one."""

    def first(x: jax.Array) -> jax.Array:
        return pc.broadcast(x, world, root=0)

    def second(x: jax.Array) -> jax.Array:
        return pc.psum(x, world)

    whole, one, other = pc.jit(lambda x: second(first(x))), pc.jit(first), pc.jit(second)
    check_comparisons(whole if world.rank == 0 else lambda x: other(one(x)), world.size * X, first=2, later=1)


def test_a_program_that_begins_with_a_known_broadcast(world: pc.Communicator) -> None:
    @pc.jit
    def program(x: jax.Array) -> jax.Array:
        x = pc.broadcast(x, world, root=0)
        return pc.psum(pc.psum(x, world), world) / world.size**2

    x = X[:9000]
    check_comparisons(program, x, first=3, later=1, x=x)
    check_comparisons(program, x, first=1, later=1, x=x)


def test_a_program_that_has_failed_goes_on(world: pc.Communicator) -> None:
    """All ranks leave the program at the same place. Its next run may be whole, or end at the same place again."""
    fails = False

    def look(x: np.ndarray) -> np.ndarray:
        if fails:
            raise ValueError("as asked")
        return x

    @pc.jit
    def program(x: jax.Array) -> jax.Array:
        x = pc.psum(x, world) / world.size
        x = jax.pure_callback(look, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return pc.pmax(pc.pmax(x, world), world)

    for fails in (True, True, False, False, True, False, False):
        if fails:
            with pytest.raises(RUNTIME_ERRORS, match="as asked"):
                jax.block_until_ready(program(X))
        else:
            np.testing.assert_array_equal(program(X), X)


def test_sections_of_a_part_of_the_ranks(comm: pc.Communicator) -> None:
    """Each communicator has its own."""

    @pc.jit
    def program(x: jax.Array) -> jax.Array:
        x = pc.psum(x, comm) / comm.size
        x = pc.psum(x, pc.world()) / pc.world().size
        return pc.psum(x, comm) / comm.size

    first = 3 if comm.size > 1 else 1
    check_comparisons(program, X, first=first, later=2 if comm.size > 1 and comm is not pc.world() else 1)


def test_named_axes_are_compared_as_communicators_are(world: pc.Communicator) -> None:
    program = pc.jit(lambda x: jax.lax.psum(jax.lax.pmax(x, "i"), "i"), axis_name="i")
    check_comparisons(program, world.size * X, first=2, later=1)


def test_lines_that_may_differ_cost_once(world: pc.Communicator) -> None:
    """A sum of stages of their own: the ranks look at their lines once."""

    def here(x: jax.Array) -> jax.Array:
        return pc.psum(x, world)

    def there(x: jax.Array) -> jax.Array:
        return pc.psum(x, world)

    stage = jax.jit(here if world.rank == 0 else there)
    for _ in range(3):
        np.testing.assert_array_equal(stage(X), world.size * X)
