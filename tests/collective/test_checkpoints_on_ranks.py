"""``jax.checkpoint`` around collectives over communicators: its policy says which results a backward pass keeps.

The oracle is the same program over a named axis of one process.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import print_saved_residuals

import pycollective as pc
from tests.cases import EACH_PRIMITIVE, operands, values

Array = Any
WIDTH = 64
LAYERS = 8


def saved(fun: Callable[..., Any], capsys: pytest.CaptureFixture[str], *args: Array) -> Counter[str]:
    """The types of what a backward pass keeps, and how often."""
    capsys.readouterr()
    print_saved_residuals(fun, *args)
    return Counter(re.findall(r"^\S+\[[\d,]*\]", capsys.readouterr().out, re.MULTILINE))


def layers(gather: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """The loss of a network whose weights are cut over the ranks, and gathered in each layer."""

    def loss(ws: Array, h: Array) -> Array:
        layer = jax.checkpoint(lambda w, h: jnp.tanh(h @ gather(w)))
        return jnp.sum(lax.scan(lambda h, w: (layer(w, h), None), h, ws)[0] ** 2)

    return loss


def test_gathered_weights_are_gathered_again(world: pc.Communicator) -> None:
    ws = values((LAYERS, world.size * WIDTH, world.size * WIDTH)) / 10
    h = values((2, world.size * WIDTH), seed=1)
    mine = ws[:, world.rank * WIDTH : (world.rank + 1) * WIDTH]
    program = jax.jit(jax.grad(layers(lambda w: pc.all_gather(w, world, tiled=True)), (0, 1))).lower(mine, h).compile()
    gathered = ws.nbytes
    assert program.memory_analysis().temp_size_in_bytes < gathered / 2
    want = jax.jit(jax.grad(layers(lambda w: w), (0, 1)))(ws, h)
    got = program(mine, h)
    np.testing.assert_allclose(
        got[0], world.size * want[0][:, world.rank * WIDTH : (world.rank + 1) * WIDTH], rtol=1e-3, atol=1e-3
    )
    np.testing.assert_allclose(got[1], want[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable", "everything_saveable"])
def test_policies(policy: str, world: pc.Communicator, capsys: pytest.CaptureFixture[str]) -> None:
    def block(psum: Callable[[Array], Array]) -> Callable[[Array], Array]:
        def block(x: Array) -> Array:
            y = lax.fori_loop(0, 2, lambda _, y: jnp.sin(psum(y)), x @ x)
            return jnp.cos(lax.cond(y[0, 0] < 5, psum, jnp.sin, y)) @ jax.jit(psum)(jnp.exp(y))

        return jax.checkpoint(block, policy=getattr(jax.checkpoint_policies, policy))

    # JAX treats a sum over ranks like any other linear operation, such as a negation.
    x = jnp.asarray(values((4, 4)))
    assert saved(block(lambda x: pc.psum(x, world)), capsys, x) == saved(block(lambda x: -x), capsys, x)


def test_each_collective_is_made_again(world: pc.Communicator, capsys: pytest.CaptureFixture[str]) -> None:
    for case in EACH_PRIMITIVE:
        if not case.linear:
            continue
        call = jax.checkpoint(lambda x, case=case: jnp.sum(jnp.sin(case.call(jnp.cos(x), world))))
        kept = saved(call, capsys, operands(case, world)[world.rank])
        # The program at the other end of a message need not be under a checkpoint.
        assert kept.total() == (2 if case.id in ("sendrecv", "isendrecv") else 1), case


def test_a_call_that_holds_a_collective(world: pc.Communicator, capsys: pytest.CaptureFixture[str]) -> None:
    # JAX has no rule for these calls, so it would keep their results.
    def solved(x: Array) -> Array:
        solve = lambda _, b: pc.psum(b, world) / 3
        return lax.custom_linear_solve(lambda y: 3 * y, x, solve, solve)

    def called(x: Array) -> Array:
        call = lambda _, x: pc.psum(x, world)
        return jax.custom_derivatives.linear_call(call, call, (), x)

    def with_a_rule(x: Array) -> Array:
        rule = jax.custom_jvp(lambda k: pc.psum(k, world))
        rule.defjvp(lambda ks, ts: (rule(*ks), ts[0]))
        return rule(jnp.arange(x.size, dtype=x.dtype)) * jnp.sin(x)

    x = jnp.asarray(values((3,)))
    for fun in (solved, called, with_a_rule):
        kept = saved(jax.checkpoint(lambda x, fun=fun: jnp.sum(jnp.sin(fun(jnp.cos(x))))), capsys, x)
        assert kept.total() == 1, fun
        grads = [jax.jit(jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x)))))(x) for f in (fun, jax.checkpoint(fun))]
        np.testing.assert_allclose(*grads, rtol=1e-5)
