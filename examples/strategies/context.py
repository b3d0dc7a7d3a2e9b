"""Trains a language model with context parallelism: each rank has a part of each sequence."""

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
        y = parallel.ring_attention(q, k, v, "context", causal=True)
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), name="out")(y)
        y = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, name="down")(y)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        places = jax.lax.axis_index("context") * tokens.shape[1] + jnp.arange(tokens.shape[1])
        x = nn.Embed(256, WIDTH, name="embed")(tokens) + nn.Embed(LENGTH, WIDTH, name="place")(places)
        for _ in range(LAYERS):
            x = Block()(x)
        return nn.Dense(256, name="logits")(nn.LayerNorm()(x))


comm = pc.init()
model, optimizer = Model(), optax.adamw(3e-3)


def loss(params, tokens, targets):
    losses = optax.softmax_cross_entropy_with_integer_labels(model.apply(params, tokens), targets)
    return losses.mean()


@functools.partial(pc.jit, axis_name="context", donate_argnums=(0, 1))
def step(params, state, tokens, targets):
    value, grads = jax.lax.pmean(jax.value_and_grad(loss)(params, tokens, targets), "context")
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


text = np.fromfile(sys.argv[1], np.uint8).astype(np.int32)
tokens = np.zeros((BATCH, LENGTH), np.int32)
params = pc.jit(model.init, axis_name="context")(jax.random.key(0), tokens)
state = optimizer.init(params)
draw = np.random.default_rng(0)
for number in range(STEPS):
    starts = draw.integers(len(text) - LENGTH, size=BATCH)
    rows = np.stack([text[start : start + LENGTH + 1] for start in starts])
    tokens, targets = (np.split(x, comm.size, axis=1)[comm.rank] for x in (rows[:, :-1], rows[:, 1:]))
    params, state, value = step(params, state, tokens, targets)
    if comm.rank == 0:
        print(f"{number} {value:.4f}")
