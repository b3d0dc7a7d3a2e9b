"""Steps of training by ``pycollective.parallel``, compiled for GPUs."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import pycollective as pc
from pycollective import parallel
from pycollective.parallel.schedules import Kind
from tests.compiled_for_gpu.checks import check, letters
from tests.compiled_for_gpu.compiler import compiled, on_one_gpu
from tests.spmd.test_parallel_fsdp_on_devices import sum_of_layers
from tests.unit.test_overlap import loss

pytestmark = pytest.mark.usefixtures("promotion_of_optax")

Array = Any
Tree = Any

RANKS = 2
LAYERS = 3
N = 512
W = jax.ShapeDtypeStruct((N, N), jnp.float32)
NBYTES = 4 * N * N
ROWS = jax.ShapeDtypeStruct((8, N), jnp.float32)


def test_zero() -> None:
    """Parameters and slices of the state stay in their buffers, and nothing is copied."""
    optimizer = parallel.zero(optax.adam(1e-3), "i")

    def step(params: Tree, state: Tree, x: Array) -> Tree:
        updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    params = [W] * LAYERS
    slices = jax.eval_shape(jax.vmap(optimizer.init, None, axis_name="i", axis_size=RANKS), params)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), slices)
    function = pc.jit(step, axis_name="i", donate_argnums=(0, 1), **on_one_gpu())
    program = compiled(function, params, state, W)
    check(program, " ".join(["reduce_scatter"] * LAYERS + ["allgather"] * LAYERS))
    text = letters(program.program, N * N // RANKS)
    assert re.fullmatch("[mc]+", text)
    assert text.count("m") == 3 * LAYERS - 1
    assert program.donated == LAYERS * NBYTES + LAYERS * 2 * NBYTES // RANKS + 4  # moments, and the counter


@pytest.mark.parametrize("stacks", [True, False], ids=["scan", "list"])
def test_fsdp(stacks: bool) -> None:
    layer = parallel.gathered(lambda w, h: jnp.tanh(h @ w), W, "i", policy=jax.checkpoint_policies.dots_saveable)

    def step(slices: Tree, h: Array) -> Tree:
        grads = jax.grad(partial(sum_of_layers, layer))(slices, h)
        return jax.tree.map(lambda p, g: p - 0.1 * g, slices, grads)

    length = N * N // RANKS
    slices = (
        jax.ShapeDtypeStruct((LAYERS, length), jnp.float32)
        if stacks
        else [jax.ShapeDtypeStruct((length,), jnp.float32)] * LAYERS
    )
    program = compiled(pc.jit(step, axis_name="i", donate_argnums=0, **on_one_gpu()), slices, ROWS)
    text = letters(program.program, length)
    if stacks:
        check(program, "(allgather) (allgather reduce_scatter)")
        assert text in ("(cm)(cmmc)", "(cm)(cmcm)")  # nobody waits for the gradient in the loop
    else:
        # Backwards each layer is gathered once more, but not the first one, whose input needs no gradient.
        again = (LAYERS - 1) * ["allgather reduce_scatter"]
        check(program, " ".join([*["allgather"] * LAYERS, *again, "reduce_scatter"]))
        assert re.fullmatch("[mc]+", text)
        assert text.count("m") == 3 * LAYERS - 1
    assert program.donated == LAYERS * NBYTES // RANKS


def test_tensor_parallel() -> None:
    """Two sums for each pair of products, forwards and backwards, on one GPU of each rank and on two."""

    def total(params: Tree, x: Array) -> Array:
        for into, back in params:
            x = jnp.tanh(parallel.row_parallel(jnp.tanh(parallel.column_parallel(x, into, "i")), back, "i"))
        return jnp.mean(x**2)

    def weights(devices: int, *on: int) -> Tree:
        shapes = (*on, N, N // devices), (*on, N // devices, N)
        return [[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]] * LAYERS

    step = jax.value_and_grad(total, (0, 1))
    on_one = compiled(pc.jit(step, axis_name="i", **on_one_gpu()), weights(RANKS), ROWS)
    on_two = compiled(pc.pmap(step, "i", in_axes=(0, None)), weights(2 * RANKS, 2), ROWS)
    for program, one_sum in ((on_one, "A"), (on_two, "LA")):
        check(program, " ".join(["allreduce"] * 2 * LAYERS))
        text = letters(program.program, N * N // (2 * RANKS))
        assert text.replace("m", "") == 2 * LAYERS * one_sum
        assert text.count("m") == 3 * 2 * LAYERS


SCHEDULES = {"gpipe": parallel.gpipe, "1f1b": parallel.one_f_one_b, "zero bubble": parallel.zero_bubble}
MESSAGES = {
    Kind.SEND_ACTIVATION: "send",
    Kind.SEND_GRADIENT: "send",
    Kind.RECEIVE_ACTIVATION: "sendrecv",
    Kind.RECEIVE_GRADIENT: "sendrecv",
}
PRODUCTS = [
    {Kind.FORWARD: 1, Kind.BACKWARD: 1, Kind.BACKWARD_INPUTS: 0, Kind.BACKWARD_WEIGHTS: 1},
    {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUTS: 1, Kind.BACKWARD_WEIGHTS: 1},
]
"""On each rank: the first stage computes no gradient of its input."""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline(schedule: str) -> None:
    """Messages and products have the order of the schedule, which differs between the ranks."""
    world = pc.world()
    is_first = world.rank == 0

    def stage(w: Array, x: Array, batch: Array) -> Array:
        h = jnp.tanh((batch if is_first else x) @ w)
        return h if is_first else jnp.mean(h**2)

    planned = SCHEDULES[schedule](RANKS, 3)
    run = parallel.pipeline(stage, planned, ROWS, world)
    program = compiled(pc.jit(run, **on_one_gpu()), W, jax.ShapeDtypeStruct((3, *ROWS.shape), jnp.float32))
    actions = planned.actions[world.rank]
    messages = [MESSAGES[action.kind] for action in actions if action.kind in MESSAGES]
    check(program, " ".join(["sendrecv", *messages, "bcast"]))  # the first one is with nobody
    steps = ["c" if action.kind in MESSAGES else "m" * PRODUCTS[world.rank][action.kind] for action in actions]
    text = letters(program.program, N * N)
    assert text.replace("(", "").replace(")", "") == "c" + "".join(steps) + "c"
