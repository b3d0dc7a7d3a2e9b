"""Only calls communicate with other ranks: one rank may trace, lower or compile alone, and no rank waits for it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import serialize_executable

import pycollective as pc
from tests.collective.programs import meet

Array = Any


@pytest.fixture
def odd(world: pc.Communicator) -> bool:
    """Whether this rank is the one that does something alone."""
    return world.rank == world.size - 1


def mean(x: Array) -> Array:
    """The mean of the numbers of all ranks; ranks may have different numbers of them."""
    return lax.psum(x.sum(), "i") / lax.psum(jnp.float32(x.shape[0]), "i")


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
WRAPS: dict[str, Wrap] = {
    "jit": lambda f: pc.jit(f, axis_name="i"),
    "pmap": lambda f: lambda x: pc.pmap(f, "i")(x[None])[0],
    "one pmap": lambda f: (lambda g: lambda x: g(x[None])[0])(pc.pmap(f, "i")),
    "inside jax.jit": lambda f: jax.jit(pc.jit(f, axis_name="i")),
    "made inside jax.jit": lambda f: jax.jit(lambda x: pc.jit(f, axis_name="i")(x)),
    "under grad": lambda f: lambda x: jax.value_and_grad(pc.jit(f, axis_name="i"))(x)[0],
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=list(WRAPS))
def test_an_uneven_last_batch(wrap: Wrap, world: pc.Communicator) -> None:
    f = wrap(mean)
    for step in range(3):
        lengths = [8] * (world.size - 1) + [5 if step == 2 else 8]
        want = np.average(range(world.size), weights=lengths)
        np.testing.assert_allclose(f(jnp.full(lengths[world.rank], float(world.rank))), want, rtol=1e-6)


def test_cleared_caches(world: pc.Communicator, odd: bool) -> None:
    f = pc.jit(mean, axis_name="i")
    g = jax.jit(lambda x: pc.psum(x, world))
    for step in range(3):
        if odd and step == 1:
            jax.clear_caches()
        np.testing.assert_allclose(f(jnp.ones(4)), 1.0)
        assert g(jnp.float32(1)) == world.size


@pytest.mark.parametrize("groups", [False, True])
def test_what_does_not_run(world: pc.Communicator, odd: bool, groups: bool) -> None:
    halves = [[*range(0, world.size, 2)], [*range(1, world.size, 2)]] if groups and world.size % 2 == 0 else None
    f = pc.jit(lambda x: lax.psum(x, "i", axis_index_groups=halves), axis_name="i")
    if odd:
        assert f.eval_shape(jnp.ones(3)).shape == (3,)
        assert "psum" in str(f.trace(jnp.ones(3)).jaxpr) or "allreduce" in str(f.trace(jnp.ones(3)).jaxpr)
        compiled = f.lower(jnp.ones(3)).compile()
        assert compiled.cost_analysis() is not None
        # Groups that no other rank has used before.
        assert jax.eval_shape(lambda x: pc.psum(x, world, axis_index_groups=halves), jnp.ones(3)).shape == (3,)
        jax.make_jaxpr(jax.grad(lambda x: pc.scan(x, world).sum()))(jnp.ones(3))
    meet()
    size = world.size // 2 if halves else world.size
    for _ in range(2):
        np.testing.assert_allclose(f(jnp.ones(3)), size)


def test_functions_inside_that_one_rank_knows(world: pc.Communicator, odd: bool) -> None:
    # JAX keeps the traces of inner functions, so the comparison at a function's first call must not depend on them.
    inner = pc.pmap(lambda x: lax.psum(x, "i"), "i")
    named = pc.jit(lambda x: lax.pmax(x, "i"), axis_name="i")
    known = jax.jit(lambda x: inner(x) + named(x))
    x = jnp.ones((1, 3))
    functions = [pc.jit(lambda x, k=k: k * known(x)) for k in range(4)]
    if odd:
        jax.eval_shape(known, x)
        functions[0].lower(x)
    for k, f in enumerate(functions):
        for _ in range(2):
            np.testing.assert_allclose(f(x), k * (world.size + 1))
        if odd and k == 1:
            jax.clear_caches()


@pytest.fixture
def debug_nans() -> Iterator[None]:
    with jax.debug_nans(True):
        yield


def test_a_nan_on_one_rank(world: pc.Communicator, odd: bool, debug_nans: None) -> None:
    # The NaN arises after the last collective, so only one rank sees it.
    @pc.jit(axis_name="i")
    def f(x: Array, y: Array) -> Array:
        return jnp.log(lax.psum(x, "i") * y)

    x = jnp.ones(3)
    np.testing.assert_allclose(f(x, x), np.log(world.size), atol=1e-6)
    if odd:
        with pytest.raises(FloatingPointError, match=r"jit: expected no NaN .* got one, .*allreduce.* JAX_DISABLE_JIT"):
            f(x, -x)
    else:
        f(x, x)
    np.testing.assert_allclose(f(x, x), np.log(world.size), atol=1e-6)


def test_a_nan_before_the_first_collective(world: pc.Communicator, debug_nans: None) -> None:
    @pc.jit(axis_name="i")
    def f(x: Array) -> Array:
        return lax.psum(jnp.log(x) * 2, "i")

    # JAX runs the program again, operation by operation, and names the one that makes the NaN.
    with pytest.raises(FloatingPointError, match="invalid value .*log"):
        f(-jnp.ones(3))
    np.testing.assert_allclose(f(jnp.ones(3)), 0)


def test_the_line_of_a_nan(world: pc.Communicator, debug_nans: None) -> None:
    # The remedy of the error above: all ranks run each operation by itself.
    with jax.disable_jit(), pytest.raises(FloatingPointError, match="invalid value .*log"):
        pc.jit(lambda x: jnp.log(-lax.psum(x, "i")), axis_name="i")(jnp.ones(3))


def test_programs_that_would_leave_the_process(world: pc.Communicator) -> None:
    f = pc.jit(lambda x: pc.psum(x, world))
    assert re.fullmatch(r"<pycollective function <function .*<lambda> at .*>>", repr(f))
    x = jnp.ones(3)
    for fun in (f, jax.jit(f), jax.jit(lambda x: pc.psum(x, world))):
        with pytest.raises(
            ValueError,
            match=r"(?s)no compatibility guarantees.*(pycollective_(device_|async_)?allreduce|mpi_allreduce)",
        ):
            jax.export.export(fun)(x)
    with pytest.raises(AttributeError, match="cannot be serialized, and runs in this process alone"):
        serialize_executable.serialize(f.lower(x).compile())


def test_functions_that_have_no_name(world: pc.Communicator) -> None:
    class Sum:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __call__(self, x: Array) -> Array:
            return self.factor * lax.psum(x, "i")

        def method(self, x: Array) -> Array:
            return lax.psum(self.factor * x, "i")

    for fun in (functools.partial(lax.psum, axis_name="i"), Sum(1.0), Sum(1.0).method, lambda x: lax.psum(x, "i")):
        np.testing.assert_allclose(pc.jit(fun, axis_name="i")(jnp.ones(2)), world.size)
        np.testing.assert_allclose(pc.pmap(fun, "i")(jnp.ones((1, 2)))[0], world.size)


def test_ranks_may_call_their_functions_differently(world: pc.Communicator) -> None:
    def one(x: Array) -> Array:
        return lax.psum(x, "i")

    def other(x: Array) -> Array:
        return lax.psum(x, "i")

    np.testing.assert_allclose(pc.jit(other if world.rank else one, axis_name="i")(jnp.ones(2)), world.size)


def test_a_first_call_that_fails_on_one_rank_fails_on_all(world: pc.Communicator, odd: bool) -> None:
    if world.size == 1:
        pytest.skip("LOUD: needs two ranks")

    @pc.jit(axis_name="i", static_argnums=1)
    def f(x: Array, fails: bool) -> Array:
        if fails:
            raise KeyError("mine")
        return lax.psum(x, "i")

    for _ in range(2):  # the ranks did not agree, so they compare again
        with pytest.raises(KeyError if odd else RuntimeError, match="mine"):
            f(jnp.ones(2), odd)
    np.testing.assert_allclose(f(jnp.ones(2), False), world.size)


def test_a_program_compiled_before_the_first_call_is_compared_then(world: pc.Communicator, odd: bool) -> None:
    if world.size == 1:
        pytest.skip("LOUD: needs two ranks")
    f = pc.jit(lax.pmax if odd else lax.psum, axis_name="i", static_argnums=1)
    run = f.lower(jnp.ones(2), "i").compile() if odd else functools.partial(f, axis_name="i")
    with pytest.raises(RuntimeError, match="jit: expected the same program on every rank, here with p"):
        f(jnp.ones(2), "i") if not odd else run(jnp.ones(2))
