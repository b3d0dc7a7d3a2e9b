"""Tensor parallelism against the whole computation: values and gradients, over each binding of an axis by JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from pycollective.parallel import tensor
from tests.cases import values

Array = Any
Tree = Any
P = jax.P

DEVICES = 4
AXIS = "model"
LENGTH, WIDTH, HEADS, DEPTH, HIDDEN, WORDS = 8, 6, 8, 2, 16, 24

SHAPES = {
    "table": (WORDS, WIDTH),
    "scale": (WIDTH,),
    "qkv": (WIDTH, 3, HEADS, DEPTH),
    "out": (HEADS, DEPTH, WIDTH),
    "up": (WIDTH, HIDDEN),
    "bias": (HIDDEN,),
    "down": (HIDDEN, WIDTH),
    "shift": (WIDTH,),
}
WHOLE = {name: values(shape, seed=i) / 5 for i, (name, shape) in enumerate(SHAPES.items())}
CUTS = {"table": 0, "scale": None, "qkv": 2, "out": 0, "up": 1, "bias": 0, "down": 0, "shift": None}
"""The axis along which a parameter is cut; None: all devices have it."""

TOKENS = np.random.default_rng(0).integers(0, WORDS, (2, LENGTH + 1))


def attend(qkv: Array) -> Array:
    """Attention of each head by itself, from (batch, length, 3, heads, depth)."""
    q, k, v = (qkv[:, :, i] for i in range(3))
    weights = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", q, k), axis=-1)
    return jnp.einsum("bhlm,bmhd->blhd", weights, v)


def norm(x: Array, scale: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True)) * scale[None, None]


def whole_loss(p: Tree, tokens: Array) -> Array:
    """A block of a transformer without axes. It embeds tokens, and predicts the next ones by the same table."""
    h = p["table"][tokens[:, :-1]]
    h = h + jnp.tensordot(attend(jnp.tensordot(norm(h, p["scale"]), p["qkv"], 1)), p["out"], 2)
    h = h + jnp.tanh(h @ p["up"] + p["bias"][None, None]) @ p["down"] + p["shift"][None, None]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(h @ p["table"].T, tokens[:, 1:]))


def cut_loss(p: Tree, tokens: Array, sequence_axis: int | None = None, axis_name: Any = AXIS) -> Array:
    """The same on one device of several along the axis."""
    column = functools.partial(tensor.column_parallel, axis_name=axis_name, sequence_axis=sequence_axis)
    row = functools.partial(tensor.row_parallel, axis_name=axis_name, sequence_axis=sequence_axis)
    if sequence_axis is None:
        scale, shift = p["scale"], p["shift"]
    else:  # each device uses them for its part of the sequence
        scale, shift = (tensor.copy_to(p[name], axis_name) for name in ("scale", "shift"))
    h = tensor.vocabulary_embedding(p["table"], tokens[:, :-1], axis_name, sequence_axis=sequence_axis)
    h = h + row(attend(column(norm(h, scale), p["qkv"])), p["out"])
    h = h + row(jnp.tanh(column(h, p["up"]) + p["bias"][None, None]), p["down"]) + shift[None, None]
    return jnp.mean(tensor.vocabulary_cross_entropy(column(h, p["table"].T), tokens[:, 1:], axis_name))


def stacked(tree: Tree, devices: int, cuts: Tree = CUTS) -> Tree:
    """Returns the parts of all devices along a new first axis."""
    return {
        name: np.stack([x] * devices if cuts[name] is None else np.split(x, devices, cuts[name]))
        for name, x in tree.items()
    }


def specs(cuts: Tree, axis: Any = AXIS) -> Tree:
    return {name: P() if cut is None else P(*[None] * cut, axis) for name, cut in cuts.items()}


def mesh(**axes: int) -> jax.sharding.Mesh:
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def on_axis(way: str, fun: Callable[..., Any], params: Tree, *args: Any, cuts: Tree = CUTS) -> tuple[Any, Tree]:
    """Runs a function of one device's parameters, with such a tree as its second result.

    Returns both results, of each device in turn along a new first axis.
    """
    if way == "types":  # JAX knows that a result is the same on all devices, where its spec names no axis
        one = jax.shard_map(fun, mesh=mesh(model=DEVICES), in_specs=(specs(cuts), P()), out_specs=(P(), specs(cuts)))
        first, second = jax.jit(one)(params, *args)
        return np.stack([first] * DEVICES), stacked(second, DEVICES, cuts)
    parts = stacked(params, DEVICES, cuts)
    in_axes = (0,) + (None,) * len(args)
    if way == "vmap":
        return jax.jit(jax.vmap(fun, in_axes, axis_name=AXIS))(parts, *args)
    if way == "pmap":
        return jax.pmap(fun, AXIS, in_axes=in_axes)(parts, *args)

    def block(parts: Tree, *args: Any) -> Any:
        return jax.tree.map(lambda x: x[None], fun(jax.tree.map(lambda x: x[0], parts), *args))

    return jax.jit(
        jax.shard_map(
            block, mesh=mesh(model=DEVICES), in_specs=(P(AXIS), P()), out_specs=(P(AXIS), P(AXIS)), check_vma=False
        )
    )(parts, *args)


def assert_tree(got: Tree, want: Tree, tolerance: float = 2e-5) -> None:
    assert got.keys() == want.keys()
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], tolerance, tolerance, err_msg=name)


WAYS = ("vmap", "pmap", "no types", "types")


@pytest.mark.parametrize(
    ("way", "sequence_axis"),
    [("vmap", None), ("vmap", 1), ("pmap", 1), ("no types", None), ("types", None), ("types", 1)],
)
def test_a_transformer_and_its_gradients(way: str, sequence_axis: int | None) -> None:
    """Gradients of what all devices have come out whole on each, and those of parts are parts."""
    want_loss, want = jax.jit(jax.value_and_grad(whole_loss))(WHOLE, TOKENS)
    loss, grads = on_axis(
        way, jax.value_and_grad(functools.partial(cut_loss, sequence_axis=sequence_axis)), WHOLE, TOKENS
    )
    np.testing.assert_allclose(loss, [want_loss] * DEVICES, rtol=1e-5)
    assert_tree(grads, stacked(want, DEVICES))


def test_a_gradient_of_the_mapped_function_with_types() -> None:
    """Without JAX's types it must be taken inside."""
    loss = jax.shard_map(
        lambda p, tokens: cut_loss(p, tokens, 1),
        mesh=mesh(model=DEVICES),
        in_specs=(specs(CUTS), P()),
        out_specs=P(),
    )
    assert_tree(jax.jit(jax.grad(loss))(WHOLE, TOKENS), jax.jit(jax.grad(whole_loss))(WHOLE, TOKENS))


@pytest.mark.parametrize(("way", "sequence_axis"), [("vmap", None), ("types", 1)])
def test_forward_mode_and_second_derivatives(way: str, sequence_axis: int | None) -> None:
    """The tangent of the loss, and forward over reverse: a product with the Hessian."""
    direction = {name: values(x.shape, seed=20 + i) for i, (name, x) in enumerate(WHOLE.items())}

    def both(loss: Callable[..., Array]) -> Callable[..., Any]:
        def derivatives(pair: Tree, tokens: Array) -> Any:
            p = {name: pair[name] for name in WHOLE}
            v = {name: pair["v " + name] for name in WHOLE}
            _, tangent = jax.jvp(lambda p: loss(p, tokens), (p,), (v,))
            product = jax.jvp(jax.grad(lambda p: loss(p, tokens)), (p,), (v,))[1]
            return tangent, product | {"v " + name: x for name, x in product.items()}

        return derivatives

    pair = WHOLE | {"v " + name: x for name, x in direction.items()}
    cuts = CUTS | {"v " + name: cut for name, cut in CUTS.items()}
    want_tangent, want = jax.jit(both(whole_loss))(pair, TOKENS)
    tangent, product = on_axis(
        way, both(functools.partial(cut_loss, sequence_axis=sequence_axis)), pair, TOKENS, cuts=cuts
    )
    np.testing.assert_allclose(tangent, [want_tangent] * DEVICES, rtol=1e-4)
    assert_tree(product, stacked(want, DEVICES, cuts), 2e-4)


@pytest.mark.parametrize("types", [False, True])
def test_two_axes_at_once(types: bool) -> None:
    """Devices along "data" have examples of their own."""

    def step(p: Tree, tokens: Array) -> Tree:
        if types:  # the mean counts once
            return jax.grad(lambda p: lax.pmean(cut_loss(p, tokens, 1), "data"))(p)
        return lax.pmean(jax.grad(cut_loss)(p, tokens, 1), "data")

    got = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh(data=2, model=2),
            in_specs=(specs(CUTS), P("data")),
            out_specs=specs(CUTS),
            check_vma=types,
        )
    )(WHOLE, TOKENS)
    assert_tree(got, jax.jit(jax.grad(whole_loss))(WHOLE, TOKENS))


@pytest.mark.parametrize("types", [False, True])
def test_a_tuple_of_axes_is_one_axis(types: bool) -> None:
    names = ("slow", "fast")
    got = jax.jit(
        jax.shard_map(
            jax.grad(lambda p, tokens: cut_loss(p, tokens, 1, names)),
            mesh=mesh(slow=2, fast=2),
            in_specs=(specs(CUTS, names), P()),
            out_specs=specs(CUTS, names),
            check_vma=types,
        )
    )(WHOLE, TOKENS)
    assert_tree(got, jax.jit(jax.grad(whole_loss))(WHOLE, TOKENS))


def collectives(fun: Callable[..., Any], in_specs: Any, out_specs: Any, types: bool, *args: Any) -> dict[str, int]:
    """Counts the collectives in a compiled program on one device."""
    mapped = jax.shard_map(fun, mesh=mesh(model=DEVICES), in_specs=in_specs, out_specs=out_specs, check_vma=types)
    text = jax.jit(mapped).lower(*args).compile().as_text()
    return {name: text.count(f" {name}(") for name in ("all-reduce", "all-gather", "reduce-scatter")}


@pytest.mark.parametrize("types", [False, True])
@pytest.mark.parametrize(
    ("sequence_axis", "counts"),
    [
        (None, {"all-reduce": 2, "all-gather": 0, "reduce-scatter": 0}),
        (1, {"all-reduce": 0, "all-gather": 2, "reduce-scatter": 2}),
    ],
)
def test_collectives_of_a_block(types: bool, sequence_axis: int | None, counts: dict[str, int]) -> None:
    """Two layers and their gradients: one sum forward and one backward, or its two halves each time."""

    def block(up: Array, down: Array, x: Array, ct: Array) -> Any:
        def layers(up: Array, down: Array, x: Array) -> Array:
            y = jnp.tanh(tensor.column_parallel(x, up, AXIS, sequence_axis=sequence_axis))
            return tensor.row_parallel(y, down, AXIS, sequence_axis=sequence_axis)

        y, back = jax.vjp(layers, up, down, x)
        return y, *back(ct * y)  # after the sum, with which XLA could join another one otherwise

    h = P() if sequence_axis is None else P(None, AXIS)
    weights = (P(None, AXIS), P(AXIS))
    x = values((2, LENGTH, WIDTH))
    assert collectives(block, (*weights, h, h), (h, *weights, h), types, WHOLE["up"], WHOLE["down"], x, x) == counts


@pytest.mark.parametrize("types", [False, True])
def test_logits_are_not_gathered(types: bool) -> None:
    """For each position a maximum and two sums travel, and nothing in the backward pass."""

    def grad(logits: Array, targets: Array) -> Array:
        return jax.grad(lambda z: jnp.mean(tensor.vocabulary_cross_entropy(z, targets, AXIS)))(logits)

    logits = values((3, WORDS))
    counts = collectives(grad, (P(None, AXIS), P()), P(None, AXIS), types, logits, np.array([0, 7, 23]))
    assert counts == {"all-reduce": 2, "all-gather": 0, "reduce-scatter": 0}
    text = str(jax.make_jaxpr(grad, axis_env=[(AXIS, DEVICES)])(logits[:, :6], np.array([0, 7, 23])))
    assert "f32[3] = pmax" in text
    assert "f32[2,3] = psum" in text


def cross_entropy(logits: Array, targets: Array) -> Any:
    """The loss of each position, and the gradient of their sum, over the axis of jax.vmap."""

    def one(part: Array) -> Any:
        loss = tensor.vocabulary_cross_entropy(part, targets, AXIS)
        return loss, jax.grad(lambda z: jnp.sum(tensor.vocabulary_cross_entropy(z, targets, AXIS)))(part)

    parts = jnp.stack(jnp.split(logits, DEVICES, axis=-1))
    loss, grads = jax.jit(jax.vmap(one, axis_name=AXIS))(parts)
    np.testing.assert_array_equal(loss, np.stack([loss[0]] * DEVICES))
    return loss[0], jnp.concatenate(grads, axis=-1)


def test_cross_entropy_of_large_logits_and_of_bfloat16() -> None:
    targets = np.array([0, 5, 23])
    large = 1e4 * values((3, WORDS), seed=3)
    large[1, :6] = -np.inf  # a whole part
    targets[1] = 6
    loss, grads = cross_entropy(jnp.asarray(large), targets)
    want = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(large), targets)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(grads, jax.nn.softmax(large) - jax.nn.one_hot(targets, WORDS), rtol=1e-6, atol=1e-6)

    narrow = jnp.asarray(values((3, WORDS), "bfloat16", seed=4))
    loss, grads = cross_entropy(narrow, targets)
    assert (loss.dtype, grads.dtype) == (jnp.float32, jnp.bfloat16)
    want = optax.softmax_cross_entropy_with_integer_labels(narrow.astype(jnp.float32), targets)
    np.testing.assert_allclose(loss, want, rtol=1e-6)


def test_numbers_that_are_no_tokens() -> None:
    """The embedding is zero, and the loss is NaN, at their positions alone."""
    tokens = np.array([-1, 2, WORDS], np.int8)
    loss, _ = cross_entropy(jnp.zeros((3, WORDS)), tokens)
    np.testing.assert_allclose(loss, [np.nan, np.log(WORDS), np.nan], rtol=1e-6)
    table = jnp.ones((DEVICES, WORDS // DEVICES, 2))
    rows = jax.vmap(lambda t: tensor.vocabulary_embedding(t, tokens, AXIS), axis_name=AXIS)(table)
    np.testing.assert_array_equal(rows[0], [[0, 0], [1, 1], [0, 0]])


OPERATORS: dict[str, tuple[Callable[[Array], Array], str, str]] = {
    "copy_to": (lambda x: tensor.copy_to(x, AXIS), "same", "own"),
    "reduce_from": (lambda x: tensor.reduce_from(x, AXIS), "own", "same"),
    "gather_from": (lambda x: tensor.gather_from(x, AXIS, -1), "part", "own"),
    "scatter_to": (lambda x: tensor.scatter_to(x, AXIS, -1), "own", "part"),
    "join_from": (lambda x: tensor.join_from(x, AXIS, -1), "part", "same"),
    "split_to": (lambda x: tensor.split_to(x, AXIS, -1), "same", "part"),
}
"""Each operator, and in which forms it takes and gives values."""


def matrix(x: Array, form: str, to: str) -> Array:
    """An operator on the values of all devices: of the form "own" they are (devices, 3, 8), of the others (3, 8)."""
    if form == "own":
        return x.sum(0)
    return jnp.stack([x] * DEVICES) if to == "own" else x


def of_devices(form: str, x: Array) -> Array:
    """Returns the value of each device."""
    if form == "own":
        return x
    return np.stack([x] * DEVICES if form == "same" else np.split(x, DEVICES, axis=1))


@pytest.mark.parametrize("way", WAYS)
def test_operators(way: str) -> None:
    """Values, tangents and cotangents, against linear maps of all devices' values."""
    inputs, outputs, args, want = {}, {}, {}, {}
    for i, (name, (_, form, to)) in enumerate(OPERATORS.items()):
        x, v, ct = (
            values((DEVICES, 3, 8) if f == "own" else (3, 8), seed=10 * i + k) for k, f in enumerate((form, form, to))
        )
        y, tangent = jax.jvp(lambda x, form=form, to=to: matrix(x, form, to), (x,), (v,))
        back = jax.vjp(lambda x, form=form, to=to: matrix(x, form, to), x)[1](ct)[0]
        for key, f, value in (("x", form, x), ("v", form, v), ("ct", to, ct)):
            args[f"{name} {key}"], inputs[f"{name} {key}"] = value, f
        for key, f, value in (("y", to, y), ("tangent", to, tangent), ("back", form, back)):
            want[f"{name} {key}"], outputs[f"{name} {key}"] = of_devices(f, value), f

    def one(args: Tree) -> Tree:
        results = {}
        for name, (operator, _, _) in OPERATORS.items():
            x, v, ct = (args[f"{name} {key}"] for key in ("x", "v", "ct"))
            results[f"{name} y"], results[f"{name} tangent"] = jax.jvp(operator, (x,), (v,))
            results[f"{name} back"] = jax.vjp(operator, x)[1](ct)[0]
        return results

    if way in ("vmap", "pmap"):
        parts = {key: jnp.asarray(of_devices(inputs[key], x)) for key, x in args.items()}
        got = jax.jit(jax.vmap(one, axis_name=AXIS))(parts) if way == "vmap" else jax.pmap(one, AXIS)(parts)
    else:
        spec = {"same": P(), "own": P(AXIS), "part": P(None, AXIS)}

        def block(args: Tree) -> Tree:
            results = one({key: x[0] if inputs[key] == "own" else x for key, x in args.items()})
            return {key: x[None] if outputs[key] == "own" else x for key, x in results.items()}

        mapped = jax.shard_map(
            block,
            mesh=mesh(model=DEVICES),
            in_specs=({key: spec[f] for key, f in inputs.items()},),
            out_specs={key: spec[f] for key, f in outputs.items()},
            check_vma=way == "types",
        )
        got = {key: of_devices(outputs[key], x) for key, x in jax.jit(mapped)(args).items()}
    assert_tree(got, want, 1e-5)


def on_two(fun: Callable[..., Any], *args: Any) -> Any:
    return jax.vmap(fun, None, axis_name=AXIS, axis_size=2)(*args)


X, UP, DOWN = jnp.ones((5, 4)), jnp.ones((4, 6)), jnp.ones((6, 4))
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "columns": (
        lambda: on_two(lambda: tensor.column_parallel(X, DOWN, AXIS)),
        r"column_parallel: expected x of shape \(..., in\) and w of .* got shapes \(5, 4\) and \(6, 4\)",
    ),
    "rows": (
        lambda: on_two(lambda: tensor.row_parallel(X, jnp.ones((2, 4, 6)), AXIS)),
        r"row_parallel: expected x of shape .* got shapes \(5, 4\) and \(2, 4, 6\)",
    ),
    "a vector": (
        lambda: on_two(lambda: tensor.row_parallel(X, jnp.ones(4), AXIS)),
        r"row_parallel: expected .* got shapes \(5, 4\) and \(4,\)",
    ),
    "contracted axis": (
        lambda: on_two(lambda: tensor.column_parallel(X, UP, AXIS, sequence_axis=1)),
        "column_parallel: expected sequence_axis to be one of the 1 leading axes, from 0, got 1",
    ),
    "axis from the end": (
        lambda: on_two(lambda: tensor.row_parallel(X, UP, AXIS, sequence_axis=-2)),
        "row_parallel: expected sequence_axis to be one of the 1 leading axes, from 0, got -2",
    ),
    "axis of the width": (
        lambda: on_two(lambda: tensor.vocabulary_embedding(X, jnp.zeros(2, jnp.int32), AXIS, sequence_axis=1)),
        "vocabulary_embedding: expected sequence_axis to be one of the 1 leading axes, from 0, got 1",
    ),
    "length": (
        lambda: on_two(lambda: tensor.row_parallel(X, UP, AXIS, sequence_axis=0)),
        r"scatter_to: expected a multiple of 2, the number of devices along 'model', .* axis 0, got shape \(5, 6\)",
    ),
    "length to split": (
        lambda: on_two(lambda: tensor.split_to(X, AXIS, 0)),
        r"split_to: expected a multiple of 2, .* got shape \(5, 4\)",
    ),
    "table": (
        lambda: on_two(lambda: tensor.vocabulary_embedding(X[0], jnp.zeros(2, jnp.int32), AXIS)),
        r"vocabulary_embedding: expected a table of shape \(V / N, width\), got shape \(4,\)",
    ),
    "tokens": (
        lambda: on_two(lambda: tensor.vocabulary_embedding(X, jnp.ones(2), AXIS)),
        "vocabulary_embedding: expected integers, one for each position, got float32",
    ),
    "targets": (
        lambda: on_two(lambda: tensor.vocabulary_cross_entropy(X, jnp.ones(5), AXIS)),
        "vocabulary_cross_entropy: expected integers, one for each position, got float32",
    ),
    "shape of targets": (
        lambda: on_two(lambda: tensor.vocabulary_cross_entropy(X, jnp.zeros(4, jnp.int32), AXIS)),
        r"expected logits of shape \(..., V / N\) and targets of shape \(...\), got shapes \(5, 4\) and \(4,\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shapes_are_refused(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises(ValueError, match=text):
        call()


def test_a_value_that_varies_is_no_copy() -> None:
    """By JAX's types. Its gradient would be that of one device alone."""
    layer = jax.shard_map(
        lambda x, w: tensor.column_parallel(x, w, AXIS),
        mesh=mesh(model=2),
        in_specs=(P(None, AXIS), P()),
        out_specs=P(AXIS),
    )
    with pytest.raises(ValueError, match="copy_to: expected an array that is the same along 'model', got one that var"):
        layer(jnp.ones((5, 8)), UP)


INTS = jnp.zeros(5, jnp.int32)


@pytest.mark.parametrize(
    ("name", "call"),
    [(name, lambda name=name: OPERATORS[name][0](X)) for name in OPERATORS]
    + [
        ("vocabulary_embedding", lambda: tensor.vocabulary_embedding(X, INTS, AXIS)),
        ("vocabulary_cross_entropy", lambda: tensor.vocabulary_cross_entropy(X, INTS, AXIS)),
    ],
)
def test_the_axis_must_be_bound(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(
        NameError, match=f"{name}: expected (a call where the axis 'model' is bound|an axis name .* binds)"
    ):
        call()
