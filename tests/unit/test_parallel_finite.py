"""Updates that one device's NaN skips on all devices, and the scale of a loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from pycollective.parallel import apply_if_finite, scaled_loss, zero

pytestmark = pytest.mark.usefixtures("promotion_of_optax")

Array = Any
Tree = Any
P = jax.P

PARAMS = {"w": jnp.arange(5.0), "s": jnp.float32(2)}
# For each of two devices and each step. Device 1 has a NaN in the second step, and device 0 an Inf in two.
XS = jnp.array([[1.0, 2.0, 1.0, jnp.inf, jnp.inf, 3.0], [3.0, jnp.nan, 1.0, 1.0, 1.0, 5.0]])


def train(optimizer: Any, params: Tree, xs: Array, *, average: bool) -> tuple[Tree, Any]:
    state = optimizer.init(params)
    for x in xs:
        grads = jax.tree.map(lambda w, x=x: jnp.cos(w) * x, params)
        updates, state = optimizer.update(lax.pmean(grads, "i") if average else grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


WAYS = {
    "around": lambda most: apply_if_finite(zero(optax.adam(0.1), "i"), most, "i"),
    "inside": lambda most: zero(apply_if_finite(optax.adam(0.1), most, "i"), "i"),
}


@pytest.mark.parametrize("most", [5, 1])
@pytest.mark.parametrize("way", WAYS)
def test_all_devices_skip_what_optax_would(way: str, most: int) -> None:
    """With at most one error in a row, the second Inf in a row is let through."""
    got, state = jax.vmap(lambda x: train(WAYS[way](most), PARAMS, x, average=False), axis_name="i")(XS)
    of_optax = optax.apply_if_finite(optax.adam(0.1), most)
    want, of_one = jax.vmap(lambda x: train(of_optax, PARAMS, x, average=True), axis_name="i")(XS)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    for name in ("notfinite_count", "last_finite", "total_notfinite"):
        np.testing.assert_array_equal(getattr(state, name), getattr(of_one, name))


def test_the_types_of_a_mesh() -> None:
    """What zero gives is the same on all devices, by JAX's types, and stays so."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    optimizer = scaled_loss(apply_if_finite(zero(optax.adam(0.1), "i"), 5, "i"), "i", initial=4.0)

    def step(p: Tree, x: Array) -> Tree:
        state = optimizer.init(p)
        grads = jax.tree.map(lambda w: w * x[0, 0] * state.scale, lax.pcast(p, "i", to="varying"))
        return optax.apply_updates(p, optimizer.update(grads, state, p)[0])

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("i")), out_specs=P()))
    inner = optax.adam(0.1)
    want = optax.apply_updates(PARAMS, inner.update(jax.tree.map(lambda w: 2 * w, PARAMS), inner.init(PARAMS))[0])
    np.testing.assert_allclose(mapped(PARAMS, XS)["w"], want["w"], rtol=1e-5)
    np.testing.assert_array_equal(mapped(PARAMS, XS[:, 1:])["w"], PARAMS["w"])


def test_the_scale_of_a_loss() -> None:
    """It is halved on all devices by one device's Inf, and doubled after so many steps."""
    optimizer = scaled_loss(optax.sgd(1.0), "i", initial=1024.0, every=2)

    def run(xs: Array) -> Any:
        params = jnp.float16(0)
        state, scales = optimizer.init(params), []
        for x in xs:
            scale = state.scale.astype(jnp.float16)
            grads = jax.grad(lambda w, x=x, scale=scale: scale * x * w)(params)
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            scales.append(state.scale)
        return params, jnp.stack(scales)

    xs = jnp.array([[1.0, 1.0, 40.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]], jnp.float16)
    params, scales = jax.vmap(run, axis_name="i")(xs)  # 40 * 2048 is more than float16 has
    np.testing.assert_array_equal(scales, [[1024, 2048, 1024, 1024, 2048]] * 2)
    np.testing.assert_array_equal(params, [-4, -4])
    with jax.numpy_dtype_promotion("strict"):
        for dtype in (jnp.float16, jnp.bfloat16):
            updates = jax.vmap(lambda g: optimizer.update(g, optimizer.init(g))[0], axis_name="i")(jnp.ones(2, dtype))
            np.testing.assert_array_equal(updates, np.full(2, -1 / 1024, np.float32))


def test_bad_calls() -> None:
    with pytest.raises(TypeError, match="apply_if_finite: expected max_consecutive_errors to be an int"):
        apply_if_finite(optax.sgd(1.0), 1.5, "i")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scaled_loss: expected every to be at least 1, got every=0"):
        scaled_loss(optax.sgd(1.0), "i", every=0)
    for optimizer in (apply_if_finite(optax.sgd(1.0), 1, "i"), scaled_loss(optax.sgd(1.0), "i")):
        with pytest.raises(NameError, match="expected a call where the axis 'i' is bound"):
            optimizer.init(PARAMS)
