"""Programs with a sum over ranks in control flow, solvers and rules, to transform: tables for tests.

The programs get the sum as a function: by a communicator, over a named axis, or over the oracle's axis.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.cases import values

Array = Any
Sum = Callable[[Array], Array]
"""The sum over all ranks, by a communicator or by the oracle's axis."""
Program = Callable[[Sum, Array], Any]

BATCH = 3


def batches(size: int) -> Array:
    """A batch of numbers for each of ``size`` ranks, for which the loops make different numbers of trips."""
    return 0.2 + jnp.abs(values((size, BATCH))) * jnp.array([[0.3, 1.0, 3.0]])


def doubled(psum: Sum, x: Array) -> Array:
    return lax.while_loop(lambda y: psum(y) < 20, lambda y: 2 * y, x)


def until_a_limit(psum: Sum, x: Array) -> Array:
    # The predicate depends on the batch by a constant of the condition alone, as the first carry does not.
    limit = 10 * psum(x)  # the same on all ranks, so that all make equally many trips
    start = (jnp.int32(0), jnp.ones(2), jax.random.key(3))
    step = lambda c: (c[0] + 1, 1.5 * c[1], jax.random.fold_in(c[2], 1))
    steps, y, key = lax.while_loop(lambda c: psum(c[1].sum()) < limit, step, start)
    return steps, y, jax.random.key_data(key)


def until_small(psum: Sum, x: Array) -> Array:
    """Newton's steps for a square root until the residuals of all ranks are small. The body has a sum as well."""
    target = psum(x**2)
    residual = lambda y: psum(jnp.abs(y * y - target))
    return lax.while_loop(lambda y: residual(y) > 0.1, lambda y: psum(y + target / y) / psum(2.0), 1 + target)


def in_scan(psum: Sum, x: Array) -> Array:
    return lax.scan(lambda c, k: (doubled(psum, c / k), c), x, jnp.arange(1.0, 4.0))


def in_cond(psum: Sum, x: Array) -> Array:
    return lax.cond(psum(x) > 4, partial(doubled, psum), lambda x: -x, x)


def in_loop(psum: Sum, x: Array) -> Array:
    outer = lambda c: (c[0] + 1, doubled(psum, c[1] / 3))
    return lax.while_loop(lambda c: psum(c[1]) > 2 * c[0], outer, (jnp.float32(0), x + 4))


LOOPS = {f.__name__: f for f in (doubled, until_a_limit, until_small, in_scan, in_cond, in_loop)}


def with_switch(psum: Sum, x: Array) -> Array:
    index = jnp.clip(psum(lax.stop_gradient(x)), 0, 2).astype(int)
    return lax.switch(index, [lambda x: psum(x), lambda x: jnp.sin(x), lambda x: psum(psum(x) * x)], x)


def with_fori(psum: Sum, x: Array) -> Array:
    return lax.fori_loop(0, 3, lambda k, y: jnp.sin(psum(y) + k), x)


def with_batched_bound(psum: Sum, x: Array) -> Array:
    bound = 1 + psum(jnp.abs(lax.stop_gradient(x)).astype(int))
    return lax.fori_loop(0, bound, lambda k, y: jnp.sin(psum(y) + x * k), x)


def with_linear_solve(psum: Sum, x: Array) -> Array:
    # (2 + x) y = sum of x, and its transpose
    solve = lambda _, b: b / (2 + x * x)
    return lax.custom_linear_solve(lambda y: (2 + x * x) * y, psum(x), solve, solve)


def with_a_sum_in_the_solve(psum: Sum, x: Array) -> Array:
    matvec = lambda y: psum(y) + 2 * y
    count = psum(1.0)
    solve = lambda _, b: (b - psum(b) / (2 + count)) / 2
    return lax.custom_linear_solve(matvec, x, solve, solve)


def with_root(psum: Sum, x: Array) -> Array:
    # Each rank's y has y + y^3 / 9 = the sum of x. Every rank makes equally many steps.
    target = psum(x)

    def newton(g: Callable[[Array], Array], y: Array) -> Array:
        return lax.fori_loop(0, 8, lambda _, y: y - g(y) / jax.grad(g)(y), y)

    return lax.custom_root(lambda y: y + y**3 / 9 - target, x, newton, lambda g, y: y / g(1.0))


def with_associative_scan(psum: Sum, x: Array) -> Array:
    return lax.associative_scan(lambda a, b: a + psum(b) / 7, jnp.stack([x, 2 * x, x * x, x, 1 + x]))


def with_map(psum: Sum, x: Array) -> Array:
    return lax.map(lambda y: jnp.sin(psum(y * x)), jnp.arange(5.0), batch_size=2)


def with_checkpoint(psum: Sum, x: Array) -> Array:
    @jax.checkpoint
    def layer(y: Array) -> Array:
        return jnp.sin(psum(jnp.cos(y)) * y)

    return lax.scan(lambda y, k: (layer(y * k), y), x, jnp.arange(1.0, 4.0))


def with_nested_checkpoints(psum: Sum, x: Array) -> Array:
    inner = jax.checkpoint(lambda y: jnp.sin(psum(y * y)))
    saved = jax.checkpoint(lambda y: jnp.cos(inner(y)) * psum(y), policy=jax.checkpoint_policies.everything_saveable)
    return jax.checkpoint(lambda y: saved(jnp.sin(y)) * inner(y))(x)


def with_linearize(psum: Sum, x: Array) -> Array:
    y, tangent = jax.linearize(lambda x: jnp.sin(psum(x * x)) * x, x)
    return y, tangent(x), tangent(jnp.cos(x))


def with_hessian(psum: Sum, x: Array) -> Array:
    return jax.hessian(lambda x: jnp.sin(psum(x * x)) * x)(x)


def with_rules(psum: Sum, x: Array) -> Array:
    @jax.custom_vjp
    def rule(x: Array) -> Array:
        return psum(jnp.sin(x))

    rule.defvjp(lambda x: (psum(jnp.sin(x)), x), lambda x, ct: (3 * psum(ct) * jnp.cos(x),))

    @jax.custom_jvp
    def other(x: Array) -> Array:
        return psum(jnp.cos(x))

    other.defjvp(lambda xs, ts: (psum(jnp.cos(xs[0])), 5 * psum(ts[0])))
    return rule(x) * other(x)


DIFFERENTIABLE = {
    f.__name__: f
    for f in (
        with_switch,
        with_fori,
        with_linear_solve,
        with_a_sum_in_the_solve,
        with_root,
        with_associative_scan,
        with_map,
        with_checkpoint,
        with_nested_checkpoints,
        with_linearize,
        with_hessian,
    )
}
