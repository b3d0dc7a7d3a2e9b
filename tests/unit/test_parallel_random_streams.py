"""Random streams along an axis, over the axes of jax.vmap and jax.shard_map."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pycollective.parallel.random_streams import random_streams
from pycollective.parallel.tensor import column_parallel, row_parallel
from tests.cases import values

Array = Any
P = jax.P


def test_streams_are_alike_or_differ_as_their_axes_say() -> None:
    """Of 2 x 3 devices; the key of the second axis comes from the own key of the first."""

    def bits(_: Array) -> Array:
        rows = random_streams(jax.random.key(5), "a")
        columns = random_streams(rows.own, "b")
        both = random_streams(jax.random.key(6), ("a", "b"))
        return jnp.stack([jax.random.bits(key) for key in (rows.same, rows.own, *columns, *both)])

    found = np.asarray(jax.vmap(jax.vmap(bits, axis_name="b"), axis_name="a")(jnp.zeros((2, 3))))
    numbers = [len(set(found[..., n].ravel().tolist())) for n in range(6)]
    assert numbers == [1, 2, 2, 6, 1, 6]
    np.testing.assert_array_equal(found[:, 0, 1:3], found[:, 2, 1:3])  # the same along "b"
    assert len(set(found.ravel().tolist())) == sum(numbers)  # no stream is another one's


@pytest.mark.parametrize("check_vma", [True, False])
def test_dropout_in_a_block_of_two_layers(check_vma: bool) -> None:
    """The hidden activations are cut, the result is not. The backward pass draws the same masks again."""
    x, up, down = (jnp.asarray(values(shape, seed=n)) for n, shape in enumerate([(5, 3), (3, 8), (8, 3)]))
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def dropout(key: Array, x: Array) -> Array:
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, jnp.zeros_like(x))

    def step(key: Array, x: Array, up: Array, down: Array) -> Any:
        streams = random_streams(key, "model")

        @jax.checkpoint
        def loss(up: Array, down: Array) -> Array:
            h = dropout(streams.own, jnp.tanh(column_parallel(x, up, "model")))
            return jnp.sum(jnp.sin(dropout(streams.same, row_parallel(h, down, "model"))))

        return jax.value_and_grad(loss, (0, 1))(up, down)

    specs = (P(None, "model"), P("model"))
    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), *specs), out_specs=(P(), specs), check_vma=check_vma)
    key = jax.random.key(2)
    got = jax.jit(run)(key, x, up, down)

    same, base = jax.random.split(key)
    masks = [jax.random.bernoulli(jax.random.fold_in(base, r), 0.5, (5, 2)) for r in range(4)]

    def whole(up: Array, down: Array) -> Array:
        h = 2 * jnp.tanh(x @ up) * jnp.concatenate(masks, axis=1).astype(x.dtype)
        return jnp.sum(jnp.sin(dropout(same, h @ down)))

    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.value_and_grad(whole, (0, 1))(up, down)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_bad_keys() -> None:
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(
        lambda key: jax.random.bits(random_streams(key[0], "model").own)[None],
        mesh=mesh,
        in_specs=P("model"),
        out_specs=P("model"),
    )
    with pytest.raises(ValueError, match="parallel.random_streams: expected a key that is the same on all devices"):
        run(jax.random.split(jax.random.key(0)))
    with pytest.raises(NameError, match="parallel.random_streams: expected a call where the axis 'model' is bound"):
        random_streams(jax.random.key(0), "model")
