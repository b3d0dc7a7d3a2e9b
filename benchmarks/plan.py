"""How far predictions are off: all plans for four steps of training, predicted and measured, on the ranks of a job.

Where plans take nearly the same, no prediction can say which is the faster one. ``--repeat`` shows what could be
reached: how well the order of one measurement agrees with that of another one.

``pycollective profile -o cluster.json`` comes first, on the same ranks:

    mpirun -n 2 pycollective profile -o cluster.json
    mpirun -n 2 python benchmarks/plan.py --profile cluster.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pycollective as pc  # isort: skip (XLA calls MPI through it if it comes before JAX)
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.planning import measure

Array = Any
Tree = Any


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def descent(loss: Callable[..., Array]) -> Callable[..., Any]:
    """Gradient descent with momentum."""

    def step(state: Tree, *batch: Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], *batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 1e-3 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, value

    return step


def wide_mlp() -> tuple[Callable[..., Any], list[Any]]:
    """Layers of 2048 units, and a batch of 16: much to send where gradients are summed."""

    def loss(params: list[Array], x: Array, y: Array) -> Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    params = [struct(2048, 2048) for _ in range(4)]
    return descent(loss), [{"params": params, "momentum": params}, struct(16, 2048), struct(16, 2048)]


def convolve(x: Array, w: Array, stride: int = 1) -> Array:
    names = ("NHWC", "HWIO", "NHWC")
    return jax.nn.relu(lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=names))


def convolutions() -> tuple[Callable[..., Any], list[Any]]:
    """Few parameters and large activations: much to send where anything but the batch is cut."""

    def loss(params: Tree, x: Array, y: Array) -> Array:
        for w in params["convolutions"]:
            x = convolve(x, w)
        return jnp.mean((x.mean(axis=(1, 2)) @ params["out"] - y) ** 2)

    widths = (8, 32, 64, 64)
    kernels = [struct(3, 3, a, b) for a, b in itertools.pairwise(widths)]
    params = {"convolutions": kernels, "out": struct(64, 16)}
    return descent(loss), [{"params": params, "momentum": params}, struct(16, 32, 32, 8), struct(16, 16)]


def alexnet() -> tuple[Callable[..., Any], list[Any]]:
    """Convolutions whose batch is worth cutting, and then a layer of 1024 units whose parameters are."""

    def loss(params: Tree, x: Array, y: Array) -> Array:
        for w, stride in zip(params["convolutions"], (1, 2, 2), strict=True):
            x = convolve(x, w, stride)
        wide = jax.nn.relu(x.reshape(x.shape[0], -1) @ params["wide"])
        return jnp.mean((wide @ params["out"] - y) ** 2)

    kernels = [struct(3, 3, a, b) for a, b in itertools.pairwise((8, 32, 64, 64))]
    params = {"convolutions": kernels, "wide": struct(8 * 8 * 64, 1024), "out": struct(1024, 16)}
    return descent(loss), [{"params": params, "momentum": params}, struct(16, 32, 32, 8), struct(16, 16)]


def gpt() -> tuple[Callable[..., Any], list[Any]]:
    """Two blocks of attention and a wide layer, and the logits of a vocabulary."""
    loss, params, tokens = decoder(layers=2, batch=8)
    return descent(loss), [{"params": params, "momentum": params}, tokens]


def decoder(layers: int, batch: int) -> tuple[Callable[..., Array], Tree, Any]:
    """The loss of a GPT, its parameters and its tokens."""
    width, heads, vocabulary, length = 256, 8, 2048, 64

    def norm(x: Array) -> Array:
        return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)

    def loss(params: Tree, tokens: Array) -> Array:
        h = params["table"][tokens[:, :-1]]
        for p in params["layers"]:
            q, k, v = jnp.split((norm(h) @ p["qkv"]).reshape(batch, length, heads, -1), 3, axis=-1)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
            mask = jnp.tril(jnp.ones((length, length), bool))
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
            h += jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape) @ p["out"]
            h += jax.nn.gelu(norm(h) @ p["up"]) @ p["down"]
        logits = jax.nn.log_softmax(norm(h) @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))

    layer = {
        "qkv": struct(width, 3 * width),
        "out": struct(width, width),
        "up": struct(width, 4 * width),
        "down": struct(4 * width, width),
    }
    params = {"table": struct(vocabulary, width), "layers": [layer] * layers}
    return loss, params, struct(batch, length + 1, dtype=jnp.int32)


STEPS = {"mlp": wide_mlp, "conv": convolutions, "alexnet": alexnet, "gpt": gpt}


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def in_order(predicted: list[float], measured: list[float], apart: float = 1.05) -> float:
    """The share of pairs in the right order, of those whose measured times differ by more than 5 %."""
    pairs = zip(predicted, measured, strict=True)
    told = [(p < q) == (m < n) for (p, m), (q, n) in itertools.combinations(pairs, 2) if max(m, n) > apart * min(m, n)]
    return sum(told) / max(len(told), 1)


def agreement(predicted: list[float], took: list[float]) -> list[str]:
    """How predictions agree with what was measured, in words. The first one is the chosen one."""
    errors = [abs(p / m - 1) for p, m in zip(predicted, took, strict=True)]
    return [
        f"median error {statistics.median(errors):.0%}",
        f"rank correlation {rank_correlation(predicted, took):.2f}",
        f"pairs in order {in_order(predicted, took):.0%}",
        f"chosen over best {took[0] / min(took):.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--steps", default=",".join(STEPS), help="some of mlp,conv,alexnet,gpt")
    parser.add_argument("--compilations", type=int, default=24)
    parser.add_argument("--calls", type=int, default=15, help="timed steps of each plan")
    parser.add_argument(
        "--repeat", action="store_true", help="measure twice, to say how well the machine repeats itself"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    comm = pc.distributed.initialize()
    rows = []
    for name in options.steps.split(","):
        step, args = STEPS[name]()
        ranking = pc.plan(step, *args, profile=options.profile, compilations=options.compilations)
        measured, *again = [
            measure(ranking.plans, step, *args, steps=options.calls) for _ in range(2 if options.repeat else 1)
        ]
        predicted, took = [plan.prediction.seconds for plan in ranking], [one.seconds for one in measured]
        plans = [replace(plan, measured=one) for plan, one in zip(ranking, measured, strict=True)]
        if comm.rank == 0:
            for plan in plans:
                print(f"{name}: {plan}", flush=True)
            memory = [
                abs(p.prediction.memory / m.memory - 1) for p, m in zip(ranking, measured, strict=True) if m.memory
            ]
            words = [f"{len(took)} plans", *agreement(predicted, took)]
            for other in again:
                words.append(
                    f"rank correlation of two measurements {rank_correlation(took, [m.seconds for m in other]):.2f}"
                )
            if memory:
                words.append(f"memory off by {statistics.median(memory):.0%}, at most {max(memory):.0%}")
            print(f"{name}: {', '.join(words)}\n", flush=True)
        rows += [{"step": name, **plan.as_dict()} for plan in plans]
    if options.json and comm.rank == 0:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
