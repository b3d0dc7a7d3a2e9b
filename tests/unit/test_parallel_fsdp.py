"""Fully sharded data parallelism against plain data parallelism, and the memory that it promises."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from pycollective.parallel import clip_by_global_norm, fsdp, shard_state, tensor, unshard_state, zero
from tests.cases import values

Array = Any
Tree = Any
P = jax.P

AXIS = "data"
# 5 and 3 are no multiples of the numbers of devices, and a scalar has fewer elements than there are devices.
PARAMS = {
    "w": values((5, 3), seed=1) / 4,
    "b": [values((3,), seed=2), np.float32(2.0)],
    "half": values((4, 2), "bfloat16", seed=3),
    "none": np.zeros((0, 2), np.float32),
}


def loss(params: Tree, x: Array) -> Array:
    y = jnp.tanh(x @ params["w"] + params["b"][0][None])
    return jnp.mean(y**2) * params["b"][1] + jnp.sum(jnp.sin(params["half"].astype(jnp.float32))) * x[0, 0]


def examples(devices: int) -> Array:
    return jnp.asarray(values((devices, 7, 5), seed=4))


def mesh(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def on_devices(way: str, fun: Callable[..., Any], devices: int, *args: Tree) -> Any:
    """Runs ``fun(*args, x)`` on so many devices, each with its own ``x``. Returns the results of all, stacked."""
    xs = examples(devices)
    if way == "vmap":
        return jax.jit(jax.vmap(fun, (None,) * len(args) + (0,), axis_name=AXIS))(*args, xs)

    def block(xs: Array, *args: Tree) -> Any:
        return jax.tree.map(lambda x: x[None], fun(*args, xs[0]))

    specs = (P(AXIS), *[P()] * len(args))
    mapped = jax.shard_map(block, mesh=mesh(data=devices), in_specs=specs, out_specs=P(AXIS), check_vma=way == "types")
    return jax.jit(mapped)(xs, *args)


def assert_trees(got: Tree, want: Tree, tolerance: float = 1e-5) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, path
        limit = tolerance if a.dtype == np.float32 else 2**-7  # of bfloat16, sums in another order
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), limit, limit, err_msg=str(path))


def train(optimizer: Any, params: Tree, grad: Callable[[Tree], Tree], steps: int = 3) -> tuple[Tree, Any]:
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(grad(params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def plain(params: Tree, x: Array) -> Tree:
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    return train(optimizer, params, lambda p: lax.pmean(jax.grad(loss)(p, x), AXIS))[0]


@pytest.mark.usefixtures("promotion_of_optax")
@pytest.mark.parametrize(("way", "devices"), [("vmap", 4), ("vmap", 1), ("no types", 4), ("types", 4), ("types", 2)])
def test_a_training_is_that_of_plain_data_parallelism(way: str, devices: int) -> None:
    """With AdamW and a clipped norm, so the scale of the gradients matters."""

    def cut(params: Tree, x: Array) -> Tree:
        inner = optax.chain(clip_by_global_norm(0.5, AXIS), optax.adamw(1e-2))
        of_slices = fsdp.gathered(loss, params, AXIS)
        slices, _ = train(
            fsdp.sliced(inner, params, AXIS), fsdp.shard(params, AXIS), lambda s: jax.grad(of_slices)(s, x)
        )
        return fsdp.unshard(slices, params, AXIS)

    got = on_devices(way, cut, devices, PARAMS)
    want = jax.jit(jax.vmap(plain, (None, 0), axis_name=AXIS))(PARAMS, examples(devices))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert_trees(got, want)


@pytest.mark.parametrize("way", ["vmap", "types"])
def test_gradients_have_the_scale_of_zero(way: str) -> None:
    """A program that goes from one to the other keeps its learning rate."""

    def both(params: Tree, x: Array) -> tuple[Tree, Tree]:
        slices = fsdp.shard(params, AXIS)
        grads = jax.grad(fsdp.gathered(loss, params, AXIS))(slices, x)
        optimizer = zero(optax.sgd(1.0), AXIS)
        own = lax.pcast(params, AXIS, to="varying") if way == "types" else params
        updates, _ = optimizer.update(jax.grad(loss)(own, x), optimizer.init(params), params)
        return fsdp.unshard(grads, params, AXIS), jax.tree.map(jnp.negative, updates)

    got, want = on_devices(way, both, 4, PARAMS)
    assert_trees(got, want)


LAYERS, WIDTH = 3, 5
STACK = {"w": values((LAYERS, WIDTH, WIDTH), seed=5) / 4, "b": values((LAYERS, WIDTH), seed=6)}
ONE_LAYER = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), "b": jax.ShapeDtypeStruct((WIDTH,), jnp.float32)}


def layer(p: Tree, h: Array) -> Array:
    return jnp.tanh(h @ p["w"] + p["b"][None])


def stack_loss(stack: Tree, x: Array, one: Callable[[Tree, Array], Array] = layer) -> Array:
    return jnp.sum(lax.scan(lambda h, p: (one(p, h), None), x, stack)[0] ** 2)


@pytest.mark.parametrize("policy", [jax.checkpoint_policies.dots_saveable, None], ids=["products", "nothing"])
@pytest.mark.parametrize("way", ["vmap", "no types", "types"])
def test_stacked_layers_in_a_scan(way: str, policy: Any) -> None:
    def cut(stack: Tree, x: Array) -> Any:
        slices = jax.vmap(lambda p: fsdp.shard(p, AXIS))(stack)
        assert jax.tree.map(jnp.shape, slices) == {"w": (LAYERS, 7), "b": (LAYERS, 2)}
        one = fsdp.gathered(layer, ONE_LAYER, AXIS, policy=policy)
        value, grads = jax.value_and_grad(stack_loss)(slices, x, one)
        return value, jax.vmap(lambda s: fsdp.unshard(s, ONE_LAYER, AXIS))(grads)

    value, grads = on_devices(way, cut, 4, STACK)
    values_, all_grads = jax.jit(jax.vmap(jax.value_and_grad(stack_loss), (None, 0)))(STACK, examples(4))
    np.testing.assert_allclose(value, values_, rtol=1e-5)
    assert_trees(grads, jax.tree.map(lambda g: jnp.stack([g.mean(0)] * 4), all_grads))


def test_forward_mode_and_second_derivatives() -> None:
    """A tangent of the loss is that of the whole parameters; so are products with the Hessian, averaged."""

    def cut(params: Tree, direction: Tree, x: Array) -> Any:
        slices, tangents = (fsdp.shard(tree, AXIS) for tree in (params, direction))
        of_slices = fsdp.gathered(stack_loss, STACK, AXIS)
        tangent = jax.jvp(lambda s: of_slices(s, x), (slices,), (tangents,))[1]
        product = jax.jvp(lambda s: jax.grad(of_slices)(s, x), (slices,), (tangents,))[1]
        return tangent, fsdp.unshard(product, STACK, AXIS)

    def whole(params: Tree, direction: Tree, x: Array) -> Any:
        tangent = jax.jvp(lambda p: stack_loss(p, x), (params,), (direction,))[1]
        return tangent, lax.pmean(jax.jvp(lambda p: jax.grad(stack_loss)(p, x), (params,), (direction,))[1], AXIS)

    direction = jax.tree.map(lambda x: values(x.shape, seed=9), STACK)
    assert_trees(on_devices("vmap", cut, 2, STACK, direction), on_devices("vmap", whole, 2, STACK, direction), 1e-4)


@pytest.mark.parametrize("types", [False, True])
def test_layers_that_are_cut_along_another_axis(types: bool) -> None:
    """Slices are those of this device's part of the weights, along a tuple of axes. All devices have the shift."""
    params = {"up": values((5, 8), seed=1), "down": values((8, 5), seed=2) / 4, "shift": values((5,), seed=3)}
    data = ("pod", AXIS)

    def mlp(p: Tree, x: Array) -> Array:
        y = jnp.tanh(tensor.column_parallel(x, p["up"], "model"))
        return jnp.mean((tensor.row_parallel(y, p["down"], "model") + p["shift"][None, None]) ** 2)

    def whole(p: Tree, x: Array) -> Array:
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] + p["shift"][None, None]) ** 2)

    def grads(own: Tree, x: Array) -> Tree:
        return fsdp.unshard(jax.grad(fsdp.gathered(mlp, own, data))(fsdp.shard(own, data), x), own, data)

    specs = {"up": P(None, "model"), "down": P("model"), "shift": P()}
    axes = mesh(pod=2, data=2, model=2)
    mapped = jax.shard_map(grads, mesh=axes, in_specs=(specs, P(data)), out_specs=specs, check_vma=types)
    x = values((4, 3, 5), seed=4)
    assert_trees(jax.jit(mapped)(params, x), jax.jit(jax.grad(whole))(params, x))


def peak_of_gradient(policy: Any) -> tuple[int, int]:
    """Returns the bytes that a gradient of a stack needs beside arguments and results, and those of one layer."""
    width, devices = 256, 4
    one = fsdp.gathered(
        lambda w, h: jnp.tanh(h @ w.T), jax.ShapeDtypeStruct((width, width), jnp.float32), AXIS, policy=policy
    )
    mapped = jax.shard_map(
        lambda s, x: jax.grad(stack_loss)(s[0], x[0], one)[None],
        mesh=mesh(data=devices),
        in_specs=P(AXIS),
        out_specs=P(AXIS),
    )
    slices = jax.ShapeDtypeStruct((devices, 16, width * width // devices), jnp.float32)
    compiled = jax.jit(mapped).lower(slices, jax.ShapeDtypeStruct((devices, 2, width), jnp.float32)).compile()
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes, 4 * width**2


@pytest.mark.parametrize("policy", [jax.checkpoint_policies.dots_saveable, None], ids=["products", "nothing"])
def test_one_layer_is_gathered_at_a_time(policy: Any) -> None:
    """A gathered layer, its gradient and slices are there at once; a transposed weight is not kept, either."""
    peak, of_layer = peak_of_gradient(policy)
    assert peak < 3 * of_layer


def test_gathered_layers_can_be_kept() -> None:
    """The policy decides: then all 16 layers are there."""
    peak, of_layer = peak_of_gradient(jax.checkpoint_policies.everything_saveable)
    assert peak > 16 * of_layer


def test_small_leaves_travel_together() -> None:
    """In the forward pass, again in the backward pass, and as gradients: one call each, and a dtype has its own."""
    params = [jnp.ones((16, 16)) for _ in range(100)] + [jnp.ones(3, jnp.bfloat16)]

    def total(p: Tree, x: Array) -> Array:
        return sum(x * jnp.sum(jnp.sin(w)).astype(jnp.float32) for w in p)

    def grad(p: Tree, x: Array) -> Tree:
        return jax.grad(fsdp.gathered(total, p, AXIS))(fsdp.shard(p, AXIS), x)

    text = str(jax.make_jaxpr(grad, axis_env=[(AXIS, 2)])(params, jnp.float32(1)))
    assert text.count("= all_gather[") == 2 * 2
    assert text.count("= reduce_scatter[") == 2


def test_the_wire_dtype() -> None:
    """Parameters and gradients travel in it; the gradients have the dtypes of the parameters."""

    def grads(params: Tree, x: Array) -> Tree:
        return jax.grad(fsdp.gathered(loss, params, AXIS, wire_dtype=jnp.bfloat16))(fsdp.shard(params, AXIS), x)

    text = str(jax.make_jaxpr(grads, axis_env=[(AXIS, 2)])(PARAMS, jnp.ones((7, 5))))
    assert re.findall(r":(\w+)\[[\d,]+\] = (?:all_gather|reduce_scatter)\[", text) == ["bf16"] * 3
    got = on_devices("vmap", lambda p, x: fsdp.unshard(grads(p, x), p, AXIS), 2, PARAMS)
    want = on_devices("vmap", lambda p, x: lax.pmean(jax.grad(loss)(p, x), AXIS), 2, PARAMS)
    assert_trees(got, want, 2**-5)
    assert not np.array_equal(got["w"], want["w"])


@pytest.mark.usefixtures("promotion_of_optax")
def test_a_training_goes_on_with_another_number_of_devices() -> None:
    """It is saved as whole parameters, and as the state that the optimizer has without slices."""
    inner = optax.adamw(1e-2)

    def first(params: Tree, x: Array) -> tuple[Tree, Any]:
        of_slices = fsdp.gathered(loss, params, AXIS)
        slices, state = train(inner, fsdp.shard(params, AXIS), lambda s: jax.grad(of_slices)(s, x))
        return fsdp.unshard(slices, params, AXIS), unshard_state(inner, state, params, AXIS)

    params, state = jax.tree.map(lambda x: x[0], on_devices("vmap", first, 2, PARAMS))
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, inner.init(PARAMS))

    def sharded(params: Tree, state: Any, x: Array) -> Tree:
        slices = fsdp.shard(params, AXIS)
        grads = jax.grad(fsdp.gathered(loss, params, AXIS))(slices, x)
        return fsdp.unshard(inner.update(grads, shard_state(inner, state, AXIS), slices)[0], params, AXIS)

    def whole(params: Tree, state: Any, x: Array) -> Tree:
        return inner.update(lax.pmean(jax.grad(loss)(params, x), AXIS), state, params)[0]

    assert_trees(on_devices("vmap", sharded, 4, params, state), on_devices("vmap", whole, 4, params, state))


def test_a_wire_without_fractions_is_refused() -> None:
    with pytest.raises(ValueError, match="parallel.gathered: expected a floating-point wire_dtype, got int8"):
        fsdp.gathered(loss, PARAMS, AXIS, wire_dtype=jnp.int8)


def test_wrong_slices_are_refused() -> None:
    def run(change: Callable[[Tree], Tree]) -> None:
        def one(params: Tree, x: Array) -> Any:
            return fsdp.gathered(loss, params, AXIS)(change(fsdp.shard(params, AXIS)), x)

        on_devices("vmap", one, 2, PARAMS)

    with pytest.raises(ValueError, match=r"gathered: expected slices of shape \(8,\) at \['w'\], .* got \(4,\)"):
        run(lambda s: s | {"w": s["w"][:4]})
    with pytest.raises(
        ValueError, match="parallel.gathered: expected slices in a tree like the shapes, .* got PyTreeDef"
    ):
        run(lambda s: {"w": s["w"]})
    with pytest.raises(ValueError, match=r"unshard: expected slices of shape \(2,\) at the only leaf, .* got \(3,\)"):
        jax.vmap(lambda s: fsdp.unshard(s, np.ones(4), AXIS), axis_name=AXIS)(jnp.ones((2, 3)))


class Config(NamedTuple):
    """An argument with an array, a field that is static as an array's node, and one that is no array."""

    scale: Array
    widen: jax.tree_util.Partial
    depth: int


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_what_is_no_array_is_static(policy: Any) -> None:
    """A flag may choose a branch of Python, as a keyword argument, and beside an array in one argument."""

    def model(p: Tree, x: Array, config: Config, *, train: bool, name: str = "tanh") -> Array:
        y = loss(p, x) * config.scale
        for _ in range(config.depth):
            y = config.widen(y)
        return y if train and name == "tanh" else 2 * y

    def both(params: Tree, x: Array) -> Any:
        config = Config(x[0, 0], jax.tree_util.Partial(lambda y: 3 * y), 2)
        slices = fsdp.shard(params, AXIS)
        of_slices = fsdp.gathered(model, params, AXIS, policy=policy)
        got, want = (
            jax.grad(lambda p, f=f: f(p, x, config, train=True) + f(p, x, config, train=False))(p)
            for f, p in ((of_slices, slices), (model, params))
        )
        return fsdp.unshard(got, params, AXIS), jax.tree.map(lambda g: lax.pmean(g, AXIS), want)

    got, want = on_devices("vmap", both, 2, PARAMS)
    assert_trees(got, want)


def test_a_loss_that_is_averaged_already_is_refused() -> None:
    """JAX's types tell. Its gradient would be the N-th part of the mean."""

    def run(fun: Callable[..., Any]) -> Any:
        return on_devices("types", lambda p, x: fsdp.gathered(fun, p, AXIS)(fsdp.shard(p, AXIS), x), 2, PARAMS)

    assert run(lambda p, x: (loss(p, x), lax.pmean(loss(p, x), AXIS)))[1].shape == (2,)  # beside it, it may be
    with pytest.raises(ValueError, match="gathered: expected a function whose results are those of the device's own"):
        run(lambda p, x: lax.pmean(loss(p, x), AXIS))


@pytest.mark.parametrize("name", ["shard", "unshard", "gathered", "sliced"])
def test_the_axis_must_be_bound(name: str) -> None:
    w = jnp.ones(3)
    calls: dict[str, Callable[[], Any]] = {
        "shard": lambda: fsdp.shard(w, AXIS),
        "unshard": lambda: fsdp.unshard(w, w, AXIS),
        "gathered": lambda: fsdp.gathered(jnp.sum, w, AXIS)(w),
        "sliced": lambda: fsdp.sliced(optax.sgd(1.0), w, AXIS).init(w),
    }
    with pytest.raises(NameError, match=f"{name}: expected a call where the axis 'data' is bound"):
        calls[name]()
