"""Trains a language model with pipeline parallelism: each rank has a part of the layers."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import pycollective as pc
from pycollective import parallel

WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS = 64, 4, 2, 64, 8, 10
MICROBATCHES = 4
comm = pc.init()
IS_FIRST, IS_LAST = comm.rank == 0, comm.rank == comm.size - 1


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        qkv = nn.DenseGeneral((3, HEADS, WIDTH // HEADS), name="qkv")(nn.LayerNorm()(x))
        q, k, v = jnp.moveaxis(qkv, -3, 0)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), name="out")(y)
        y = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, name="down")(y)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, tokens):
        if IS_FIRST:
            places = jnp.arange(tokens.shape[1])
            x = nn.Embed(256, WIDTH, name="embed")(tokens) + nn.Embed(LENGTH, WIDTH, name="place")(places)
        for layer in np.array_split(range(LAYERS), comm.size)[comm.rank]:
            x = Block(name=f"Block_{layer}")(x)
        return nn.Dense(256, name="logits")(nn.LayerNorm()(x)) if IS_LAST else x


model, optimizer = Model(), optax.adamw(3e-3)


def stage(params, x, microbatch):
    tokens, targets = microbatch
    x = model.apply(params, x, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(x, targets).mean() if IS_LAST else x


between = jax.ShapeDtypeStruct((BATCH // MICROBATCHES, LENGTH, WIDTH), jnp.float32)
loss_and_grads = parallel.pipeline(stage, parallel.one_f_one_b(comm.size, MICROBATCHES), between, comm)


@functools.partial(pc.jit, donate_argnums=(0, 1))
def step(params, state, tokens, targets):
    value, grads = loss_and_grads(params, (tokens, targets))
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


text = np.fromfile(sys.argv[1], np.uint8).astype(np.int32)
tokens = np.zeros((BATCH, LENGTH), np.int32)
params = model.init(jax.random.key(0), jnp.zeros((BATCH, LENGTH, WIDTH)), tokens)
state = optimizer.init(params)
draw = np.random.default_rng(0)
for number in range(STEPS):
    starts = draw.integers(len(text) - LENGTH, size=BATCH)
    rows = np.stack([text[start : start + LENGTH + 1] for start in starts])
    rows = rows.reshape(MICROBATCHES, BATCH // MICROBATCHES, LENGTH + 1)
    params, state, value = step(params, state, rows[..., :-1], rows[..., 1:])
    if comm.rank == 0:
        print(f"{number} {value:.4f}")
