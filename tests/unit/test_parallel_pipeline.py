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
from pycollective.jax_support import jax_internals
from pycollective.jax_support.jaxprs import all_equations, evaluate, rebind
from pycollective.parallel import late_buffers
from pycollective.parallel.pipeline import forward_pipeline, pipeline
from pycollective.parallel.schedules import (
    Action,
    Kind,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    with_messages,
    zero_bubble,
)
from pycollective.parallel.split_backward import split
from pycollective.parallel.stages import activation_shapes
from pycollective.parallel.tied_parameters import tied_parameters
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


def test_late_buffers_change_no_result() -> None:
    @jax.checkpoint
    def inner(x: Array) -> tuple[Array, Any]:
        return lax.scan(lambda x, w: (x * w, (jnp.sin(x), x > 0)), x, jnp.linspace(-1, 2, 6).reshape(6, 1))

    @jax.jit
    def function(x: Array, keys: Array) -> Any:
        def body(state: Any, key: Array) -> Any:
            i, x, _ = state
            return (i + 1, x + jax.random.normal(key, x.shape), None), (jax.random.fold_in(key, 1), -x, i)

        carry, stacked = lax.scan(body, (jnp.int32(3), x, None), keys, reverse=True, unroll=2)
        filled = lax.fori_loop(0, 3, lambda i, t: t.at[i].add(x[0]), jnp.zeros(4))
        negative = lax.fori_loop(0, 1, lambda i, t: t.at[i].add(x[0]), jnp.full(4, -0.0))
        empty = lax.scan(body, (jnp.int32(3), x, None), keys[:0])
        return carry, stacked, inner(x), filled, negative, empty

    args = values((2,), seed=1), jax.random.split(jax.random.key(1), 5)
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    late = jax.jit(lambda zero, *args: late_buffers.run(closed, zero, *args))
    got = jax.tree.structure(shape).unflatten(late(jnp.int32(0), *args))
    as_data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x
    for a, b in zip(*(jax.tree.leaves(jax.tree.map(as_data, tree)) for tree in (got, function(*args))), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.signbit(a), np.signbit(b)) if a.dtype == np.float32 else None
    # The buffers are carries: the scan itself stacks only keys, which cannot be made of a number, and what has no rows.
    scans = [
        eqn for eqn in all_equations(jax.make_jaxpr(late)(jnp.int32(0), *args).jaxpr) if "scan" in str(eqn.primitive)
    ]
    carries = [sum(jax_internals.counts_of_scan(eqn)[1:]) for eqn in scans]
    assert sorted(len(eqn.outvars) - n for eqn, n in zip(scans, carries, strict=True)) == [
        0,
        0,
        0,
        1,
        3,
    ]  # without rows


def network() -> tuple[list[Any], list[Tree]]:
    """Returns three stages, which scan, recompute, drop and cast, and their parameters."""

    def first(params: Tree, x: None, microbatch: Tree) -> Tree:
        assert x is None
        return {"x": scanned(params["w"], microbatch["x"]), "key": jax.random.key_data(microbatch["key"])}

    def second(params: Tree, x: Tree, microbatch: Tree) -> Tree:
        h = jax.checkpoint(mlp)(params["w"], x["x"]) * params["times"].astype(jnp.float32)
        for key in (params["key"], microbatch["key"], jax.random.wrap_key_data(x["key"] + 1)):
            h = jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h, jnp.zeros_like(h))
        return h

    def last(params: Tree, x: Tree, microbatch: Tree) -> tuple[Array, Tree]:
        wide = params.astype(jnp.bfloat16).astype(jnp.float32)  # a residual that no microbatch changes
        logits = x @ wide
        loss = jnp.mean(logits**2) + jnp.mean(microbatch["x"]) * jnp.sum(wide)
        return loss, {"logits": logits, "right": jnp.sum(jnp.argmax(logits, axis=1) == 0), "none": None, "one": 1}

    params = [
        {"w": [values((5, 5), seed=i) for i in range(2)]},
        {"key": jax.random.key(7), "times": np.int32(2), "w": [values((5, 5), seed=3), values((5, 5), seed=1)]},
        values((5, 2), seed=4),
    ]
    return [first, second, last], params


def same_leaves(got: Tree, want: Tree, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("m", [1, 3])
def test_chunks_of_one_rank(m: int) -> None:
    stages, params = network()
    microbatches = {"x": values((m, 4, 5), seed=6), "key": jax.random.split(jax.random.key(0), m)}

    def value(params: list[Tree], shared: Array) -> tuple[Array, Tree]:
        tree = jax.tree.structure(params)
        params = tree.unflatten(jax.tree.leaves(params))
        params[0]["w"][1] = params[1]["w"][1] = shared  # one array in two stages
        results = []
        for k in range(m):
            x = None
            for stage, own in zip(stages, params, strict=True):
                x = stage(own, x, jax.tree.map(lambda leaf: leaf[k], microbatches))
            results.append(x)
        losses, aux = jax.tree.map(lambda *xs: jnp.stack(xs), *results)
        return jnp.mean(losses), (losses, aux)

    comm = pc.world()
    shapes = activation_shapes(stages, params, jax.tree.map(lambda x: x[0], microbatches), comm, last=True)
    tied = tied_parameters(lambda p: [("shared", p[0]["w"][1]), ("shared", p[1]["w"][1])], params, comm)
    options: dict[str, Any] = {"has_aux": True, "allow_int": True, "tied": tied}
    train = pipeline(stages, interleaved(1, m, 3), shapes, comm, **options)
    evaluate = forward_pipeline(stages, forward_only(1, m, 3), shapes, comm)
    (got, aux), grads = jax.jit(train)(params, microbatches)
    differentiated = jax.value_and_grad(value, (0, 1), has_aux=True, allow_int=True)
    (want, (losses, of_last)), (want_grads, of_shared) = jax.jit(differentiated)(params, params[0]["w"][1])
    want_grads[0]["w"][1] = want_grads[1]["w"][1] = of_shared
    same_leaves((got, aux, grads), (want, of_last, want_grads))
    same_leaves(jax.jit(evaluate)(params, microbatches), (losses, of_last))


def test_an_evaluation_keeps_no_residuals() -> None:
    def stage(params: list[Array], x: None, microbatch: Array) -> Array:
        return mlp(params, microbatch)

    comm, x = pc.world(), jnp.ones((4, 2, 5))
    shapes = activation_shapes(stage, [jnp.ones((5, 5))] * 3, x[0], comm, last=True)
    run = forward_pipeline(stage, forward_only(1, 4), shapes, comm)
    found = equations(jax.make_jaxpr(run)([jnp.ones((5, 5))] * 3, x).jaxpr)
    assert (found["dot_general"], found["tanh"], found["erf"]) == (4 * 3, 4 * 3, 0)
    for maker, wrong, text in (
        (
            forward_pipeline,
            gpipe(1, 4),
            "forward_pipeline: expected a schedule without backward passes, of forward_onl",
        ),
        (pipeline, forward_only(1, 4), "pipeline: expected a schedule with backward passes, got forward_only, which"),
    ):
        with pytest.raises(ValueError, match=text):
            maker(stage, wrong, shapes, comm)
    with pytest.raises(ValueError, match=r"expected a list of the results of all 1 stages, .* got a list of 0"):
        forward_pipeline(stage, forward_only(1, 4), [], comm)
    with pytest.raises(ValueError, match=r"expected a pair of the loss and aux .* got float32\[2,5\] at"):
        pipeline(stage, gpipe(1, 4), [(*shapes, shapes[0], shapes[0])], comm, has_aux=True)


def test_the_sums_of_gradients_may_be_wider_than_the_parameters() -> None:
    m = 32  # a power of two: the weight 1 / m rounds no bfloat16
    w, x = jnp.asarray(values((6, 3)), jnp.bfloat16), jnp.asarray(values((m, 4, 6), seed=1), jnp.bfloat16)
    stage = lambda w, x, microbatch: jnp.sum((microbatch @ w).astype(jnp.float32) ** 2)

    def summed(dtype: Any) -> Array:
        run = jax.jit(pipeline(stage, one_f_one_b(1, m), [], pc.world(), accumulator_dtype=dtype))
        return run(w, x)[1]

    of_each = jax.vmap(jax.grad(lambda w, x: stage(w, None, x) / m), (None, 0))(w, x)
    want = np.asarray(of_each, np.float64).sum(axis=0)
    got, narrow = summed(jnp.float32), summed(None)
    assert (got.dtype, narrow.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    assert np.abs(np.asarray(narrow, np.float64) - want).max() > 1e-3 * np.abs(want).max()
    with pytest.raises(ValueError, match="expected a floating-point accumulator_dtype, got int32"):
        pipeline(stage, gpipe(1, m), [], pc.world(), accumulator_dtype=jnp.int32)


@pytest.mark.parametrize("layers", ["loop", "scan"])
def test_activations_are_kept_as_policies_say(layers: str) -> None:
    width, rows, count = 16, 128, 4
    params, x = jnp.ones((count, width, width)), jnp.ones((rows, width))

    def stage_of(policy: str | None) -> Any:
        layer = lambda w, x: jnp.sin(jnp.tanh(x @ w))
        if policy:
            layer = jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, policy))

        def stage(params: Array, x: None, microbatch: Array) -> Array:
            h = microbatch
            if layers == "scan":
                h, _ = lax.scan(lambda h, w: (layer(w, h), None), h, params)
            else:
                for w in params:
                    h = layer(w, h)
            return jnp.sum(h * jnp.arange(width, dtype=jnp.float32)[None])

        return stage

    def kept(maker: Any, policy: str | None) -> float:
        def temporary(m: int) -> Any:
            run = jax.jit(pipeline(stage_of(policy), maker(1, m), [], pc.world()))
            return run.lower(params, jnp.ones((m, *x.shape))).compile().memory_analysis().temp_size_in_bytes

        return (temporary(4) - temporary(2)) / 2 / x.nbytes

    for policy in (None, "dots_saveable", "nothing_saveable"):
        pullback = jax.vjp(lambda p, x, policy=policy: stage_of(policy)(p, None, x), params, x)[1]
        by_jax = sum(leaf.size for leaf in jax.tree.leaves(pullback) if leaf.shape[-1:] == (width,)) / x.size
        assert abs(kept(gpipe, policy) - by_jax) < 0.6, (policy, by_jax)
    assert kept(one_f_one_b, None) < 0.2


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
