"""What optimizers may be given slices: read off their programs, whatever numbers come."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import primitives as jax_primitives

from pycollective.parallel import apply_if_finite, clip_by_global_norm, cut_values, zero

pytestmark = pytest.mark.usefixtures("promotion_of_optax")

Array = Any
Tree = Any

PARAMS = {"w": jnp.ones((5, 3)), "b": jnp.ones(3), "half": jnp.ones((4, 2), jnp.bfloat16), "s": jnp.float32(2)}


def traced(inner: Any, params: Tree = PARAMS, devices: int = 4, **extra: Any) -> str:
    """Traces a step, and returns its program."""
    optimizer = zero(inner, "i")

    def step(p: Tree, extra: Any) -> Tree:
        return optimizer.update(p, optimizer.init(p), p, **extra)[0]

    return str(jax.make_jaxpr(step, axis_env=[("i", devices)])(params, extra))


def on_updates(fun: Any) -> Any:
    """An optimizer without state."""
    return optax.stateless(lambda updates, _: fun(updates))


def each(fun: Any) -> Any:
    return on_updates(lambda updates: jax.tree.map(fun, updates))


def counted(scan: Any) -> Any:
    """An optimizer whose loop goes over numbers that all devices have."""
    return each(lambda g: scan(g)[0])


def for_slices(inner: Any) -> Any:
    """An optimizer that names the axis: it is applied to slices as it is, and its program is checked before."""
    return optax.chain(clip_by_global_norm(1e9, "i"), inner)


ACCEPTED = {
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
    "nadamw": optax.nadamw(1e-3),
    "amsgrad": optax.amsgrad(1e-3),
    "adagrad": optax.adagrad(1e-2),
    "adamax": optax.adamax(1e-3),
    "adabelief": optax.adabelief(1e-3),
    "adan": optax.adan(1e-3),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-3, centered=True, momentum=0.9),
    "rprop": optax.rprop(1e-3),
    "yogi": optax.yogi(1e-3),
    "signum": optax.chain(optax.trace(0.9), optax.scale_by_sign()),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(1e-3),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-3),
    "lookahead of elements": optax.chain(optax.clip(0.1), optax.ema(0.9), optax.scale(-1.0)),
    "masked": optax.masked(optax.adam(1e-3), {"w": True, "b": False, "half": True, "s": False}),
    "two optimizers": optax.multi_transform(
        {"a": optax.adam(1e-3), "z": optax.set_to_zero()}, {"w": "a", "b": "z", "half": "a", "s": "a"}
    ),
    "clip, and then clip Adam's updates": optax.chain(
        clip_by_global_norm(0.1, "i"), optax.scale_by_adam(), clip_by_global_norm(1.0, "i"), optax.scale(-1e-3)
    ),
    "in every third step": optax.conditionally_transform(clip_by_global_norm(0.1, "i"), lambda step: step % 3 == 2),
    "if finite": apply_if_finite(optax.adam(1e-3), 3, "i"),
    "a loop of counts": each(lambda g: lax.fori_loop(0, 3, lambda i, x: x * i.astype(x.dtype) + g, g)),
    "a scan of weights": counted(lambda g: lax.scan(lambda x, w: (x * w.astype(x.dtype), w), g, jnp.array([0.5, 2.0]))),
    "a largest element": on_updates(
        lambda t: jax.tree.map(lambda g: g / lax.pmax(jnp.max(jnp.abs(g)), "i").astype(g.dtype), t)
    ),
    "a dead branch": each(lambda g: lax.cond(jnp.array(True), lambda x: x, jnp.zeros_like, g)),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_elementwise_is_accepted(name: str) -> None:
    assert "all_gather" in traced(for_slices(ACCEPTED[name]))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_accumulated_gradients_with_a_clipped_norm(k: int) -> None:
    inner = optax.chain(clip_by_global_norm(0.1, "i"), optax.sgd(0.1, momentum=0.9))
    whole = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))

    def train(optimizer: Any, p: Tree, x: Array, *, average: bool) -> Tree:
        def step(carry: Any, i: Array) -> Any:
            p, state = carry
            grads = jax.tree.map(lambda w: jnp.cos(w + x * (i + 1)), p)
            updates, state = optimizer.update(lax.pmean(grads, "i") if average else grads, state, p)
            return (optax.apply_updates(p, updates), state), None

        return lax.scan(step, (p, optimizer.init(p)), jnp.arange(9.0))[0][0]

    params, xs = {"w": jnp.ones((5, 3)), "s": jnp.float32(2)}, jnp.arange(2.0)
    got, want = (
        jax.jit(jax.vmap(lambda p, x, o=o, a=a: train(o, p, x, average=a), (None, 0), axis_name="i"))(params, xs)
        for o, a in ((zero(optax.MultiSteps(inner, k), "i"), False), (optax.MultiSteps(whole, k), True))
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def mean_of_rows(t: Tree) -> Tree:
    return t | {"w": t["w"] - t["w"].mean()}


CUMULATIVE = on_updates(lambda t: jax.tree.map(lambda g: jnp.cumsum(jnp.ravel(g)).reshape(g.shape), t))
REFUSED = {
    # A trial with numbers sees these only in the steps that it makes.
    "a norm from the third step on": (
        optax.conditionally_transform(optax.clip_by_global_norm(0.1), lambda step: step >= 3),
        "of a sum over the elements of one device alone",
    ),
    "a norm in a loop that a count ends": (
        each(lambda g: lax.fori_loop(0, 4, lambda i, x: jnp.where(i > 2, x / jnp.linalg.norm(jnp.ravel(g)), x), g)),
        "of a sum over the elements of one device alone",
    ),
    "a norm of the state": (
        optax.chain(optax.trace(0.9), optax.clip_by_global_norm(1e9)),
        "of a sum over the elements of one device alone",
    ),
    "elements moved": (each(lambda g: jnp.roll(g, 1)), "of a leaf's elements, which are on several devices"),
    "elements sorted": (each(lambda g: jnp.sort(jnp.ravel(g)).reshape(g.shape)), "computes lax.sort"),
    "elements summed": (CUMULATIVE, "computes lax.cumsum"),
    "a mean over slices": (on_updates(mean_of_rows), "of a sum over the elements of one device alone"),
    "a sum over places": (each(lambda g: lax.psum(g, "i")), "over devices that have other elements of a leaf"),
    "the device's place": (each(lambda g: g * lax.axis_index("i").astype(g.dtype)), "lax.axis_index"),
    "one leaf's element for another": (
        on_updates(lambda t: t | {"w": t["w"] * t["s"]}),
        "that are cut in different ways",
    ),
    "noise": (optax.add_noise(0.1, 0.5, 0), "an array that is not cut"),
    "a branch by a norm": (optax.apply_if_finite(optax.sgd(0.1), 3), "takes a branch by a condition on which devices"),
    "steps that one device skips": (
        optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite),
        "on which devices may differ",
    ),
    "a sum that zeros at the end change": (
        on_updates(lambda t: t | {"w": t["w"] / lax.psum(jnp.exp(t["w"]).sum(), "i")}),
        "need not be neutral in the zeros at a slice's end",
    ),
    "a root before the sum": (
        on_updates(lambda t: t | {"w": t["w"] / lax.psum(jnp.sqrt(jnp.sum(t["w"] ** 2)), "i")}),
        "computes lax.sqrt of a sum over the elements of one device alone",
    ),
    "a norm kept in the state": (
        optax.GradientTransformation(optax.tree.norm, lambda updates, state, _=None: (updates, state)),
        "in its state",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_elementwise_is_refused(name: str) -> None:
    inner, why = REFUSED[name]
    with pytest.raises(ValueError, match=f"zero: expected an optimizer that updates each element by itself.*{why}"):
        traced(for_slices(inner))


def test_the_remedy_is_that_for_the_reason() -> None:
    with pytest.raises(ValueError, match=r"parallel.apply_if_finite takes the place of optax.apply_if_finite"):
        traced(for_slices(optax.apply_if_finite(optax.sgd(0.1), 3)))
    for inner in (
        optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: jnp.ndim(x) > 1, p)),
        optax.masked(optax.adam(1e-2), lambda p: jax.tree.map(lambda x: jnp.ndim(x) > 1, p)),
    ):
        with pytest.raises(ValueError, match=r"Choose by the whole parameters before: mask=jax.tree.map\(lambda x: x"):
            traced(for_slices(inner))
    mask = jax.tree.map(lambda x: jnp.ndim(x) > 1, PARAMS)
    assert "all_gather" in traced(for_slices(optax.adamw(1e-2, mask=mask)))


def test_a_check_makes_no_numbers_and_is_made_once() -> None:
    """Of a hundred leaves it costs two traces more of ``update``, and of a second step none."""
    calls = {"init": 0, "update": 0}
    adam = for_slices(optax.adam(1e-3))

    def init(params: Tree) -> Any:
        calls["init"] += 1
        return adam.init(params)

    def update(*args: Any) -> Any:
        calls["update"] += 1
        assert all(isinstance(x, jax.core.Tracer) or x.ndim == 0 for x in jax.tree.leaves(args))
        return adam.update(*args)

    optimizer = zero(optax.GradientTransformation(init, update), "i")
    params = [jnp.ones((3, 4))] * 100

    def steps(p: Tree) -> Tree:
        state = optimizer.init(p)
        for _ in range(3):
            p, state = optimizer.update(p, state, p)
        return p

    jax.make_jaxpr(steps, axis_env=[("i", 2)])(params)
    assert calls["update"] == 2 + 1 + 2 * 3  # for the check; to see whether it names the axis; for slices


def test_ranks_trace_the_same_program() -> None:
    """Programs are compared. A set of names has another order on each rank, and a rank may have checked before."""
    axes = [(f"axis {i}", 1) for i in range(8)]
    names = tuple(name for name, _ in axes)
    optimizer = zero(optax.chain(clip_by_global_norm(0.1, names), optax.sgd(0.1)), names)

    def program() -> Any:
        step = jax.make_jaxpr(lambda p: optimizer.update(p, optimizer.init(p), p), axis_env=axes)
        return step({"w": jnp.ones(3)})

    first = program()
    assert str(first) == str(program())  # the second one is not checked
    asked = [e.params["axis_name"] for e in first.jaxpr.eqns if e.primitive.name == "axis_index"]
    runs = [tuple(asked[i : i + len(names)]) for i in range(0, len(asked), len(names))]
    assert set(runs) <= {names, names[::-1]}
    (sums,) = (e.params["axes"] for e in first.jaxpr.eqns if e.primitive.name == "psum" and not e.invars[0].aval.shape)
    assert sums == names


def test_a_state_that_init_has_not_made_is_checked_as_well() -> None:
    """A training that goes on from a checkpoint never calls ``init``."""
    inner = for_slices(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    with pytest.raises(ValueError, match=r"zero: expected an optimizer that updates each element by itself"):
        jax.make_jaxpr(lambda p: zero(inner, "i").update(p, inner.init(p), p), axis_env=[("i", 2)])(PARAMS)


def test_arguments_of_update() -> None:
    plateau = optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau(accumulation_size=2))
    assert "all_gather" in traced(plateau, value=jnp.float32(1))  # init knows nothing of it
    by_array = optax.GradientTransformationExtraArgs(
        optax.init_empty_state, lambda u, s, p=None, *, w: (u | {"w": u["w"] * w}, s)
    )
    with pytest.raises(ValueError, match=r"one that .*, at \['w'\]"):
        traced(for_slices(by_array), w=jnp.arange(15.0).reshape(5, 3))


def test_a_value_of_the_trace_around() -> None:
    def step(p: Tree, rate: Array) -> Tree:
        optimizer = zero(optax.sgd(2 * rate), "i")
        return optimizer.update(p, optimizer.init(p), p)[0]

    mapped = jax.vmap(step, (None, None), axis_name="i", axis_size=2)
    np.testing.assert_allclose(jax.jit(mapped)({"w": jnp.ones(3)}, 0.5)["w"], -np.ones((2, 3)))


def test_keys_among_the_parameters() -> None:
    with pytest.raises(TypeError, match=r"zero: expected arrays of numbers, got key<fry> at \['key'\]. Keep keys"):
        traced(optax.sgd(0.1), {"w": jnp.ones(3), "key": jax.random.key(0)})


def test_a_key_in_the_state() -> None:
    """It is the same on all devices, and stays whole."""

    def update(updates: Tree, key: Array, params: Tree | None = None) -> tuple[Tree, Array]:
        del params
        key, own = jax.random.split(key)
        scale = jax.random.uniform(own, ())
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), key

    assert "all_gather" in traced(optax.GradientTransformation(lambda _: jax.random.key(0), update))


def test_the_tables_name_operations_of_jax() -> None:
    known = {p.name for p in vars(jax_primitives).values() if hasattr(p, "bind")}
    names = cut_values.ELEMENTWISE | cut_values.RESHAPES | set(cut_values.REDUCTIONS)
    assert not names - known
