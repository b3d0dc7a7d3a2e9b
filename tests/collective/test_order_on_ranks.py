"""Collectives run in the order of the program, and programs run in the order in which they are called."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from pycollective.jax_support import jax_dispatch
from pycollective.ordering import eager
from pycollective.ordering.effect import _before_compilation
from tests.cases import values


def distinct(world: pc.Communicator, length: int) -> jax.Array:
    return jnp.full(length, world.rank + 1.0)


@pytest.mark.parametrize("jit", [jax.jit, pc.jit])
def test_independent_calls_of_one_program(jit: object, world: pc.Communicator) -> None:
    # Only the token orders these calls. Sizes differ, so that a swap would be an MPI error or a wrong sum.
    lengths = [1, 50_000, 3, 7, 20_000, 2] * 4
    f = jit(lambda xs: [pc.psum(jnp.sin(x) if i % 3 else x, world) for i, x in enumerate(xs)])  # type: ignore[operator]
    xs = [distinct(world, n) * (i + 1) for i, n in enumerate(lengths)]
    for _ in range(20):
        ys = f(xs)
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        ranks = np.arange(1, world.size + 1, dtype=np.float32) * (i + 1)
        np.testing.assert_allclose(y, np.full(len(x), (np.sin(ranks) if i % 3 else ranks).sum()), rtol=1e-5)


@pytest.mark.parametrize("jit", [jax.jit, pc.jit])
@pytest.mark.parametrize("length", [3, 0])
def test_a_function_without_arguments_and_an_equal_constant(length: int, jit: object, world: pc.Communicator) -> None:
    """Without arrays or with arrays that have no elements, a token is all that it gets. JAX 0.12 ended the process."""
    inner = jax.jit(lambda: pc.psum(jnp.full(length, 2.5), world))
    y = jit(lambda x: inner() + 2.5 * x + jnp.full(length, 2.5))(jnp.ones(length))  # type: ignore[operator]
    np.testing.assert_array_equal(y, np.full(length, 2.5 * world.size + 5))


def test_passes_that_the_user_disables(world: pc.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    compiler = jax_dispatch.compiler
    monkeypatch.setattr(compiler, "compile_or_get_cached", compiler.compile_or_get_cached)  # it is put back
    if jax.__version_info__ < (0, 12):  # only newer ones have the pass
        jax_dispatch.see_each_compilation(before=_before_compilation)
    jax_dispatch.see_each_compilation(before=lambda _, options: seen.append(options))
    options = {"xla_disable_hlo_passes": "one"}
    jax.jit(lambda x: pc.psum(x, world), compiler_options=options)(jnp.ones(5))
    jax.jit(lambda x: x - 1, compiler_options=options)(jnp.ones(5))
    disabled = [dict(each.env_option_overrides).get("xla_disable_hlo_passes") for each in seen]
    assert [passes for passes in disabled if passes] == ["one,nullary-function-wrap-inliner", "one"]


def test_unused_results_are_still_computed(world: pc.Communicator) -> None:
    # Rank 0 does not use the result. Without the effect JAX would remove its call, and the other ranks would wait.
    def f(x: jax.Array) -> jax.Array:
        y = pc.psum(x, world)
        return x if world.rank == 0 else y

    for jit in (jax.jit, pc.jit):
        y = jit(f)(distinct(world, 3))
        want = 1.0 if world.rank == 0 else world.size * (world.size + 1) / 2
        assert y.tolist() == [want] * 3


def test_a_program_that_only_sends_is_not_removed(world: pc.Communicator) -> None:
    if world.size == 1:
        pytest.skip("LOUD: needs two ranks")
    give = pc.jit(lambda x: pc.send(x, world, dest=1))
    echo = pc.jit(lambda x: (pc.send(x, world, dest=1), x)[1])
    for _ in range(10):
        if world.rank == 0:
            assert give(jnp.arange(4)) is None
            assert echo(jnp.arange(4)).tolist() == [0, 1, 2, 3]
        elif world.rank == 1:
            for _ in range(2):
                assert pc.recv(jnp.zeros(4, int), world, source=0).tolist() == [0, 1, 2, 3]


def test_slow_and_fast_programs_interleaved(world: pc.Communicator) -> None:
    """Dispatches 1,200 programs without waiting: a fast program must not overtake the slow one before it."""

    def slow(x: jax.Array, m: jax.Array) -> jax.Array:
        m = lax.fori_loop(0, 3, lambda _, m: jnp.tanh(m @ m), m)
        return pc.psum(x + 0 * m[0, :1], world) + pc.psum(2 * x, world)

    slow_jit, fast_jit = pc.jit(slow), pc.jit(lambda x: pc.psum(x, world))
    plain_jit = jax.jit(lambda x: pc.pmax(x, world))
    m = jnp.asarray(values((150, 150)) / 100)
    total = world.size * (world.size + 1) / 2
    results = []
    x = distinct(world, 1)
    for step in range(400):
        results += [(3 * total, slow_jit(x, m)), (total * (step % 7), fast_jit(x * (step % 7)))]
        results += [(world.size, plain_jit(x) if step % 50 == 0 else pc.pmax(x, world))]
    for want, got in results:
        np.testing.assert_allclose(got, [want], rtol=1e-6)


def test_two_communicators_keep_one_order(world: pc.Communicator) -> None:
    # Every rank calls on two communicators; if two ranks had different orders they would deadlock.
    pair = world.split(color=world.rank // 2)
    assert pair is not None

    @pc.jit
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        a, b = x, 2 * x
        for _ in range(50):
            a, b = pc.psum(a, world) / world.size, pc.psum(b, pair) / pair.size
        return a, b

    a, b = f(distinct(world, 1000))
    np.testing.assert_allclose(a, np.full(1000, (world.size + 1) / 2), rtol=1e-4)
    members = [r + 1.0 for r in range(world.size) if r // 2 == world.rank // 2]
    np.testing.assert_allclose(b, np.full(1000, 2 * np.mean(members)), rtol=1e-4)
    pair.free()


def test_a_compiled_function_inside_a_program(world: pc.Communicator) -> None:
    inner = pc.jit(lambda x: pc.psum(x, world))

    @jax.jit
    def outer(x: jax.Array) -> jax.Array:
        return inner(pc.psum(x, world)) + inner(x) + pc.pmax(x, world)

    n, total = world.size, world.size * (world.size + 1) / 2
    assert outer(distinct(world, 1))[0] == n * total + total + n


def test_other_ordered_effects(world: pc.Communicator, capfd: pytest.CaptureFixture[str]) -> None:
    @pc.jit
    def f(x: jax.Array) -> jax.Array:
        y = pc.psum(x, world)
        jax.debug.print("y is {}", y, ordered=True)
        return pc.psum(y, world)

    for _ in range(3):
        assert f(1.0) == world.size**2
    jax.effects_barrier()
    assert capfd.readouterr().out.count(f"y is {float(world.size)}") == 3


def test_static_arguments_keywords_and_pytrees(world: pc.Communicator) -> None:
    @pc.jit(static_argnums=1, static_argnames="scale")
    def f(tree: dict[str, jax.Array], power: int, *, scale: str = "one") -> dict[str, jax.Array]:
        assert isinstance(power, int)
        assert isinstance(scale, str)
        return {key: pc.psum(x**power, world) * (2 if scale == "two" else 1) for key, x in tree.items()}

    y = f({"a": jnp.asarray([2.0]), "b": jnp.asarray(3)}, 2, scale="two")
    assert y["a"][0] == 8.0 * world.size
    assert y["b"] == 18 * world.size
    assert f({"a": jnp.asarray([2.0])}, 3)["a"][0] == 8.0 * world.size


def test_methods(world: pc.Communicator) -> None:
    class Model:
        factor = 3.0

        @pc.jit(static_argnums=0)
        def total(self, x: jax.Array) -> jax.Array:
            return self.factor * pc.psum(x, world)

    assert Model().total(jnp.asarray(1.0)) == 3.0 * world.size


def test_disable_jit(world: pc.Communicator) -> None:
    seen = []

    @pc.jit
    def f(x: jax.Array) -> jax.Array:
        y = pc.psum(x, world)
        seen.append(float(y))  # a value, not a tracer
        return 2 * y

    with jax.disable_jit():
        assert f(jnp.asarray(1.0)) == 2 * world.size
    assert seen == [world.size]


def test_compiled_once(world: pc.Communicator) -> None:
    traces = []

    @pc.jit
    def f(x: jax.Array) -> jax.Array:
        traces.append(x.shape)
        return pc.psum(x, world)

    for _ in range(3):
        f(jnp.ones(2))
    assert len(traces) == 1
    f.clear_cache()
    f(jnp.ones(2))
    assert len(traces) == 2
    assert re.search("pycollective_(device_|async_)?allreduce|mpi_allreduce", f.lower(jnp.ones(2)).as_text())


def test_eager_calls_of_one_line_do_not_recompile(world: pc.Communicator) -> None:
    x = jnp.ones(3)
    comm = world.split(0)
    for _ in range(5):
        pc.psum(x, comm)
    (programs,) = [programs for who, programs in eager._of_participants.items() if who == comm._key]
    assert programs.cache_info()[:2] == (4, 1)  # hits and misses
    comm.free()
