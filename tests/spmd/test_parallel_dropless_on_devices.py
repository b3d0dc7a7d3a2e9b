"""Experts that drop no token, along ranks and devices, against all experts on all tokens in one process."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from pycollective.parallel.dropless import dropless_experts
from pycollective.parallel.tensor import copy_to, reduce_from
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.spmd.cases import own

Array = Any
P = jax.P

EXPERTS, TOKENS, WIDTH, HIDDEN = 8, 6, 3, 4  # experts of all devices, tokens of each


def two_layers(params: tuple[Array, Array], rows: Array, sizes: Array, *, model: str | None = None) -> Array:
    """The experts of one device, each with two matrices. Along ``model`` their columns and rows are cut."""
    up, down = params
    h = jnp.tanh(lax.ragged_dot(rows if model is None else copy_to(rows, model), up, sizes))
    y = lax.ragged_dot(h, down, sizes)
    return y if model is None else reduce_from(y, model)


def layer(params: tuple[Array, Array], x: Array, logits: Array, k: int, model: str | None = None) -> Any:
    return dropless_experts(functools.partial(two_layers, params, model=model), x, logits, "i", k=k)


def arrays(devices: int) -> tuple[tuple[Array, Array], Array, Array, Array]:
    """Returns parameters of all experts, and tokens, logits and weights of the result of each device."""
    shapes = [(EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)]
    shapes += [(devices, TOKENS, WIDTH), (devices, TOKENS, EXPERTS), (devices, TOKENS, WIDTH)]
    up, down, x, logits, weights = (np.asarray(values(shape, seed=seed)) for seed, shape in enumerate(shapes))
    return (up, down), x, logits, weights


def one_sided(logits: Array) -> Array:
    """Returns logits by which all tokens choose the experts of one device: each of its rows is in use."""
    return logits * 0.1 + 9 * (np.arange(EXPERTS) >= EXPERTS - 2)


def dense(params: tuple[Array, Array], x: Array, logits: Array, weights: Array, k: int) -> Any:
    """Returns the sums over devices' losses, their results and gradients, from all experts on all tokens."""

    def loss(params: tuple[Array, Array], x: Array, logits: Array) -> Any:
        p = jax.nn.softmax(logits)
        order = jnp.argsort(jnp.argsort(-p, axis=-1, stable=True), axis=-1)
        gates = jnp.where(order < k, p, 0.0)
        gates = gates if k == 1 else gates / jnp.sum(gates, axis=-1, keepdims=True)
        h = jnp.tanh(jnp.einsum("dtw,ewh->dteh", x, params[0]))
        y = jnp.einsum("dte,dteh,ehw->dtw", gates, h, params[1])
        shares = jnp.mean(jax.nn.one_hot(jnp.argmax(p, axis=-1), EXPERTS), axis=(0, 1))
        balance = EXPERTS * jnp.sum(shares * jnp.mean(p, axis=(0, 1)))
        return jnp.sum(jnp.sin(y) * weights) + 3 * balance, (y, balance)

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(params, x, logits)


def assert_close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_in_pmap(world: pc.Communicator, few: int) -> None:
    """On several devices of a rank, too. One program serves all counts."""
    k = 3
    devices = world.size * few
    params, x, logits, weights = arrays(devices)

    def gradients(params: Any, x: Array, logits: Array, weights: Array) -> Any:
        def loss(*args: Any) -> Any:
            y, statistics = layer(*args, k)
            return jnp.sum(jnp.sin(y) * weights) + 3 * statistics.balance_loss / devices, (y, statistics)

        return jax.grad(loss, (0, 1, 2), has_aux=True)(params, x, logits)

    run = pc.pmap(gradients, "i", devices=devices_of_this_rank()[:few])
    blocks = jax.tree.map(lambda w: w.reshape(devices, -1, *w.shape[1:]), params)
    for each in (logits, one_sided(logits).astype(np.float32)):
        of_device = jax.tree.map(lambda a: own(world, few, a), (blocks, x, each, weights))
        got, (y, statistics) = run(*of_device)
        want, (y_of_all, balance) = dense(params, x, each, weights, k)
        want_blocks = jax.tree.map(lambda w: w.reshape(devices, -1, *w.shape[1:]), want[0])
        assert_close((got, y), jax.tree.map(lambda a: own(world, few, a), ((want_blocks, *want[1:]), y_of_all)))
        np.testing.assert_allclose(statistics.balance_loss, np.full(few, balance), rtol=1e-5)
        assert not np.asarray(statistics.dropped).any()


@pytest.mark.parametrize("names", [("i", "model"), ("model", "i")])
def test_with_a_tensor_axis_and_types(world: pc.Communicator, few: int, names: tuple[str, str]) -> None:
    """Each expert's matrices are cut along an axis of their own."""
    shape = world.size, few
    mesh = pc.make_mesh(shape, names, devices=devices_of_this_rank()[:few])
    devices, parts = (dict(zip(names, shape, strict=True))[name] for name in ("i", "model"))
    if EXPERTS % devices or HIDDEN % parts:
        pytest.skip(f"LOUD: {devices} devices cannot share {EXPERTS} experts, or {parts} their columns")
    params, x, logits, weights = arrays(devices)

    def step(params: Any, x: Array, logits: Array, weights: Array) -> Any:
        def loss(params: Any, x: Array, logits: Array) -> Any:
            y, statistics = layer(params, x[0], logits[0], 2, "model")
            return lax.psum(jnp.sum(jnp.sin(y) * weights[0]), "i") + 3 * statistics.balance_loss, y[None]

        return jax.grad(loss, (0, 1, 2), has_aux=True)(params, x, logits)

    of_params = (P("i", None, "model"), P("i", "model"))
    tokens = P("i")
    run = pc.shard_map(
        step,
        mesh=mesh,
        in_specs=(of_params, tokens, tokens, tokens),
        out_specs=((of_params, tokens, tokens), tokens),
    )

    def block(spec: jax.P, a: Array) -> Array:
        """Returns this rank's block of a global array."""
        for axis, name in enumerate(spec):
            if name == names[0]:
                a = np.split(a, world.size, axis)[world.rank]
        return np.asarray(a)

    def blocks(tree: Any, specs: Any) -> Any:
        return jax.tree.map(lambda spec, a: block(spec, a), specs, tree, is_leaf=lambda x: isinstance(x, jax.P))

    got = run(*blocks((params, x, logits, weights), (of_params, tokens, tokens, tokens)))
    want, (y, _) = dense(params, x, logits, weights, 2)
    assert_close(got, blocks((want, y), ((of_params, tokens, tokens), tokens)))


def test_a_layer_is_four_calls(world: pc.Communicator) -> None:
    """A sum of all statistics, a gather of counts, and two exchanges of tokens."""
    if world.size == 1:
        pytest.skip("LOUD: needs two ranks: along an axis of one device nothing is called")
    params, x, logits, _ = arrays(world.size)
    params = jax.tree.map(lambda w: w[: EXPERTS // world.size], params)
    text = pc.jit(functools.partial(layer, k=2), axis_name="i").lower(params, x[0], logits[0]).as_text()
    calls = re.findall(r"custom_call @pycollective_(?!async_results)(?:device_|async_)?(\w+)\(", text)
    assert sorted(calls) == ["allgather", "allreduce", "ragged_alltoall", "ragged_alltoall"]
