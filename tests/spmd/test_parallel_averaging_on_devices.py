"""Strategies that communicate less often or later, over ranks and devices, against JAX's axes; and what they send."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import pycollective as pc
from pycollective.parallel.overlapped_averaging import delayed, gossip
from pycollective.parallel.periodic_averaging import diloco, local_sgd
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.spmd.cases import assert_close, compare, own, stacked

pytestmark = pytest.mark.usefixtures("promotion_of_optax")

Array = Any
Tree = Any
P = jax.P

INNER = optax.sgd(0.1, momentum=0.9)
OPTIMIZERS: dict[str, Any] = {
    "local_sgd": local_sgd(INNER, 2, "i"),
    "diloco": diloco(INNER, None, 2, "i"),
    "streaming": diloco(optax.adam(1e-2), None, 3, "i", fragments=2, wire_dtype=jnp.bfloat16),
    "delayed": delayed(optax.adam(1e-2), "i"),
    "gossip": gossip(INNER, "i"),
}


def params() -> Tree:
    return {"w": np.asarray(values((3, 2), seed=1)), "b": np.asarray(values((2,), seed=2)), "s": np.float32(2)}


def trained(optimizer: Any, steps: int = 4) -> Callable[[Tree, Array], Tree]:
    """Returns what makes some steps, on one of the devices along "i", and returns the parameters after each."""

    def loss(p: Tree, x: Array) -> Array:
        return jnp.mean(jnp.tanh(x @ p["w"] + p["b"][None]) ** 2) * p["s"]

    def run(p: Tree, x: Array) -> Tree:
        def step(carry: Any, _: None) -> Any:
            p, state = carry
            updates, state = optimizer.update(jax.grad(loss)(p, x), state, p)
            p = optax.apply_updates(p, updates)
            return (p, state), p

        p = jax.tree.map(jnp.asarray, p)
        return lax.scan(step, (p, optimizer.init(p)), length=steps)[1]

    return run


def test_in_pmap(world: pc.Communicator, few: int) -> None:
    table = {name: trained(optimizer) for name, optimizer in OPTIMIZERS.items()}
    compare(world, few, table, params(), stacked(world, few), in_axes=(None, 0), tolerance=1e-4)


@pytest.mark.parametrize("types", [True, False])
def test_in_shard_map(world: pc.Communicator, few: int, types: bool) -> None:
    mesh = pc.make_mesh((world.size * few,), ("i",), devices=devices_of_this_rank()[:few])
    optimizers = {name: OPTIMIZERS[name] for name in ("streaming", "gossip")}

    def run(p: Tree, x: Array) -> Tree:
        p = lax.pcast(p, "i", to="varying") if types else p
        return {name: jax.tree.map(lambda y: y[None], trained(o)(p, x[0])) for name, o in optimizers.items()}

    xs = stacked(world, few)
    mapped = pc.shard_map(run, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"), check_vma=types)
    oracle = {name: jax.vmap(trained(o), (None, 0), axis_name="i")(params(), xs) for name, o in optimizers.items()}
    assert_close(world, few, mapped(params(), own(world, few, xs)), oracle, 1e-4)


def last_call() -> int:
    """Returns the number of the last call of this process so far."""
    return max((entry["record_id"] for entry in pc.recorder.dump()["entries"]), default=-1)


def calls_after(number: int) -> Counter[tuple[str, int]]:
    """Returns the operations of programs after the call of this number, with their bytes."""
    new = [entry for entry in pc.recorder.dump()["entries"] if entry["record_id"] > number]
    names = ((re.sub(r"\w+:", "", entry["profiling_name"]), entry["nbytes"]) for entry in new)
    return Counter(call for call in names if call[0] in ("allreduce", "alltoall", "allgather", "ppermute"))


def steps_in_jit(optimizer: Any, x: Array, steps: int) -> tuple[Tree, list[Counter[tuple[str, int]]]]:
    """Returns the parameters after each step of one program a step, and the calls of each: operation and bytes."""
    start = params()
    state = pc.jit(optimizer.init, axis_name="i")(start)

    @pc.jit(axis_name="i")
    def step(p: Tree, state: Any, x: Array) -> Any:
        grads = jax.tree.map(lambda w: w * jnp.mean(x), p)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    path, calls = [], []
    p = jax.tree.map(jnp.asarray, start)
    for _ in range(steps):
        before = last_call()
        p, state = jax.block_until_ready(step(p, state, x))
        path.append(p)
        calls.append(calls_after(before))
    return jax.tree.map(lambda *xs: jnp.stack(xs), *path), calls


P_BYTES = 4 * (6 + 2 + 1)


def test_what_is_sent(world: pc.Communicator) -> None:
    """The recorder has one call in a step in which the devices meet, and none in other steps."""
    if world.size == 1:
        pytest.skip("LOUD: needs two ranks: along an axis of one device nothing is called")
    half = diloco(INNER, None, 2, "i", wire_dtype=jnp.bfloat16)
    streaming = diloco(INNER, None, 4, "i", fragments=2)
    padded = 2 * sum(-(-size // world.size) * world.size for size in (6, 2, 1))
    once = Counter({("allreduce", P_BYTES): 1})
    want = {
        "local_sgd": (OPTIMIZERS["local_sgd"], [Counter(), once] * 2),
        "diloco": (OPTIMIZERS["diloco"], [Counter(), once] * 2),
        # The slices of a scalar have an element on each rank.
        "half": (half, [Counter(), Counter({("alltoall", padded): 1, ("allgather", padded): 1})] * 2),
        "streaming": (
            streaming,
            [Counter(), Counter({("allreduce", 12): 1}), Counter(), Counter({("allreduce", 24): 1})],
        ),
        "delayed": (OPTIMIZERS["delayed"], [once] * 4),
        "gossip": (OPTIMIZERS["gossip"], [Counter({("ppermute", P_BYTES): 1})] * 4),
    }
    for name, (optimizer, calls) in want.items():
        _, got = steps_in_jit(optimizer, np.float32(1 + world.rank) * jnp.ones((8, 3)), 4)
        assert got == calls, name
