"""A small GPT whose arrays, sequences and layers are cut along named axes.

Along "model" each device has its own attention heads, hidden units and rows of the vocabulary (Megatron-LM,
arXiv:1909.08053); along "context" it has its own part of each sequence, and keys and values travel in a ring. The
functions here see what one device has. The network is a list of parts, "first", "layer 0", ..., "last", so that a
pipeline can be cut between any two of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective import parallel

CONTEXT, HEADS = 64, 4

CUT = {"qkv": 2, "out": 0, "up": 1, "down": 0, "embed": 0, "output": 1}
"""The dimension of a parameter that is cut along "model"; the others are whole on each device."""


def init_params(rng, vocabulary, layers, width):
    """Returns the parameters of each part of the network, whole.

    The vocabulary gets entries that never occur, up to a multiple of the heads, so that devices that can share the
    heads can share it too.
    """

    def normal(*shape, scale):
        return rng.normal(scale=scale, size=shape).astype(np.float32)

    def layer():
        return {
            "norm1": np.ones(width, np.float32),
            "qkv": normal(3, width, HEADS, head, scale=into),
            "out": normal(HEADS, head, width, scale=back),
            "norm2": np.ones(width, np.float32),
            "up": normal(width, hidden, scale=into),
            "down": normal(hidden, width, scale=back),
        }

    head, hidden, entries = width // HEADS, 4 * width, -(-vocabulary // HEADS) * HEADS
    into, back = width**-0.5, (2 * layers * width) ** -0.5  # so the sum of all blocks' results stays near 1
    return {
        "first": {"embed": normal(entries, width, scale=0.05), "position": normal(CONTEXT, width, scale=0.05)},
        **{f"layer {i}": layer() for i in range(layers)},
        "last": {"norm": np.ones(width, np.float32), "output": normal(width, entries, scale=0.05)},
    }


def part_names(layers):
    """Returns the names of the network's parts in their order; a tree of JAX sorts them."""
    return ["first", *(f"layer {i}" for i in range(layers)), "last"]


def first(p, tokens):
    """Maps tokens (rows, own positions) to activations (rows, own positions, width)."""
    here = lax.axis_index("context") * tokens.shape[1]
    position = lax.dynamic_slice_in_dim(p["position"], here, tokens.shape[1])
    return parallel.vocabulary_embedding(p["embed"], tokens, "model") + position[None]


def layer(p, x):
    """Maps activations to activations."""
    y = parallel.copy_to(jax.nn.standardize(x) * p["norm1"], "model")
    q, k, v = jnp.einsum("rtw,cwhd->crthd", y, p["qkv"])
    heads = parallel.ring_attention(q, k, v, "context", causal=True)
    x += parallel.reduce_from(jnp.einsum("rthd,hdw->rtw", heads, p["out"]), "model")
    hidden = jax.nn.gelu(parallel.column_parallel(jax.nn.standardize(x) * p["norm2"], p["up"], "model"))
    return x + parallel.row_parallel(hidden, p["down"], "model")


def logits(p, x):
    """Maps activations to the logits of the next tokens: (rows, own positions, own entries of the vocabulary)."""
    return parallel.column_parallel(jax.nn.standardize(x) * p["norm"], p["output"], "model")


def last(p, x, targets):
    """Returns the mean loss at this device's positions."""
    return jnp.mean(parallel.vocabulary_cross_entropy(logits(p, x), targets, "model"))


def direct(_name, fun):
    """The ``around`` of a network whose parameters lie where they are used."""
    return fun


def forward(names, around=direct):
    """Returns a function of parameters, activations and (tokens, targets) that runs some parts of the network.

    Its result is the loss if "last" is among the parts, else activations. ``around(name, fun)`` may replace each part's
    function of parameters and more.
    """

    def run(params, x, batch):
        tokens, targets = batch
        for name in names:
            if name == "first":
                x = around(name, first)(params[name], tokens)
            elif name == "last":
                x = around(name, last)(params[name], x, targets)
            else:
                x = around(name, layer)(params[name], x)
        return x

    return run


def sample(params, prompt, keys, layers, vocabulary):
    """Draws a token for each key, from what the network expects after the last CONTEXT tokens. Axes have one device."""
    *before, _ = part_names(layers)

    def append(tokens, key):
        x = forward(before)(params, None, (tokens[None], None))
        token = jax.random.categorical(key, logits(params["last"], x)[0, -1, :vocabulary])
        return jnp.append(tokens[1:], token), token

    return lax.scan(append, prompt, keys)[1]
