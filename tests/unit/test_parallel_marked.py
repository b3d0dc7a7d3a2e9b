"""Programs of one device that compute with a norm of its part of a parameter, in the functions of optax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from pycollective.parallel import clip_by_global_norm, column_parallel, for_parts, gathered, row_parallel, shard, zero
from pycollective.parallel.marked import refuse_norms_of_parts

Tree = Any
Step = Callable[..., Any]

PARAMS = {"up": jnp.ones((4, 3)), "bias": jnp.ones(3), "down": jnp.ones((3, 4)), "scale": jnp.ones(4)}
SPECS = {"up": jax.P(None, "model"), "bias": jax.P("model"), "down": jax.P("model"), "scale": jax.P()}
X = jnp.ones((2, 4))


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """Optax adds integers and floats."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def loss(p: Tree, x: Any) -> Any:
    h = jnp.tanh(column_parallel(x * p["scale"][None], p["up"], "model") + p["bias"][None])
    return jnp.mean(row_parallel(h, p["down"], "model") ** 2)


def check(step: Step, *args: Any, size: int = 2) -> None:
    """Checks a program as it is checked before it is lowered, on a mesh of data x model."""
    sizes = {"data": 2, "model": size}
    body = jax.make_jaxpr(step, axis_env=list(sizes.items()))(*args).jaxpr
    mesh: Any = SimpleNamespace(
        axes=[SimpleNamespace(name=name, size=length) for name, length in sizes.items()],
        comm=SimpleNamespace(rank=0, size=4),
    )
    refuse_norms_of_parts(body, mesh)


def step_of(optimizer: optax.GradientTransformation, gradient: Step | None = None) -> Step:
    gradient = gradient or jax.grad(loss)

    def step(p: Tree, x: Any) -> Tree:
        grads = lax.pmean(gradient(p, x), "data")
        updates, state = optimizer.update(grads, optimizer.init(p), p)
        return optax.apply_updates(p, updates), state

    return step


def microbatches(p: Tree, x: Any) -> Tree:
    """Gradients that a loop adds up."""
    zeros = jax.tree.map(jnp.zeros_like, p)
    return lax.scan(lambda sums, row: (jax.tree.map(jnp.add, sums, jax.grad(loss)(p, row[None])), None), zeros, x)[0]


MIXING = {
    "clip_by_global_norm": optax.clip_by_global_norm(1.0),
    "clip_by_block_rms": optax.clip_by_block_rms(1.0),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "scale_by_trust_ratio": optax.scale_by_trust_ratio(),
    "normalize_by_update_norm": optax.normalize_by_update_norm(),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(1.0), 3),
    "lamb": optax.lamb(1e-3),
    "lars": optax.lars(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "muon": optax.contrib.muon(1e-3),
}


@pytest.mark.parametrize("name", MIXING)
def test_bare_optimizers_that_mix_elements_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"optax's .*cut along 'model' \(rank 0 of 4\)\. Wrap .*for_parts\(optimizer"):
        check(step_of(optax.chain(MIXING[name], optax.sgd(0.1))), PARAMS, X)


def test_columns_alone_are_parts() -> None:
    def step(w: Any, x: Any) -> Any:
        grad = jax.grad(lambda w: jnp.sum(column_parallel(x, w, "model") ** 2))(w)
        return optax.clip_by_global_norm(1.0).update(grad, optax.EmptyState(), w)[0]

    with pytest.raises(ValueError, match="clip_by_global_norm"):
        check(step, PARAMS["up"], X)


def test_the_message_names_the_part_of_the_optimizer() -> None:
    with pytest.raises(ValueError, match=r"got optax's clip_by_global_norm \(.*_clipping\.py:\d+\)"):
        check(step_of(optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0))), PARAMS, X)


@pytest.mark.parametrize(
    "gradient",
    [
        microbatches,
        jax.grad(jax.checkpoint(loss)),
        jax.jit(jax.grad(loss)),
        lambda p, x: jax.value_and_grad(loss)(p, x)[1],
        lambda p, x: jax.tree.map(lambda g: jnp.mean(g, 0), jax.vmap(jax.grad(loss), (None, 0))(p, x[:, None])),
    ],
    ids=["microbatches", "checkpoint", "jit", "value_and_grad", "vmap"],
)
def test_marks_reach_the_optimizer(gradient: Step) -> None:
    with pytest.raises(ValueError, match="clip_by_global_norm"):
        check(step_of(optax.clip_by_global_norm(1.0), gradient), PARAMS, X)
    check(step_of(optax.adamw(1e-3), gradient), PARAMS, X)


def test_an_optimizer_in_a_loop_and_under_jit_is_seen() -> None:
    inner = optax.clip_by_global_norm(1.0)

    def steps(p: Tree, x: Any) -> Tree:
        update = jax.jit(lambda g: inner.update(g, optax.EmptyState())[0])
        return lax.scan(lambda p, _: (optax.apply_updates(p, update(jax.grad(loss)(p, x))), None), p, length=3)[0]

    with pytest.raises(ValueError, match="clip_by_global_norm"):
        check(steps, PARAMS, X)


ELEMENTWISE = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(optax.cosine_decay_schedule(1e-3, 100)),
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-3),
    "clip": optax.chain(optax.clip(1.0), optax.add_noise(0.1, 0.5, 1), optax.ema(0.9), optax.sgd(1.0)),
    "multi_transform": optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.sgd(0.1)}, {"up": "a", "bias": "b", "down": "a", "scale": "b"}
    ),
    "multi_steps": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "clip_by_global_norm of all parts": for_parts(
        optax.chain(clip_by_global_norm(1.0, specs=SPECS), optax.adam(1e-3)), SPECS
    ),
    "zero": zero(optax.chain(clip_by_global_norm(1.0, "data", specs=SPECS), optax.adam(1e-3)), "data"),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimizers_that_are_right_pass(name: str) -> None:
    check(step_of(ELEMENTWISE[name]), PARAMS, X)


def test_a_norm_that_a_collective_completes_passes() -> None:
    def step(p: Tree, x: Any) -> Any:
        grads = jax.grad(loss)(p, x)
        norm = jnp.sqrt(lax.psum(optax.tree.norm({name: grads[name] for name in ("up", "down")}) ** 2, "model"))
        return optax.tree.scale(1 / norm, grads), optax.tree.norm(grads)  # the second is printed, say

    check(step, PARAMS, X)


def test_the_scale_with_which_a_device_rounds_its_own_part_passes() -> None:
    def step(p: Tree, x: Any) -> Any:
        def mean(g: Any) -> Any:
            scale = jnp.max(jnp.abs(g)) / 127
            return lax.pmean(jnp.round(g / scale) * scale, "data")

        return jax.tree.map(mean, jax.grad(loss)(p, x))

    check(step, PARAMS, X)


def gradient_of_columns(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(column_parallel(x, w, "model") ** 2))(w)


@pytest.mark.parametrize(
    "examples",
    [
        lambda w, x: gradient_of_columns(w, x)[None],
        lambda w, x: jax.vmap(gradient_of_columns, (None, 0))(w, x[:, None]),
        lambda w, x: lax.scan(lambda _, row: (None, gradient_of_columns(w, row[None])), None, x)[1],
    ],
    ids=["one", "vmap", "scan"],
)
def test_norms_along_dimensions_that_are_whole_pass(examples: Step) -> None:
    """Of a matrix that is cut by columns each device has whole ones, and optax clips each column by its own norm."""
    clip = optax.adaptive_grad_clip(0.1)

    def step(w: Any, x: Any) -> Any:
        return jax.vmap(lambda grad: clip.update(grad, optax.EmptyState(), w)[0])(examples(w, x))

    check(step, PARAMS["up"], X)


def test_an_axis_of_one_device_cuts_nothing() -> None:
    check(step_of(optax.clip_by_global_norm(1.0)), PARAMS, X, size=1)


def test_slices_of_gathered_parameters_are_parts() -> None:
    def loss(p: Tree, x: Any) -> Any:
        return jnp.sum(x @ p["up"] + p["bias"][None])

    shapes = {name: PARAMS[name] for name in ("up", "bias")}

    def step(optimizer: optax.GradientTransformation) -> Step:
        def step(p: Tree, x: Any) -> Tree:
            slices = shard(p, "model")
            grads = jax.grad(gathered(loss, shapes, "model"))(slices, x)
            return optimizer.update(grads, optimizer.init(slices), slices)[0]

        return step

    with pytest.raises(ValueError, match=r"clip_by_global_norm .*Wrap the optimizer in parallel\.sliced\("):
        check(step(optax.clip_by_global_norm(1.0)), shapes, X)
    check(step(optax.adamw(1e-3)), shapes, X)


def test_loops_keep_no_copy_of_marked_parameters() -> None:
    def layers(ws: Any, h: Any) -> Any:
        return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(column_parallel(h, w, "model")), None), h, ws)[0])

    def temporary(fun: Step) -> int:
        size = 64
        fun = jax.vmap(jax.grad(fun), axis_name="model", axis_size=1)
        compiled = jax.jit(fun).lower(jnp.ones((1, 8, size, size)), jnp.ones((1, 1, size))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def unmarked(ws: Any, h: Any) -> Any:
        return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)[0])

    weights = 8 * 64 * 64 * 4
    assert temporary(layers) < temporary(unmarked) + weights / 2
