"""Every operation inside JAX's control flow and call-like transforms, and differentiated through them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from pycollective.jax_support.jaxprs import inner_jaxprs
from pycollective.ordering.effect import effect
from tests.cases import EACH_PRIMITIVE, Case, operands, values
from tests.collective.programs import compare

STEPS = 3
Function = Callable[[Any], Any]


def in_scan(f: Function) -> Function:
    """f(x) + f(2 x) + f(3 x), as a scan over the factors."""
    return lambda x: lax.scan(lambda c, k: (c, f(k * x)), 0.0, jnp.arange(1.0, STEPS + 1))[1].sum(axis=0)


def in_fori_loop(f: Function) -> Function:
    def loop(x: Any) -> Any:
        start = jnp.zeros_like(f(x))
        return lax.fori_loop(1, STEPS + 1, lambda k, c: c + f(jnp.float32(k) * x), start)

    return loop


def in_while_loop(f: Function) -> Function:
    def loop(x: Any) -> Any:
        start = (jnp.float32(1), jnp.zeros_like(f(x)))
        return lax.while_loop(lambda c: c[0] <= STEPS, lambda c: (c[0] + 1, c[1] + f(c[0] * x)), start)[1]

    return loop


def in_cond(f: Function) -> Function:
    # The predicate is the same on all ranks, as it must be, but it is known only at run time.
    return lambda x: lax.cond(x.size >= jnp.int32(0), lambda x: 6 * f(x), lambda x: 0 * f(x), x)


def in_switch(f: Function) -> Function:
    branches = [lambda x: 0 * f(x), lambda x: 6 * f(x), lambda x: f(2 * x)]
    return lambda x: lax.switch(jnp.int32(x.ndim >= 0), branches, x)


def in_checkpoint(f: Function) -> Function:
    return jax.checkpoint(lambda x: 6 * f(x))  # type: ignore[no-any-return]


def in_custom_vjp(f: Function) -> Function:
    @jax.custom_vjp
    def g(x: Any) -> Any:
        return 6 * f(x)

    g.defvjp(lambda x: jax.vjp(lambda x: 6 * f(x), x), lambda back, ct: back(ct))
    return g


def in_custom_jvp(f: Function) -> Function:
    @jax.custom_jvp
    def g(x: Any) -> Any:
        return 6 * f(x)

    g.defjvp(lambda primals, tangents: jax.jvp(lambda x: 6 * f(x), primals, tangents))
    return g


def in_jit(f: Function) -> Function:
    return jax.jit(lambda x: 6 * jax.jit(f)(x))


# All of them compute 6 f(x) if f(k x) = k f(x) for k > 0.
PLACES = (in_scan, in_fori_loop, in_cond, in_switch, in_checkpoint, in_custom_vjp, in_custom_jvp, in_jit)


@pytest.mark.parametrize("place", (*PLACES, in_while_loop), ids=lambda place: place.__name__)
def test_value(place: Callable[[Function], Function], world: pc.Communicator) -> None:
    inputs = lambda case: [operands(case, world)]
    value = lambda f, x: place(f)(x)
    compare(world, EACH_PRIMITIVE, inputs, value, lambda f, xs: 6 * f(xs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_grad(place: Callable[[Function], Function], world: pc.Communicator) -> None:
    def grad(f: Function, x: Any, w: Any) -> Any:
        return jax.grad(lambda x: jnp.vdot(w, place(f)(x)))(x)

    def grad_of_all(reference: Function, xs: Any, ws: Any) -> Any:
        return jax.grad(lambda xs: 6 * jnp.vdot(ws, reference(xs)))(xs)

    def inputs(case: Case) -> list[Any]:
        xs = operands(case, world)
        return [xs, values(jax.eval_shape(case.reference, xs).shape, seed=1)]

    compare(world, EACH_PRIMITIVE, inputs, grad, grad_of_all, rtol=1e-4, atol=1e-4)


def test_scan_in_plain_jit(comm: pc.Communicator) -> None:
    inputs = lambda case: [operands(case, comm)]
    f = lambda f, x: in_scan(in_cond(f))(x)
    compare(comm, EACH_PRIMITIVE, inputs, f, lambda f, xs: 36 * f(xs), compiler=jax.jit, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable", "dots_saveable"])
def test_checkpoint_policies(policy: str, world: pc.Communicator) -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(pc.psum(jnp.sin(x) @ x, world) ** 2)

    x = jnp.asarray(values((4, 4), seed=world.rank))
    saved = jax.checkpoint(loss, policy=getattr(jax.checkpoint_policies, policy))
    np.testing.assert_allclose(pc.jit(jax.grad(saved))(x), pc.jit(jax.grad(loss))(x), rtol=1e-4, atol=1e-4)


def test_a_batched_predicate_runs_both_branches(world: pc.Communicator) -> None:
    # JAX turns the cond into a select, so the call happens once on every rank.
    def f(p: jax.Array) -> jax.Array:
        return lax.cond(p, lambda: pc.psum(1.0, world), lambda: 0.0)

    np.testing.assert_array_equal(jax.vmap(f)(jnp.asarray([True, False])), [world.size, 0])


def calls(jaxpr: Any, trips: int = 1) -> Counter[str]:
    """How often a program makes each call, its loops included."""
    found: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        inner = inner_jaxprs(eqn)
        for each in inner:
            found += calls(each, trips * eqn.params.get("length", 1))
        if effect in eqn.effects and not inner:
            found[eqn.primitive.name] += trips
    return found


def recompute(f: Function) -> Function:
    return jax.checkpoint(f)  # type: ignore[no-any-return]


def save_all(f: Function) -> Function:
    return jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)  # type: ignore[no-any-return]


@pytest.mark.parametrize("around", [lambda f: f, recompute, save_all], ids=["alone", "recompute", "save_all"])
def test_each_trip_of_a_differentiated_scan_makes_its_calls(
    around: Callable[[Function], Function], world: pc.Communicator
) -> None:
    """Also calls of constants, and calls without used results. Only rank 0 reduces a constant."""
    neighbour = (world.rank + 1) % world.size

    def loop(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
        def trip(carry: jax.Array, _: None) -> tuple[jax.Array, Any]:
            state = lax.stop_gradient(carry)
            total = pc.psum(jnp.ones(3) if world.rank == 0 else state, world)
            pc.psum(x, world)
            request = pc.isend(state, world, dest=neighbour)
            template = jax.ShapeDtypeStruct(x.shape, x.dtype)
            arrived = pc.recv(template, world, source=(world.rank - 1) % world.size)
            pc.wait(request)
            pc.barrier(world)
            return jnp.sin(carry) * jnp.cos(w) + total, (total, arrived)

        last, totals = lax.scan(trip, x, length=STEPS)
        return jnp.sum(last), totals

    x, w = jnp.arange(3.0) + world.rank, jnp.full(3, 0.5)
    derivative = jax.value_and_grad(around(loop), (0, 1), has_aux=True)
    made, expected = calls(jax.make_jaxpr(derivative)(x, w).jaxpr), calls(jax.make_jaxpr(loop)(x, w).jaxpr)
    if around is recompute:
        expected["allreduce"] *= 2
    assert made == expected
    assert set(made.values()) <= {STEPS, 2 * STEPS, 4 * STEPS}
    value, (got, gradient) = pc.jit(loop)(x, w), pc.jit(derivative)(x, w)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), got, value)

    def alone(x: jax.Array, w: jax.Array) -> jax.Array:  # with the totals that the calls have given
        step = lambda carry, total: (jnp.sin(carry) * jnp.cos(w) + total, None)
        return jnp.sum(lax.scan(step, x, value[1][0])[0])

    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), gradient, jax.grad(alone, (0, 1))(x, w))
