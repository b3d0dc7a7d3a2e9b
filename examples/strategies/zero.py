"""Trains a language model with ZeRO-2: each rank has its rows, and a part of the optimizer's state."""

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
    def __call__(self, tokens):
        places = jnp.arange(tokens.shape[1])
        x = nn.Embed(256, WIDTH, name="embed")(tokens) + nn.Embed(LENGTH, WIDTH, name="place")(places)
        for _ in range(LAYERS):
            x = Block()(x)
        return nn.Dense(256, name="logits")(nn.LayerNorm()(x))


comm = pc.init()
model, optimizer = Model(), parallel.zero(optax.adamw(3e-3), "data")


def loss(params, tokens, targets):
    losses = optax.softmax_cross_entropy_with_integer_labels(model.apply(params, tokens), targets)
    return losses.mean()


@functools.partial(pc.jit, axis_name="data", donate_argnums=(0, 1))
def step(params, state, tokens, targets):
    value, grads = jax.value_and_grad(loss)(params, tokens, targets)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")


text = np.fromfile(sys.argv[1], np.uint8).astype(np.int32)
tokens = np.zeros((BATCH, LENGTH), np.int32)
params = model.init(jax.random.key(0), tokens)
state = pc.jit(optimizer.init, axis_name="data")(params)
draw = np.random.default_rng(0)
for number in range(STEPS):
    starts = draw.integers(len(text) - LENGTH, size=BATCH)
    rows = np.stack([text[start : start + LENGTH + 1] for start in starts])
    rows = np.split(rows, comm.size)[comm.rank]
    params, state, value = step(params, state, rows[:, :-1], rows[:, 1:])
    if comm.rank == 0:
        print(f"{number} {value:.4f}")
