"""optax: line searches with collectives in their loops, and transformations that hold state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import pycollective as pc
from tests.libraries.programs import SOME, Program, Way, compare

Array = Any


def loss_of(x: Array, axis: Any) -> Callable[[Array], Array]:
    """Returns the mean loss over all devices, whose gradient is a mean over all devices as well."""

    def loss(params: Array) -> Array:
        away = pc.pmean(params, axis) - x
        return pc.pmean(jnp.sum(away**2 + 0.1 * away**4), axis)

    return loss


def lbfgs(x: Array, axis: Any) -> tuple[Array, Array]:
    loss = loss_of(x, axis)
    optimiser = optax.lbfgs(memory_size=3)
    params = jnp.zeros_like(x)
    state = optimiser.init(params)
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        value, grad = value_and_grad(params, state=state)
        updates, state = optimiser.update(grad, state, params, value=value, grad=grad, value_fn=loss)
        return (optax.apply_updates(params, updates), state), value

    (params, _), losses = jax.lax.scan(step, (params, state), None, length=4)
    return params, losses


def descend(optimiser: Any, of: Callable[[Any, Array], Array] = lambda state, params: params) -> Program:
    def program(x: Array, axis: Any) -> Array:
        loss = loss_of(x, axis)
        params = jnp.zeros_like(x)
        state = optimiser.init(params)
        for _ in range(4):
            updates, state = optimiser.update(jax.grad(loss)(params), state, params)
            params = optax.apply_updates(params, updates)
        return of(state, params)

    return program


PROGRAMS: dict[str, Program] = {
    "MultiSteps": descend(optax.MultiSteps(optax.adam(0.1), every_k_schedule=2)),
    "schedule_free": descend(
        contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1), contrib.schedule_free_eval_params
    ),
    "sam": descend(contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)))),
    "prodigy": descend(contrib.prodigy()),
}


@pytest.mark.parametrize("way", SOME, ids=lambda way: way.id)
@pytest.mark.parametrize("name", PROGRAMS)
def test_optimiser(name: str, way: Way, world: pc.Communicator) -> None:
    compare(world, way, PROGRAMS[name])


def test_lbfgs(way: Way, world: pc.Communicator) -> None:
    compare(world, way, lbfgs)
