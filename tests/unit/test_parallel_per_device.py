"""What all strategies refuse whose devices step by their own gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from pycollective.parallel import delayed, diloco, gossip, local_sgd

Array = Any
P = jax.sharding.PartitionSpec

INNER = optax.sgd(0.1)

pytestmark = pytest.mark.usefixtures("promotion_of_optax")


@pytest.mark.parametrize(
    "optimizer",
    [local_sgd(INNER, 2, "i"), diloco(INNER, None, 2, "i"), delayed(INNER, "i"), gossip(INNER, "i")],
    ids=["local_sgd", "diloco", "delayed", "gossip"],
)
def test_gradients_that_are_summed_already_are_refused(optimizer: Any) -> None:
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))
    def step(w: Array, x: Array) -> Array:
        grads = jax.grad(lambda w: jnp.sum((w - x[0]) ** 2))(w)
        return optimizer.update(grads, optimizer.init(w), w)[0][None]

    with pytest.raises(
        ValueError, match="own examples, got one that JAX has summed over 'i' already, at the only leaf"
    ):
        step(jnp.ones(3), jnp.ones((2, 3)))
