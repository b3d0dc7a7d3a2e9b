"""numpyro and blackjax: one posterior with its data on all devices, and one chain on each device."""

from __future__ import annotations

from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from numpyro.infer import NUTS
from numpyro.infer.util import log_density

import pycollective as pc
from tests.libraries.programs import SOME, Program, Way, compare, name_of

Array = Any


def potential(x: Array, axis: Any) -> Any:
    """Returns minus the log posterior of a mean, given the data of all devices; its derivative is the same on all."""

    def function(position: Array) -> Array:
        position = pc.psum(position, axis) / pc.psum(1, axis)
        return 0.5 * jnp.sum(position**2) + pc.psum(0.5 * jnp.sum((x - position) ** 2), axis)

    return function


def numpyro_nuts(x: Array, axis: Any) -> Array:
    kernel = NUTS(potential_fn=potential(x, axis), max_tree_depth=3)
    state = kernel.init(jax.random.PRNGKey(0), 4, init_params=jnp.zeros(2), model_args=(), model_kwargs={})
    positions = []
    for _ in range(2):
        state = kernel.sample(state, (), {})
        positions.append(state.z)
    return jnp.stack(positions)


def blackjax_nuts(x: Array, axis: Any) -> Array:
    minus = potential(x, axis)
    sampler = blackjax.nuts(lambda z: -minus(z), step_size=0.1, inverse_mass_matrix=jnp.ones(2), max_num_doublings=3)

    def step(state: Any, key: Array) -> Any:
        state, _ = sampler.step(key, state)
        return state, state.position

    return lax.scan(step, sampler.init(jnp.zeros(2)), jax.random.split(jax.random.key(1), 3))[1]


def numpyro_density(x: Array, axis: Any) -> tuple[Array, Array]:
    """Returns the log density of a model whose likelihood is summed over all devices, and its gradient."""

    def model() -> None:
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        own = dist.Normal(pc.pmean(mean, axis), 1.0).log_prob(x).sum()
        numpyro.factor("data", pc.psum(own, axis))

    def density(mean: Array) -> Array:
        return log_density(model, (), {}, {"mean": mean})[0]

    return jax.value_and_grad(density)(jnp.float32(0.3))


# test_a_chain_on_each_device has numpyro's sampler over the other way's devices.
@pytest.mark.parametrize(
    ("program", "way"),
    [(numpyro_nuts, SOME[1]), *((program, way) for program in (blackjax_nuts, numpyro_density) for way in SOME)],
    ids=name_of,
)
def test_posterior_of_all_data(program: Program, way: Way, world: pc.Communicator) -> None:
    compare(world, way, program, (2,), tolerance=1e-3)


def chain(x: Array, axis: Any) -> tuple[Array, Array]:
    """Runs one chain on each device, with as many steps as it needs. Returns the mean over all devices as well."""
    key = jax.random.fold_in(jax.random.PRNGKey(0), lax.axis_index(axis).astype(jnp.uint32))
    kernel = NUTS(potential_fn=lambda z: jnp.sum((z - x) ** 2), max_tree_depth=3)
    state = kernel.init(key, 4, init_params=jnp.zeros(2), model_args=(), model_kwargs={})
    state = lax.fori_loop(0, 5, lambda _, state: kernel.sample(state, (), {}), state)
    return state.z, lax.pmean(state.z, axis)


def test_a_chain_on_each_device(world: pc.Communicator) -> None:
    compare(world, SOME[0], chain, (2,), tolerance=1e-3)
