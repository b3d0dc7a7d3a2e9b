"""Pipelines on one rank, and backward passes in two parts."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from pycollective.jax_support.jaxprs import evaluate, rebind
from pycollective.parallel.pipeline import pipeline
from pycollective.parallel.schedules import Action, Kind, gpipe, interleaved, one_f_one_b, with_messages, zero_bubble
from pycollective.parallel.split_backward import split
from pycollective.parallel.stages import activation_shapes
from tests.cases import values

Array = Any
Tree = Any


def equations(jaxpr: Any) -> Counter[str]:
    """Counts the equations of a program and of those in it."""
    found = Counter(eqn.primitive.name for eqn in jaxpr.eqns)
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += equations(inner)
    return found


def mlp(params: Tree, x: Array) -> Array:
    for w in params:
        x = jax.nn.gelu(x @ w)
    return x


def scanned(params: Tree, x: Array) -> Array:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(params))[0]


FUNCTIONS = {
    "layers": mlp,
    "jitted layers": jax.jit(mlp),
    "a scan": scanned,
    "a checkpoint": jax.checkpoint(mlp),
    "residuals that only weights need": lambda params, x: jnp.sin(x) * params[0][0][None] + params[1][1][None],
    "weights that are not read": lambda params, x: jnp.sin(x @ params[0]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_parts_are_the_whole(name: str) -> None:
    params, x, dy = [values((5, 5), seed=i) for i in range(3)], values((4, 5), seed=7), values((4, 5), seed=8)
    _, pullback = jax.vjp(FUNCTIONS[name], params, x)
    residuals, tree = jax.tree.flatten(pullback)

    def backward(*args: Array) -> list[Array]:
        dparams, dx = jax.tree.unflatten(tree, args[:-1])(args[-1])
        return [dx, *dparams]

    args = *residuals, dy
    closed = jax.make_jaxpr(backward)(*args)
    parts = split(closed, 1, *args)
    dx, *given = evaluate(parts.first, rebind, *args)
    got = [dx, *evaluate(parts.second, rebind, *(args[i] for i in parts.reused_args), *given)]
    for a, b in zip(got, backward(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    # Nothing is computed twice.
    first, second = equations(parts.first.jaxpr), equations(parts.second.jaxpr)
    whole = equations(closed.jaxpr)
    assert (first + second)["dot_general"] == whole["dot_general"]
    assert (first + second)["mul"] <= whole["mul"]
    if "layers" in name:
        assert (first["dot_general"], second["dot_general"]) == (3, 3)
    if name in ("a scan", "a checkpoint"):
        assert second["dot_general"] == 0


def test_an_effect_is_kept() -> None:
    printed = []

    def backward(x: Array, w: Array) -> tuple[Array, Array]:
        jax.debug.callback(lambda w: printed.append(float(w)), w)
        return 2 * x, 3 * w

    args = jnp.float32(1), jnp.float32(2)
    parts = split(jax.make_jaxpr(backward)(*args), 1, *args)
    first = evaluate(parts.first, rebind, *args)
    jax.effects_barrier()
    assert (first, printed) == ([2.0], [])
    assert evaluate(parts.second, rebind, *(args[i] for i in parts.reused_args)) == [6.0]
    jax.effects_barrier()
    assert printed == [2.0]


def network() -> tuple[list[Any], list[Tree]]:
    """Returns three stages, which scan, recompute, drop and cast, and their parameters."""

    def first(params: Tree, x: None, microbatch: Tree) -> Tree:
        assert x is None
        return {"x": scanned(params["w"], microbatch["x"]), "key": jax.random.key_data(microbatch["key"])}

    def second(params: Tree, x: Tree, microbatch: Tree) -> Tree:
        h = jax.checkpoint(mlp)(params, x["x"])
        for key in (microbatch["key"], jax.random.wrap_key_data(x["key"] + 1)):
            h = jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h, jnp.zeros_like(h))
        return h

    def last(params: Tree, x: Tree, microbatch: Tree) -> Array:
        wide = params.astype(jnp.bfloat16).astype(jnp.float32)  # a residual that no microbatch changes
        return jnp.mean((x @ wide) ** 2) + jnp.mean(microbatch["x"]) * jnp.sum(wide)

    params = [{"w": [values((5, 5), seed=i) for i in range(2)]}, [values((5, 5), seed=3)], values((5, 2), seed=4)]
    return [first, second, last], params


@pytest.mark.parametrize("m", [1, 3])
def test_chunks_of_one_rank(m: int) -> None:
    stages, params = network()
    microbatches = {"x": values((m, 4, 5), seed=6), "key": jax.random.split(jax.random.key(0), m)}

    def value(params: list[Tree]) -> Array:
        losses = []
        for k in range(m):
            x = None
            for stage, own in zip(stages, params, strict=True):
                x = stage(own, x, jax.tree.map(lambda leaf: leaf[k], microbatches))
            losses.append(x)
        return jnp.mean(jnp.stack(losses))

    comm = pc.world()
    between = activation_shapes(stages, params, jax.tree.map(lambda x: x[0], microbatches), comm)
    got = jax.jit(pipeline(stages, interleaved(1, m, 3), between, comm))(params, microbatches)
    want = jax.jit(jax.value_and_grad(value))(params)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("maker", [gpipe, one_f_one_b, zero_bubble])
def test_each_product_is_computed_once(maker: Any) -> None:
    def stage(params: list[Array], x: None, microbatch: Array) -> Array:
        return jnp.mean(mlp(params, microbatch))

    run = pipeline(stage, maker(1, 4), [], pc.world())
    jaxpr = jax.make_jaxpr(run)([jnp.ones((5, 5))] * 3, jnp.ones((4, 2, 5))).jaxpr
    # Three layers forward; the gradients of three weights, and of what two of the layers take.
    assert equations(jaxpr)["dot_general"] == 4 * (3 + 3 + 2)


def test_a_schedule_may_split_some_backward_passes() -> None:
    def stage(params: list[Array], x: None, microbatch: Array) -> Array:
        return jnp.mean(mlp(params, microbatch))

    kinds = [(Kind.FORWARD, Kind.BACKWARD), (Kind.FORWARD, Kind.BACKWARD_INPUTS, Kind.BACKWARD_WEIGHTS)] * 2
    order = [Action(kind, 0, k) for k, own in enumerate(kinds) for kind in own]
    params, x = [values((5, 5), seed=i) for i in range(2)], values((4, 2, 5), seed=3)
    got = jax.jit(pipeline(stage, with_messages("mixed", [order]), [], pc.world()))(params, x)
    want = jax.jit(pipeline(stage, gpipe(1, 4), [], pc.world()))(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_residual_of_weights_is_kept_once() -> None:
    rows, width = 8, 64

    def stage(w: Array, x: None, microbatch: Array) -> Array:
        return jnp.mean(jnp.sin(microbatch @ jnp.cos(w)))

    def temporary(m: int) -> Any:
        run = jax.jit(pipeline(stage, gpipe(1, m), [], pc.world()))
        compiled = run.lower(jnp.ones((width, width)), jnp.ones((m, rows, width))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(12) - temporary(4) < 8 * 4 * (3 * rows * width)  # what each microbatch keeps, but no weights


def test_what_passes_and_does_not_fit() -> None:
    comm = pc.world()
    stages = [lambda w, x, k: w * k, lambda w, x, k: x.sum()]
    like = jax.ShapeDtypeStruct((3,), jnp.float32)
    run = pipeline(stages, interleaved(1, 2, 2), like, comm)
    for x, got in ((jnp.ones((2, 4)), "float32[4]"), (jnp.ones((2, 3), jnp.bfloat16), "bfloat16[3]")):
        text = re.escape(f"expected stage 0 to give float32[3], as between says, got {got}. Take what passes from")
        with pytest.raises(ValueError, match=text):
            jax.eval_shape(run, [x.dtype.type(1), jnp.float32(1)], x)
    run = pipeline([lambda w, x, k: [w * k], stages[1]], interleaved(1, 2, 2), (like,), comm)
    text = "expected stage 0 to give PyTreeDef((*,)), as between says, got PyTreeDef([*])"
    with pytest.raises(ValueError, match=re.escape(text)):
        jax.eval_shape(run, [jnp.float32(1), jnp.float32(1)], jnp.ones((2, 3)))
