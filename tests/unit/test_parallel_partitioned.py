"""Optimizers that look at whole leaves, in slices, against optax on one device with the mean of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from pycollective.jax_support.jaxprs import all_equations
from pycollective.parallel import (
    clip_by_global_norm,
    fsdp,
    master_weights,
    partitioned,
    shard_state,
    unshard_state,
    zero,
)
from pycollective.parallel.axes import Sliced
from pycollective.parallel.per_device import as_varying
from tests.cases import values

pytestmark = pytest.mark.usefixtures("promotion_of_optax")

Array = Any
Tree = Any
P = jax.P

PARAMS = {
    "w": values((6, 4), seed=1) / 4,
    "v": values((3, 5), seed=2) / 4,
    "b": values((5,), seed=3) / 4,
    "s": np.float32(0.5),
    "half": values((4, 2), "bfloat16", seed=4),
}
STEPS = 4


def loss(p: Tree, x: Array) -> Array:
    y = jnp.tanh(x @ p["w"]) @ jnp.tanh(p["half"].astype(jnp.float32)) @ jnp.ones((2, 3)) @ p["v"] + p["b"][None]
    return jnp.mean(y**2) * p["s"]


def gradients(p: Tree, x: Array, i: Array) -> Tree:
    """The gradients of a device for its examples ``x``. In step 1 the first device has an Inf."""
    grads = jax.grad(loss)(p, x)
    bad = (i == 1) & (x[0, 0] > 100)
    return grads | {"b": jnp.where(bad, jnp.inf, grads["b"])}


def train(optimizer: Any, params: Tree, grad: Callable[..., Tree]) -> Tree:
    optimizer = optax.with_extra_args_support(optimizer)

    def step(carry: Any, i: Array) -> Any:
        p, state = carry
        updates, state = optimizer.update(grad(p, i), state, p, value=jnp.float32(1))
        return (optax.apply_updates(p, updates), state), None

    start = params, optimizer.init(params)
    return lax.scan(step, start, jnp.arange(STEPS))[0][0]


def by_zero(inner: Any, p: Tree, x: Array) -> Tree:
    return train(zero(inner, "i"), p, lambda p, i: gradients(as_varying(p, "i"), x, i))


def by_slices(inner: Any, p: Tree, x: Array) -> Tree:
    def grad(s: Tree, i: Array) -> Tree:
        grads = gradients(as_varying(fsdp.unshard(s, p, "i"), "i"), x, i)
        return fsdp.shard(lax.pmean(grads, "i"), "i")

    return fsdp.unshard(train(fsdp.sliced(inner, p, "i"), fsdp.shard(p, "i"), grad), p, "i")


def on_one(inner: Any, p: Tree, xs: Array) -> Tree:
    def grad(p: Tree, i: Array) -> Tree:
        return jax.tree.map(lambda g: g.mean(0), jax.vmap(gradients, (None, 0, None))(p, xs, i))

    return train(inner, p, grad)


def examples(devices: int, *, bad: bool = False) -> Array:
    xs = jnp.asarray(values((devices, 7, 6), seed=5)) / 4
    return xs.at[0, 0, 0].set(101.0) if bad else xs


def large(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.ndim(x) > 1, tree)


def two(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: "matrix" if jnp.ndim(x) == 2 and jnp.size(x) > 20 else "other", tree)


def clip_large(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
    """Clips by the norm above 1e-3, in a branch."""
    norm = optax.tree.norm(updates)
    scale = lax.cond(norm > 1e-3, lambda: 1e-3 / norm, lambda: jnp.ones_like(norm))
    return jax.tree.map(lambda g: g * scale, updates), state


def sorted_in_loop(g: Array) -> Array:
    def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
        i, x = state
        return i + 1, jnp.sort(jnp.ravel(x * 1.5)).reshape(x.shape)

    return lax.while_loop(lambda state: (state[0] < 3) & (jnp.max(jnp.abs(state[1])) > 0), body, (0, g))[1]


def reductions(t: Tree, _: Any) -> Tree:
    """Each reduction, of what is not neutral in the zeros at a slice's end."""
    low, high = jnp.min(t["w"] + 9) - 9, jnp.max(t["v"] - 9) + 9
    signs = jnp.all(t["b"] < 100) & ~jnp.any(t["b"] + 1 > 100)
    dot = jnp.vdot(t["w"] + 1, 2 - t["w"]) * 1e-3
    places = jnp.sum((t["v"] + 1).astype(jnp.int32)) + jnp.max(-3 - (t["v"] > 9).astype(jnp.int32))
    return t | {
        "w": jnp.where(signs, t["w"] * low * dot, 0) + jnp.roll(t["w"], 1, 0) * t["s"],
        "v": jnp.clip(t["v"], -high, high * places) + jnp.cumsum(t["v"], 1),
        "b": t["b"] + jnp.exp(t["b"]).sum() * jnp.mean(t["w"], 0)[0],
        "half": jnp.where(jnp.argmax(t["half"]) > 2, t["half"], t["half"].T.reshape(4, 2)),
    }


CLIP = optax.clip_by_global_norm(1e-2)
INNER: dict[str, Any] = {
    "mask by dimensions": optax.adamw(1e-2, weight_decay=0.5, mask=large),
    "labels by shape": optax.multi_transform({"matrix": optax.adamw(1e-2), "other": optax.sgd(0.1, momentum=0.9)}, two),
    "steps around a clip": optax.MultiSteps(optax.chain(CLIP, optax.adamw(1e-2)), 2),
    "steps inside of a clip": optax.chain(
        CLIP, optax.MultiSteps(optax.contrib.muon(1e-2), 2).gradient_transformation()
    ),
    "rows clipped": optax.chain(optax.adaptive_grad_clip(1e-3), optax.sgd(0.1, momentum=0.9)),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "muon": optax.contrib.muon(1e-2),
    "novograd": optax.novograd(1e-2),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(1e-2)),
    "products of all": optax.multi_transform(
        {"a": optax.contrib.prodigy(1e-2), "b": optax.lbfgs(1e-2, linesearch=None), "c": optax.sgd(1e-2)},
        {"w": "a", "v": "b", "b": "a", "s": "b", "half": "c"},
    ),
    "a branch": optax.chain(optax.GradientTransformation(optax.init_empty_state, clip_large), optax.sgd(10.0)),
    "a loop": optax.chain(
        optax.stateless(lambda t, _: t | {"w": sorted_in_loop(t["w"]), "v": sorted_in_loop(t["v"])}), optax.scale(-0.1)
    ),
    "reductions": optax.chain(optax.stateless(reductions), optax.scale(-0.1)),
    "if finite": optax.apply_if_finite(optax.lamb(1e-2), 3),
}
WAYS = {
    **dict.fromkeys(INNER, (by_zero, 3, False)),
    "labels by shape": (by_slices, 3, True),
    "adafactor": (by_slices, 3, True),
    "muon": (by_zero, 2, True),
    "lamb": (by_slices, 4, False),
    "steps inside of a clip": (by_slices, 2, True),
    "a loop": (by_zero, 2, True),
    "reductions": (by_slices, 4, True),
    "if finite": (by_zero, 2, True),
}


@pytest.mark.parametrize("name", INNER)
def test_slices_are_updated_as_whole_arrays(name: str) -> None:
    """By :func:`jax.vmap`, or with JAX's types: there the results are, by their types, the same on all devices."""
    inner, (way, devices, types) = INNER[name], WAYS[name]
    inner = inner.gradient_transformation() if isinstance(inner, optax.MultiSteps) else inner
    xs = examples(devices, bad=name == "if finite")
    if types:
        mesh = jax.make_mesh((devices,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        mapped = jax.shard_map(lambda p, x: way(inner, p, x[0]), mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
        got = jax.jit(mapped)(PARAMS, xs)
    else:
        of_all = jax.jit(jax.vmap(lambda p, x: way(inner, p, x), (None, 0), axis_name="i"))(PARAMS, xs)
        got = jax.tree.map(lambda x: x[0], of_all)
        assert all((x == x[:1]).all() for x in jax.tree.leaves(of_all))
    want = jax.jit(lambda p, xs: on_one(inner, p, xs))(PARAMS, xs)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        limit = 2e-5 if a.dtype == np.float32 else 2**-6  # of bfloat16, sums in another order
        assert np.isfinite(np.asarray(b, np.float32)).all()
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), limit, limit, err_msg=str(path))
    assert max(np.abs(got[name] - PARAMS[name]).max() for name in "wvb") > 1e-3  # it has learned something


def traced(optimizer: Any, params: Tree = PARAMS, **extra: Any) -> str:
    def step(p: Tree, extra: Any) -> Any:
        return optimizer.update(p, optimizer.init(p), p, **extra)

    return str(jax.make_jaxpr(step, axis_env=[("i", 2)])(params, extra))


def test_what_devices_exchange() -> None:
    """Sums of all leaves travel in one call, and so do all matrices, to their owners and back."""
    text = traced(zero(optax.lamb(1e-2), "i"), {name: PARAMS[name] for name in ("w", "v", "b")})
    assert text.count("= psum[") == 2  # optax.safe_norm computes a norm, and then a norm again
    text = traced(zero(optax.contrib.muon(1e-2), "i"))
    # High matrices, which optax transposes first, of float32 and of bfloat16; and wide ones, of float32.
    assert text.count("= all_to_all[") == 2 * 2 + 2
    text = traced(zero(optax.adamw(1e-2, mask=large), "i"))
    assert "psum[" not in text
    assert "all_to_all[" not in text


def test_devices_share_the_work() -> None:
    assert partitioned._shared([1.0, 9.0, 2.0, 5.0, 4.0], 3) == [[1], [3, 0], [4, 2]]
    eqn = jax.make_jaxpr(lambda x: lax.fori_loop(0, 5, lambda _, x: x @ x, x))(jnp.ones((4, 4))).eqns[0]
    assert 5 * 2 * 64 <= partitioned._operations(eqn) < 6 * 2 * 64


def test_only_the_owner_computes_a_matrix() -> None:
    """The largest matrix belongs to one device, the two others together to the other one."""
    params = [jnp.ones((4, 8)), jnp.ones((4, 4)), jnp.ones((4, 4))]
    closed = jax.make_jaxpr(
        lambda p: zero(optax.contrib.muon(1e-2), "i").update(p, zero(optax.contrib.muon(1e-2), "i").init(p), p),
        axis_env=[("i", 2)],
    )(params)
    loops = [
        [sum(e.primitive.name == "scan" for e in all_equations(branch.jaxpr)) for branch in eqn.params["branches"]]
        for eqn in closed.eqns
        if eqn.primitive.name == "cond"
    ]
    assert sorted(max(loops)) == [1, 2]


def test_what_may_differ_between_devices_is_refused() -> None:
    by_array = optax.GradientTransformationExtraArgs(
        optax.init_empty_state, lambda u, s, p=None, *, w: (u | {"w": u["w"] * w}, s)
    )
    with pytest.raises(ValueError, match=r"zero: expected .*, got one that computes with an array from outside"):
        traced(zero(by_array, "i"), w=jnp.ones((6, 4)))
    assert "all_gather" in traced(zero(by_array, "i"), w=2.0)
    for number in jnp.linalg.norm, lambda w: w[0, 0]:
        by_number = optax.GradientTransformationExtraArgs(
            optax.init_empty_state, lambda u, s, p=None, *, w, number=number: (u | {"w": u["w"] * number(w)}, s)
        )
        with pytest.raises(ValueError, match=r"zero: expected .*, got one that computes with an array from outside"):
            traced(zero(by_number, "i"), w=jnp.ones((6, 4)))
    with pytest.raises(ValueError, match=r"sliced: expected .*, got one that computes with an array from outside"):
        jax.make_jaxpr(
            lambda p, w: fsdp.sliced(optax.stateless(lambda u, _: jax.tree.map(lambda x: x @ w, u)), p, "i").update(
                fsdp.shard(p, "i"), optax.EmptyState()
            ),
            axis_env=[("i", 2)],
        )({"w": PARAMS["w"]}, jnp.ones((4, 4)))


def test_a_state_of_other_slices_is_refused() -> None:
    adam = optax.adam(1e-2)
    with pytest.raises(
        ValueError, match=r"zero: expected a state with the shape \(3,\) at \[0\].mu\['b'\], got \(5,\)"
    ):
        jax.make_jaxpr(lambda p: zero(adam, "i").update(p, adam.init(p), p), axis_env=[("i", 2)])(PARAMS)
    with pytest.raises(ValueError, match=r"zero: expected a state PyTreeDef"):
        jax.make_jaxpr(lambda p: zero(adam, "i").update(p, (), p), axis_env=[("i", 2)])(PARAMS)
    with pytest.raises(ValueError, match=r"zero: expected an optimizer that gives back what it gets"):
        traced(zero(optax.GradientTransformation(lambda _: (), lambda u, s, p=None: (u, (s, s))), "i"))


def test_stacked_layers_keep_their_first_dimension() -> None:
    """An optimizer sees the whole stack, of three dimensions. Its state is saved whole, and comes back."""
    layers = {"w": jnp.asarray(values((4, 3, 5), seed=1)), "b": jnp.asarray(values((4, 5), seed=2))}
    inner = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(1e-2, weight_decay=0.5, mask=lambda p: jax.tree.map(lambda x: x.ndim > 2, p)),
        optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    )

    def run(p: Tree, _: Array) -> Any:
        optimizer = fsdp.sliced(inner, p, "i")
        slices = jax.vmap(lambda x: fsdp.shard(x, "i"))(p)
        state = optimizer.init(slices)
        _, state = optimizer.update(slices, state, slices)
        saved = unshard_state(inner, state, p, "i")
        again = shard_state(inner, saved, "i", like=state)
        updates, _ = optimizer.update(slices, again, slices)
        whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), p)
        return jax.vmap(lambda s: fsdp.unshard(s, whole, "i"))(updates), saved

    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    got = jax.jit(mapped)(layers, jnp.zeros(2))
    _, state = inner.update(layers, inner.init(layers), layers)
    want = inner.update(layers, state, layers)[0], state
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def test_init_may_need_the_parameters() -> None:
    """It is not one that :func:`optax.tree.map_params` can call: leaves of the state are known by their shapes."""
    inner = optax.GradientTransformation(
        lambda p: {"w": p["w"] * 2, "n": jnp.zeros(7), "rate": jnp.ones(())},
        lambda u, s, p=None: (u | {"w": u["w"] + s["w"]}, s | {"w": s["w"] * 2, "n": s["n"] + 1}),
    )
    state = jax.vmap(zero(inner, "i").init, None, axis_name="i", axis_size=2)(PARAMS)
    assert jax.tree.map(jnp.shape, state) == {"w": (2, 12), "n": (2, 7), "rate": (2,)}


def test_master_weights_in_slices() -> None:
    """Parameters in bfloat16 are, in each step, the rounded parameters of a training in float32."""
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), {name: PARAMS[name] for name in ("w", "v", "b")})
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    xs = examples(2)

    def grad(p: Tree, x: Array, i: Array) -> Tree:
        del i
        return jax.tree.map(lambda w: jnp.sin(w * 3) * x[0, 0].astype(w.dtype), p)

    def of_device(x: Array) -> Any:
        optimizer = zero(master_weights(inner), "i")
        state = optimizer.init(params)
        p = params
        for i in range(6):
            updates, state = optimizer.update(grad(p, x, i), state, p)
            p = optax.apply_updates(p, updates)
        return p, state.params

    got, slices = jax.jit(jax.vmap(of_device, axis_name="i"))(xs)
    p, wide = params, jax.tree.map(lambda x: x.astype(jnp.float32), params)
    state, narrow_state, narrow = inner.init(wide), inner.init(params), params
    for i in range(6):
        mean = jax.tree.map(
            lambda g: g.astype(jnp.float32),
            jax.tree.map(lambda a, b: (a + b) / 2, grad(p, xs[0], i), grad(p, xs[1], i)),
        )
        updates, state = inner.update(mean, state, wide)
        wide = optax.apply_updates(wide, updates)
        p = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
        lost, narrow_state = inner.update(jax.tree.map(lambda g: g.astype(jnp.bfloat16), mean), narrow_state, narrow)
        narrow = optax.apply_updates(narrow, lost)
    for name in params:
        assert got[name].dtype == jnp.bfloat16
        assert slices[name].dtype == jnp.float32
        assert slices[name].shape == (2, -(-params[name].size // 2))
        np.testing.assert_array_equal(got[name][0], p[name])
    assert any((p[name] != narrow[name]).any() for name in params)  # bfloat16 alone would have lost updates
    with pytest.raises(TypeError, match="master_weights: expected a floating-point dtype, got 'int8'"):
        master_weights(inner, "int8")
    with pytest.raises(ValueError, match="master_weights: expected the parameters as well"):
        master_weights(inner).update(params, master_weights(inner).init(params))


def twice(inner: Any, params: Tree, devices: int = 2) -> Tree:
    """The updates of the second step on each device, with the parameters as gradients."""

    def of_device(p: Tree, _: Array) -> Tree:
        optimizer = zero(inner, "i")
        _, state = optimizer.update(p, optimizer.init(p), p)
        return optimizer.update(p, state, p)[0]

    return jax.jit(jax.vmap(of_device, (None, 0), axis_name="i"))(params, jnp.zeros(devices))


def matches(inner: Any, params: Tree, devices: int = 2, like: Any = None) -> None:
    """Compares :func:`twice` with one device, which has the optimizer ``like``, by default the same one."""
    like = inner if like is None else like
    _, state = like.update(params, like.init(params), params)
    want, _ = like.update(params, state, params)
    for a, b in zip(jax.tree.leaves(twice(inner, params, devices)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, np.broadcast_to(b, a.shape), 1e-5)


def halving(names: Any = None) -> Any:
    """Has a number for each parameter; ``names``: as well a state which :func:`optax.tree.map_params` cannot find."""

    def init(p: Tree) -> Tree:
        numbers = jax.tree.map(lambda _: jnp.ones(()), p)
        return numbers if names is None else numbers | {"first": p[names] * 0}

    def update(u: Tree, s: Any, p: Tree = None) -> tuple[Tree, Any]:
        s = s | {name: s[name] / 2 for name in u}
        return {name: u[name] * s[name] for name in u}, s

    return optax.GradientTransformation(init, update)


MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3) - 2.5


@pytest.mark.parametrize("names", [None, "w"])
def test_a_number_for_each_parameter_beside_a_collective(names: Any) -> None:
    """``init`` and ``update`` both get slices, or both get whole arrays."""
    inner = optax.chain(clip_by_global_norm(1e9, "i"), halving(names))
    matches(inner, {"w": MATRIX, "s": np.float32(2)}, like=halving(names))
    matches(halving(names), {"w": MATRIX, "s": np.float32(2)})


def test_init_with_a_collective_is_checked() -> None:
    inner = optax.GradientTransformation(lambda p: lax.pmean(optax.tree.norm(p), "i"), lambda u, s, p=None: (u / s, s))
    with pytest.raises(ValueError, match="zero: expected an optimizer that updates each element by itself"):
        twice(inner, MATRIX)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_init_cannot_know_of_a_collective_for_an_extra_argument(shape: tuple[int, ...]) -> None:
    def update(u: Tree, s: Tree, p: Tree = None, *, by: Array) -> tuple[Tree, Tree]:
        return jax.tree.map(lambda x, n: x * n.sum() * lax.pmax(by, "i"), u, s), s

    def init(p: Tree) -> Tree:
        return jax.tree.map(lambda _: jnp.ones(shape), p)

    inner = optax.GradientTransformationExtraArgs(init, update)
    with pytest.raises(ValueError, match=r"whose update can be called without extra .*, got one that needs .*\['by'\]"):
        traced(zero(inner, "i"), {"w": MATRIX}, by=2.0)
    momentum = optax.GradientTransformationExtraArgs(
        optax.trace(0.9).init, lambda u, s, p=None, *, by: (jax.tree.map(lambda x: x * lax.pmax(by, "i"), u), s)
    )
    assert "pmax" in traced(zero(momentum, "i"), {"w": MATRIX}, by=2.0)


def test_bools_in_the_state_have_no_known_padding() -> None:
    def update(u: Array, s: Array, p: Any = None) -> tuple[Array, Array]:
        return u * lax.pmin(jnp.all(s).astype(jnp.int32), "i"), s

    inner = optax.GradientTransformation(jnp.isfinite, update)
    with pytest.raises(ValueError, match="lax.reduce_and of what need not be neutral"):
        twice(inner, np.ones(5, np.float32))
    matches(inner, np.ones(4, np.float32), like=optax.identity())


@pytest.mark.parametrize("function", [jnp.max, jnp.min])
def test_nan_of_one_device_reaches_all(function: Callable[[Array], Array]) -> None:
    inner = optax.stateless(lambda u, _: u / function(jnp.abs(u)))
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    grads = jnp.array([jnp.nan, 2, 3, 4])
    optimizer = zero(inner, "i")
    mapped = jax.shard_map(
        lambda g: optimizer.update(as_varying(g, "i"), optimizer.init(g))[0], mesh=mesh, in_specs=P(), out_specs=P()
    )
    for g in grads, grads[::-1]:
        assert jnp.isnan(jax.jit(mapped)(g)).all()


def test_bits_and_transposed_reshapes() -> None:
    """``and`` and ``or`` of integers are of their bits. A reshape may transpose its operand before."""

    def update(u: Tree, _: Any) -> Tree:
        n = u["n"].astype(jnp.int32)
        bits = lax.reduce_and(n, (0,)) + 10 * lax.reduce_or(n, (0,))
        line = lax.reshape(u["w"], (6,), dimensions=(1, 0)) * jnp.arange(6)
        return {"n": u["n"] * bits, "w": lax.reshape(line, (2, 3)), "q": lax.reshape(u["q"], (2, 2), dimensions=(1, 0))}

    matches(
        optax.stateless(update),
        {"n": np.float32([6, 6, 5, 5]), "w": MATRIX, "q": np.float32([[1, 2], [3, 4]])},
    )


def test_padding_of_very_many_elements() -> None:
    """Their number exceeds an int32."""
    size, devices = 2**31 + 11, 2
    cut = Sliced((size,))
    closed = jax.make_jaxpr(lambda x: cut.without_padding(x, 0, "i", devices), axis_env=[("i", devices)])(
        jax.ShapeDtypeStruct(cut.slice_shape(devices), jnp.bfloat16)
    )
    assert [x.shape for x in closed.out_avals] == [cut.slice_shape(devices)]
    (counts,) = [x for x in closed.consts if np.shape(x) == (devices,)]
    assert counts.tolist() == [2**30 + 6, 2**30 + 5]


def test_a_state_is_cut_again_as_before() -> None:
    """An optimizer that :func:`optax.tree.map_params` cannot call, and numbers beside a collective."""
    params = {"w": MATRIX, "s": np.float32(2)}
    flat = optax.flatten(optax.trace(0.9))
    numbers = optax.chain(clip_by_global_norm(1e9, "i"), halving())

    def saved_and_restored(inner: Any, p: Tree, *, by_like: bool) -> Tree:
        optimizer = zero(inner, "i")
        _, state = optimizer.update(p, optimizer.init(p), p)
        whole = unshard_state(inner, state, p, "i")
        how = {"like": state} if by_like else {"params": p}
        return optimizer.update(p, shard_state(inner, whole, "i", **how), p)[0], whole

    def of_device(p: Tree, _: Array) -> Tree:
        return saved_and_restored(flat, p, by_like=False), saved_and_restored(numbers, p, by_like=True)

    def on_one(inner: Any) -> Tree:
        _, state = inner.update(params, inner.init(params), params)
        return inner.update(params, state, params)[0], state

    got = jax.jit(jax.vmap(of_device, (None, 0), axis_name="i"))(params, jnp.zeros(2))
    want = on_one(flat), on_one(optax.chain(optax.identity(), halving()))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, np.broadcast_to(b, a.shape), 1e-5)
    with pytest.raises(ValueError, match="shard_state: expected an optimizer whose init .* or the parameters"):
        jax.make_jaxpr(lambda s: shard_state(flat, s, "i"), axis_env=[("i", 2)])(flat.init(params))
    with pytest.raises(ValueError, match=r"unshard_state: expected a leaf of shape \(2, 2\) or \(2, 3\), got \(2, 4\)"):
        jax.make_jaxpr(lambda s: unshard_state(optax.trace(0.9), s, MATRIX, "i"), axis_env=[("i", 2)])(
            optax.TraceState(jnp.ones((2, 4)))
        )


def test_keys_in_the_state_and_flags() -> None:
    """A state may have a key for each parameter. A bool of Python among the other arguments is static."""

    def update(u: Tree, s: Tree, p: Tree = None, *, flag: bool) -> tuple[Tree, Tree]:
        noise = jax.tree.map(lambda x, k: jax.random.normal(k, x.shape) if flag else x, u, s)
        return noise, jax.tree.map(lambda k: jax.random.split(k)[0], s)

    inner = optax.GradientTransformationExtraArgs(lambda p: jax.tree.map(lambda _: jax.random.key(3), p), update)

    def of_device(p: Array, _: Array) -> Array:
        return zero(inner, "i").update(p, zero(inner, "i").init(p), p, flag=True)[0]

    got = jax.vmap(of_device, (None, 0), axis_name="i")(MATRIX, jnp.zeros(2))
    np.testing.assert_allclose(got[1], jax.random.normal(jax.random.key(3), MATRIX.shape), 1e-5)
