"""Independent subnets over the axis of jax.vmap and jax.shard_map, against NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pycollective.parallel.subnets import draw_subnets, join_subnets, take_subnet
from tests.cases import values

Array = Any
Tree = Any
P = jax.P

# "conv" has its units in the inner dimensions, and "again" those of one layer twice.
SIZES = {"h1": 8, "h2": 12}
PARAMS = {
    "first": {"w": values((5, 8), seed=1), "b": values((8,), seed=2)},
    "inner": [values((8, 12), seed=3), values((12,), "bfloat16", seed=4)],
    "conv": values((3, 12, 8, 2), seed=5),
    "again": values((8, 8), seed=6),
    "last": {"w": values((12, 3), seed=7), "b": values((3,), seed=8)},
}
SPEC = {
    "first": {"w": (None, "h1"), "b": ("h1",)},
    "inner": [("h1", "h2"), ("h2",)],
    "conv": (None, "h2", "h1", None),
    "again": ("h1", "h1"),
    "last": {"w": ("h2", None), "b": (None,)},
}


def leaves_and_specs() -> list[tuple[np.ndarray, tuple[Any, ...]]]:
    leaves, tree = jax.tree.flatten(PARAMS)
    return list(zip(map(np.asarray, leaves), tree.flatten_up_to(SPEC), strict=True))


def reference_part(x: np.ndarray, layers: tuple[Any, ...], units: dict[str, np.ndarray], device: int) -> np.ndarray:
    index = [np.arange(n) if k is None else units[k][device] for n, k in zip(x.shape, layers, strict=True)]
    return x[np.ix_(*index)]


def reference_whole(x: np.ndarray, layers: tuple[Any, ...], units: dict[str, np.ndarray], parts: Array) -> np.ndarray:
    if all(layer is None for layer in layers):
        return np.mean(parts, axis=0)
    whole = x.copy()
    for device, part in enumerate(parts):
        index = [np.arange(n) if k is None else units[k][device] for n, k in zip(x.shape, layers, strict=True)]
        whole[np.ix_(*index)] = part
    return whole


def a_round(key: Array, scale: Array, change: Callable[[Array, Array], Array]) -> Any:
    units = draw_subnets(key, SIZES, "i")
    subnet = take_subnet(PARAMS, SPEC, units, "i")
    trained = jax.tree.map(lambda x: change(x, scale.astype(x.dtype)), subnet)
    return units, subnet, trained, join_subnets(PARAMS, trained, SPEC, units, "i")


def change(x: Array, scale: Array) -> Array:
    return x * scale + scale


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_round_is_that_of_numpy(devices: int) -> None:
    scales = jnp.arange(2.0, 2.0 + devices)
    run = jax.vmap(lambda key, scale: a_round(key, scale, change), (None, 0), axis_name="i")
    units, subnets, trained, joined = jax.jit(run)(jax.random.key(3), scales)
    units = {layer: np.asarray(rows[0]) for layer, rows in units.items()}
    for layer, size in SIZES.items():
        assert units[layer].shape == (devices, size // devices)
        assert sorted(units[layer].ravel()) == list(range(size))
    for (x, layers), parts, after, whole in zip(
        leaves_and_specs(), *map(jax.tree.leaves, (subnets, trained, joined)), strict=True
    ):
        assert whole.dtype == x.dtype
        for device in range(devices):
            np.testing.assert_array_equal(parts[device], reference_part(x, layers, units, device))
            want = reference_whole(x, layers, units, np.asarray(after))
            if None in layers and set(layers) == {None}:
                np.testing.assert_allclose(whole[device], want, rtol=1e-6)
            else:
                np.testing.assert_array_equal(whole[device], want)


def test_divisions_are_random() -> None:
    """Each unit goes to each device equally often; those of two layers, and of two keys, are independent."""
    draw = lambda key: draw_subnets(key, {"a": 8, "b": 8}, "i")
    over = jax.vmap(lambda keys: lax.map(draw, keys), in_axes=None, axis_name="i", axis_size=2, out_axes=None)
    units = jax.jit(over)(jax.random.split(jax.random.key(0), 400))
    a, b = np.asarray(units["a"]), np.asarray(units["b"])
    assert (a != b).any(axis=(1, 2)).mean() > 0.99
    for drawn in (a, b):
        owners = (drawn[:, 0, :, None] == np.arange(8)).any(axis=1)  # the units of the first device, in each draw
        np.testing.assert_allclose(owners.mean(axis=0), 0.5, atol=0.1)
    together = (a[:, 0, :, None] == 0).any(axis=(1, 2)) & (b[:, 0, :, None] == 0).any(axis=(1, 2))
    np.testing.assert_allclose(together.mean(), 0.25, atol=0.1)


def test_the_key_of_the_first_device_counts() -> None:
    keys = jax.random.split(jax.random.key(1), 3)
    draw = jax.vmap(lambda key: draw_subnets(key, {"h": 12}, "i")["h"], axis_name="i")
    got, other = draw(keys), draw(keys[jnp.array([1, 0, 2])])
    for device in range(3):
        np.testing.assert_array_equal(got[device], draw(keys[jnp.array([0, 0, 0])])[0])
    assert (got != other).any()


def test_what_travels_is_the_parts_alone() -> None:
    """Of weights between two hidden layers a device sends one of N x N parts; all parts go together."""

    def join(subnet: Tree) -> Tree:
        units = {layer: jnp.arange(size, dtype=jnp.int32).reshape(4, -1) for layer, size in SIZES.items()}
        return join_subnets(PARAMS, subnet, SPEC, units, "i")

    parts = [
        reference_part(x, layers, {k: np.arange(n).reshape(4, -1) for k, n in SIZES.items()}, 0)
        for x, layers in leaves_and_specs()
    ]
    subnet = jax.tree.structure(PARAMS).unflatten(list(map(jnp.asarray, parts)))
    text = str(jax.make_jaxpr(join, axis_env=[("i", 4)])(subnet))
    sent = re.findall(r"(\w+)\[(\d+),(\d+)\] = all_gather", text)
    floats = 5 * 8 // 4 + 8 // 4 + 8 * 12 // 16 + 3 * 12 * 8 * 2 // 16 + 8 * 8 // 16 + 12 * 3 // 4
    assert sorted(sent) == [("bf16", "4", str(12 // 4)), ("f32", "4", str(floats))]
    assert re.findall(r"(\w+)\[(\d+)\] = psum", text) == [("f32", "3")]
    assert text.count("= psum") == 1


def loss(p: Tree, x: Array) -> Array:
    h = jnp.tanh(x @ p["w1"] + p["b1"][None])
    return jnp.sum((jnp.tanh(h @ p["w2"]) @ p["w3"] + p["b3"][None] - 1.0) ** 2)


MLP = {
    name: np.asarray(values(shape, seed=20 + i))
    for i, (name, shape) in enumerate({"w1": (5, 4), "b1": (4,), "w2": (4, 8), "w3": (8, 2), "b3": (2,)}.items())
}
MLP_SPEC = {"w1": (None, "h1"), "b1": ("h1",), "w2": ("h1", "h2"), "w3": ("h2", None), "b3": (None,)}


def train(params: Tree, x: Array, key: Array, rounds: int = 2) -> Tree:
    """Two rounds of two steps of gradient descent."""
    for k in jax.random.split(key, rounds):
        units = draw_subnets(k, {"h1": 4, "h2": 8}, "i")
        subnet = take_subnet(params, MLP_SPEC, units, "i")
        for _ in range(2):
            subnet = jax.tree.map(lambda w, g: w - 0.02 * g, subnet, jax.grad(loss)(subnet, x))
        params = join_subnets(params, subnet, MLP_SPEC, units, "i")
    return params


def train_in_numpy(params: Tree, xs: Array, drawn: list[dict[str, np.ndarray]]) -> Tree:
    """The same with whole networks: the weights of foreign units are set to zero, and the parts are put together."""
    params = {name: np.asarray(x, np.float64) for name, x in params.items()}
    for units in drawn:
        after = []
        for device, x in enumerate(xs):
            subnet = {k: reference_part(v, MLP_SPEC[k], units, device) for k, v in params.items()}
            for _ in range(2):
                a = np.tanh(x @ subnet["w1"] + subnet["b1"])
                b = np.tanh(a @ subnet["w2"])
                error = 2 * (b @ subnet["w3"] + subnet["b3"] - 1)
                db = (error @ subnet["w3"].T) * (1 - b**2)
                da = (db @ subnet["w2"].T) * (1 - a**2)
                grads = {"w1": x.T @ da, "b1": da.sum(0), "w2": a.T @ db, "w3": b.T @ error, "b3": error.sum(0)}
                subnet = {k: v - 0.02 * grads[k] for k, v in subnet.items()}
            after.append(subnet)
        params = {k: reference_whole(v, MLP_SPEC[k], units, [s[k] for s in after]) for k, v in params.items()}
    return params


@pytest.mark.parametrize("types", [None, False, True])
def test_training_is_that_of_numpy(types: bool | None) -> None:
    """With JAX's types the gradients of what is not divided stay on their device, too."""
    xs, key = np.asarray(values((4, 7, 5), seed=30)), jax.random.key(5)
    draw = jax.vmap(lambda _, k: draw_subnets(k, {"h1": 4, "h2": 8}, "i"), (0, None), axis_name="i")
    drawn = [{n: np.asarray(u[0]) for n, u in draw(jnp.zeros(4), k).items()} for k in jax.random.split(key, 2)]
    if types is None:
        got = jax.jit(jax.vmap(train, (None, 0, None), axis_name="i", out_axes=None))(MLP, xs, key)
    else:
        mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        step = lambda p, x, key: train(p, x[0], key)
        specs: Any = (P(), P("i"), P())
        run = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=types)
        got = jax.jit(run)(MLP, xs, key)
    want = train_in_numpy(MLP, xs, drawn)
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], 1e-4, 1e-5, err_msg=name)
        assert (x != MLP[name]).any()


def test_two_axes_are_one() -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    axes = ("a", "b")

    def swap(w: Array) -> Array:
        units = draw_subnets(jax.random.key(0), {"h": 8}, axes)
        number = lax.axis_index(axes).astype(jnp.float32)
        b = lax.pcast(jnp.zeros(1), "a", to="varying")  # it varies along one of them
        subnet = take_subnet({"w": w, "b": b}, {"w": ("h",), "b": (None,)}, units, axes)
        subnet = {"w": subnet["w"] + number, "b": subnet["b"] + number}
        joined = join_subnets({"w": w, "b": b}, subnet, {"w": ("h",), "b": (None,)}, units, axes)
        return joined["w"], joined["b"]

    w, b = jax.shard_map(swap, mesh=mesh, in_specs=P(), out_specs=P())(jnp.zeros(8))
    assert sorted(w.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert b.tolist() == [1.5]


W, H = {"w": jnp.ones((6, 3))}, {"h": jnp.arange(6, dtype=jnp.int32).reshape(2, 3)}
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "units that cannot be shared": (
        lambda: draw_subnets(jax.random.key(0), {"h": 7}, "i"),
        "draw_subnets: expected a positive multiple of 2 units, as 'i' has 2 devices, got 7 in the layer 'h'",
    ),
    "another tree": (
        lambda: take_subnet(W, {"v": ("h", None)}, H, "i"),
        "take_subnet: expected spec to be a tree as that of the parameters, .* got {'v': ",
    ),
    "a dimension too few": (
        lambda: take_subnet(W, {"w": ("h",)}, H, "i"),
        r"take_subnet: expected the layers {'h': 6} of \['w'\], got \('h',\) for the shape \(6, 3\)",
    ),
    "an unknown layer": (lambda: take_subnet(W, {"w": ("h", "g")}, H, "i"), r"got \('h', 'g'\) for the shape"),
    "a layer of another size": (lambda: take_subnet(W, {"w": (None, "h")}, H, "i"), r"got \(None, 'h'\) for the shape"),
    "a spec that is no tuple": (lambda: take_subnet(W, {"w": "h"}, H, "i"), "got .h. for the shape"),
    "units of another axis": (
        lambda: take_subnet(W, {"w": ("h", None)}, {"h": H["h"].reshape(3, 2)}, "i"),
        r"expected units with a row for each of 2 devices, got shape \(3, 2\) of the layer 'h'",
    ),
    "a whole network": (
        lambda: join_subnets(W, W, {"w": ("h", None)}, H, "i"),
        r"join_subnets: expected a subnet with float32\[3, 3\] at \['w'\], got float32\[6, 3\]",
    ),
    "another dtype": (
        lambda: join_subnets(W, {"w": jnp.ones((3, 3), jnp.int32)}, {"w": ("h", None)}, H, "i"),
        r"expected a subnet with float32\[3, 3\] at \['w'\], got int32\[3, 3\]",
    ),
    "another subnet": (
        lambda: join_subnets(W, [jnp.ones((3, 3))], {"w": ("h", None)}, H, "i"),
        "join_subnets: expected a subnet with the tree .*'w'.*, got PyTreeDef",
    ),
    "a mean of integers": (
        lambda: join_subnets({"n": jnp.ones(2, jnp.int32)}, {"n": jnp.ones(2, jnp.int32)}, {"n": (None,)}, H, "i"),
        r"expected floating-point numbers at \['n'\], which has no hidden units and so is averaged, got int32",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    call, error = BAD[name]
    with pytest.raises(ValueError, match=error):
        jax.vmap(lambda _: call(), axis_name="i")(jnp.zeros(2))


@pytest.mark.parametrize(
    ("name", "call"),
    {
        "draw_subnets": lambda: draw_subnets(jax.random.key(0), {"h": 6}, "i"),
        "take_subnet": lambda: take_subnet(W, {"w": ("h", None)}, H, "i"),
        "join_subnets": lambda: join_subnets(W, W, {"w": ("h", None)}, H, "i"),
    }.items(),
)
def test_the_axis_must_be_bound(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(NameError, match=f"parallel.{name}: expected a call where the axis 'i' is bound"):
        call()
