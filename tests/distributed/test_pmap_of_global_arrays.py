"""jax.pmap over the devices of all ranks: each rank gives and gets its own rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.distributed.arrays import RANK, SIZE, needs_four, values

Array = Any

XS = values((SIZE, SIZE, 3))
OWN = XS[RANK : RANK + 1]


def test_collectives() -> None:
    ring = [(m, (m + 1) % SIZE) for m in range(SIZE)]

    @partial(jax.pmap, axis_name="i")
    def program(x: Array) -> dict[str, Array]:
        return {
            "psum": lax.psum(x, "i"),
            "pmax": lax.pmax(x, "i"),
            "pmin": lax.pmin(x, "i"),
            "pmean": lax.pmean(x, "i"),
            "all_gather": lax.all_gather(x, "i"),
            "psum_scatter": lax.psum_scatter(x, "i"),
            "all_to_all": lax.all_to_all(x, "i", 0, 0),
            "ppermute": lax.ppermute(x, "i", ring),
            "axis_index": lax.axis_index("i"),
            "axis_size": lax.psum(1, "i"),
        }

    want = {
        "psum": XS.sum(axis=0),
        "pmax": XS.max(axis=0),
        "pmin": XS.min(axis=0),
        "pmean": XS.mean(axis=0),
        "all_gather": XS,
        "psum_scatter": XS.sum(axis=0)[RANK],
        "all_to_all": XS[:, RANK],
        "ppermute": XS[RANK - 1],
        "axis_index": RANK,
        "axis_size": SIZE,
    }
    for name, y in program(OWN).items():
        own = np.asarray(y.addressable_data(0)).reshape(np.shape(want[name]))
        np.testing.assert_allclose(own, want[name], rtol=1e-5, atol=1e-6, err_msg=name)


@needs_four
def test_axis_index_groups() -> None:
    groups = [[0, 3], [2, 1]]  # the places in a group are not in the order of the ranks

    @partial(jax.pmap, axis_name="i")
    def program(x: Array) -> tuple[Array, ...]:
        return (
            lax.psum(x, "i", axis_index_groups=groups),
            lax.pmax(x, "i", axis_index_groups=groups),
            lax.all_gather(x, "i", axis_index_groups=groups),
            lax.psum_scatter(x[:2], "i", axis_index_groups=groups),
            lax.all_to_all(x[:2], "i", 0, 0, axis_index_groups=groups),
        )

    group = next(group for group in groups if RANK in group)
    place = group.index(RANK)
    members = XS[group]
    want = (members.sum(0), members.max(0), members, members.sum(0)[place], members[:, place])
    for y, expected in zip(program(OWN), want, strict=True):
        np.testing.assert_allclose(np.asarray(y.addressable_data(0))[0], expected, rtol=1e-5, atol=1e-6)


def test_each_alone_in_its_group() -> None:
    alone = [[m] for m in range(SIZE)]
    program = jax.pmap(lambda x: (lax.psum(x, "i", axis_index_groups=alone), lax.psum(x, "i")), "i")
    own, total = program(OWN)
    np.testing.assert_array_equal(own.addressable_data(0), OWN)
    np.testing.assert_allclose(total.addressable_data(0)[0], XS.sum(axis=0), rtol=1e-5)


def test_derivatives() -> None:
    weights = values((3, 2))
    row_loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)

    @partial(jax.pmap, axis_name="i", in_axes=(None, 0))
    def step(w: Array, x: Array) -> tuple[Array, Array]:
        loss, slope = jax.value_and_grad(row_loss)(w, x)
        return lax.pmean(loss, "i"), lax.pmean(slope, "i")

    loss, slope = step(weights, OWN)
    want = jax.value_and_grad(lambda w: jnp.mean(jax.vmap(row_loss, (None, 0))(w, XS)))(weights)
    np.testing.assert_allclose(loss.addressable_data(0)[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(slope.addressable_data(0)[0], want[1], rtol=1e-4, atol=1e-6)


def test_derivative_of_the_map() -> None:
    """The derivative goes through the collectives."""
    weights = values((SIZE, SIZE, 3), seed=1)
    own_weights = jnp.asarray(weights[RANK : RANK + 1])
    inside = lambda x, w: jnp.sin(lax.psum(x * w, "i")) * lax.all_gather(x, "i").sum() * w
    through_map = jax.pmap(lambda x, w: jax.grad(lambda x: inside(x, w).sum())(x), "i")
    want = jax.vmap(lambda x, w: jax.grad(lambda x: inside(x, w).sum())(x), axis_name="i")(XS, weights)
    got = through_map(OWN, own_weights)
    np.testing.assert_allclose(got.addressable_data(0)[0], want[RANK], rtol=1e-4, atol=1e-4)


def test_results_are_given_to_the_next_call() -> None:
    step = jax.pmap(lambda x: lax.ppermute(x, "i", [(m, (m + 1) % SIZE) for m in range(SIZE)]) + 1, "i")
    y = step(step(step(OWN)))
    np.testing.assert_allclose(y.addressable_data(0)[0], XS[(RANK - 3) % SIZE] + 3, rtol=1e-6)
