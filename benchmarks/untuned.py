"""How far predictions are off for eight steps for which nothing was tuned: a table, by a new profile.

    python benchmarks/untuned.py              # 2 ranks on this host, some ten minutes; leave the machine idle
    python benchmarks/untuned.py --steps cnn,gnn --compilations 8

It starts the ranks itself. All plans of each step are predicted, and measured twice. Where plans take nearly the same,
no prediction can say which is the faster one: the correlation of the two measurements shows what could be reached.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pycollective as pc  # isort: skip (XLA calls MPI through it if it comes before JAX)
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from jax import lax
from plan import in_order, rank_correlation, struct

from pycollective.launch.started_by import is_rank
from pycollective.planning import Profile, measure

Array = Any
Tree = Any
Step = tuple[Callable[..., Any], tuple[Any, ...]]

ADAM = optax.adam(1e-3)


def training(loss: Callable[..., Array], params: Tree, *batch: Any) -> Step:
    """A step of Adam on shapes; ``loss`` of parameters and batch."""

    def step(params: Tree, moments: Tree, *batch: Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, moments = ADAM.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return step, (params, jax.eval_shape(ADAM.init, params), *batch)


def shapes_of(network: linen.Module, *inputs: Any) -> Tree:
    return jax.eval_shape(network.init, jax.random.key(0), *inputs)


def cnn() -> Step:
    """Convolutions with BatchNorm, whose statistics are those of the whole batch."""

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: Array) -> Array:
            for features, stride in ((32, 1), (64, 2), (64, 1), (128, 2)):
                x = linen.Conv(features, (3, 3), stride, use_bias=False)(x)
                x = linen.relu(linen.BatchNorm(use_running_average=False)(x))
            return linen.Dense(10)(x.mean((1, 2)))

    network, images = Network(), struct(32, 24, 24, 3)
    variables = shapes_of(network, images)

    def step(state: Tree, images: Array, labels: Array) -> Any:
        def loss(params: Tree) -> Any:
            logits, updates = network.apply({**state["variables"], "params": params}, images, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), updates

        (value, updates), grads = jax.value_and_grad(loss, has_aux=True)(state["variables"]["params"])
        changes, moments = ADAM.update(grads, state["moments"])
        params = optax.apply_updates(state["variables"]["params"], changes)
        return {"variables": {"params": params, **updates}, "moments": moments}, value

    state = {"variables": variables, "moments": jax.eval_shape(ADAM.init, variables["params"])}
    return step, (state, images, struct(32, dtype=jnp.int32))


def mixer() -> Step:
    """MLP-Mixer: layers over patches and over channels in turns."""

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: Array) -> Array:
            x = linen.Dense(128)(x)
            for _ in range(3):
                y = linen.LayerNorm()(x).swapaxes(1, 2)
                x += linen.Dense(64)(linen.gelu(linen.Dense(128)(y))).swapaxes(1, 2)
                x += linen.Dense(128)(linen.gelu(linen.Dense(512)(linen.LayerNorm()(x))))
            return linen.Dense(10)(x.mean(1))

    return classifier(Network(), struct(16, 64, 48))


def lstm() -> Step:
    """An LSTM over 48 positions."""

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: Array) -> Array:
            return linen.Dense(10)(linen.RNN(linen.OptimizedLSTMCell(192))(x)[:, -1])

    return classifier(Network(), struct(32, 48, 64))


def classifier(network: linen.Module, inputs: Any) -> Step:
    def loss(params: Tree, x: Array, labels: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(network.apply(params, x), labels).mean()

    return training(loss, shapes_of(network, inputs), inputs, struct(inputs.shape[0], dtype=jnp.int32))


def state_space() -> Step:
    """Linear recurrences that are diagonal, as an associative scan, between products."""

    def loss(params: list[Tree], x: Array, y: Array) -> Array:
        for layer in params:
            decay = jnp.broadcast_to(jax.nn.sigmoid(layer["decay"]), (*x.shape[:2], layer["decay"].size))
            joined = lax.associative_scan(
                lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (decay, x @ layer["before"]), axis=1
            )
            x += jax.nn.gelu(joined[1]) @ layer["after"]
        return jnp.mean((x - y) ** 2)

    layer = {"decay": struct(128), "before": struct(64, 128), "after": struct(128, 64)}
    return training(loss, [layer] * 2, struct(8, 256, 64), struct(8, 256, 64))


def graph() -> Step:
    """Messages along the edges of a graph, gathered from nodes and summed by segments."""
    nodes, width = 2048, 64

    def loss(params: list[Tree], x: Array, senders: Array, receivers: Array, y: Array) -> Array:
        for layer in params:
            messages = jax.nn.relu(x[senders] @ layer["message"])
            received = jax.ops.segment_sum(messages, receivers, num_segments=nodes)
            x = jax.nn.relu(jnp.concatenate([x, received], axis=1) @ layer["update"])
        return jnp.mean((x - y) ** 2)

    layer = {"message": struct(width, width), "update": struct(2 * width, width)}
    edges = struct(4 * nodes, dtype=jnp.int32)
    return training(loss, [layer] * 3, struct(nodes, width), edges, edges, struct(nodes, width))


def unet() -> Step:
    """A U-Net: convolutions down to a quarter, up again, and arrays that go across."""

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: Array) -> Array:
            across = []
            for features in (16, 32):
                x = linen.relu(linen.GroupNorm(8)(linen.Conv(features, (3, 3))(x)))
                across.append(x)
                x = linen.max_pool(x, (2, 2), (2, 2))
            x = linen.relu(linen.Conv(64, (3, 3))(x))
            for features, other in zip((32, 16), reversed(across), strict=True):
                x = linen.ConvTranspose(features, (2, 2), (2, 2))(x)
                x = linen.relu(linen.Conv(features, (3, 3))(jnp.concatenate([x, other], axis=-1)))
            return linen.Conv(1, (1, 1))(x)

    network, images = Network(), struct(16, 32, 32, 4)

    def loss(params: Tree, x: Array, y: Array) -> Array:
        return jnp.mean((network.apply(params, x) - y) ** 2)

    return training(loss, shapes_of(network, images), images, struct(16, 32, 32, 1))


def transformer() -> Step:
    """An encoder written with Flax's NNX."""
    width, vocabulary, length = 128, 512, 64

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
            self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
            self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: Array) -> Array:
            x += self.attention(self.norms[0](x))
            return x + self.down(nnx.gelu(self.up(self.norms[1](x))))

    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.out = nnx.Linear(width, vocabulary, rngs=rngs)

        def __call__(self, tokens: Array) -> Array:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.out(x)

    abstract, params = nnx.split(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))

    def loss(params: Tree, tokens: Array, targets: Array) -> Array:
        logits = nnx.merge(abstract, params)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    tokens = struct(8, length, dtype=jnp.int32)
    plain = jax.tree.map(lambda x: struct(*x.shape, dtype=x.dtype), params)
    return training(loss, plain, tokens, tokens)


def physics() -> Step:
    """A network that is to solve the heat equation: its first and second derivatives at 1024 points."""

    def loss(params: list[Tree], points: Array) -> Array:
        def u(x: Array, t: Array) -> Array:
            h = jnp.stack([x, t])
            for layer in params[:-1]:
                h = jnp.tanh(h @ layer["w"] + layer["b"])
            return (h @ params[-1]["w"] + params[-1]["b"])[0]

        def residual(point: Array) -> Array:
            x, t = point
            return jax.grad(u, 1)(x, t) - jax.grad(jax.grad(u))(x, t)

        return jnp.mean(jax.vmap(residual)(points) ** 2)

    widths = (2, 128, 128, 128, 1)
    layers = [{"w": struct(a, b), "b": struct(b)} for a, b in itertools.pairwise(widths)]
    return training(loss, layers, struct(1024, 2))


STEPS: dict[str, Callable[[], Step]] = {
    "cnn": cnn,
    "mixer": mixer,
    "lstm": lstm,
    "state-space": state_space,
    "gnn": graph,
    "u-net": unet,
    "transformer": transformer,
    "physics": physics,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default=",".join(STEPS), help="some of %(default)s")
    parser.add_argument("--compilations", type=int, default=8, help="most plans of each step (default %(default)s)")
    parser.add_argument("--calls", type=int, default=10, help="timed steps of each plan (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default %(default)s)")
    parser.add_argument("--profile", type=Path, help="a profile of these ranks (default: it is measured first)")
    options = parser.parse_args()
    if is_rank(os.environ):
        tabulate(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        profile = options.profile or Path(folder) / "cluster.json"
        command = [sys.executable, "-m", "pycollective"]
        started = time.perf_counter()
        if not options.profile:
            subprocess.run([*command, "profile", "-o", str(profile), "--ranks", str(options.ranks)], check=True)
        words = [sys.executable, __file__, *sys.argv[1:], "--profile", str(profile)]
        ranks = ["run", "-n", str(options.ranks), "--oversubscribe", "--bind", "none"]
        subprocess.run([*command, *ranks, *words], check=True)
        print(f"{time.perf_counter() - started:.0f} s in all")


def tabulate(options: argparse.Namespace) -> None:
    """Prints a row for each step. All ranks make this call."""
    comm = pc.distributed.initialize()

    def show(text: str) -> None:
        if comm.rank == 0:
            print(text, flush=True)

    profile = Profile.load(options.profile)
    show(f"{profile.source}\nnoise of the profile: {profile.noise}\n")
    names = ("step", "plans", "ms", "median error", "rank correlation", "of two runs", "pairs in order")
    names += ("chosen over fastest", "best of first three over fastest", "doubts")
    show(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    said = []
    for name in options.steps.split(","):
        step, args = STEPS[name]()
        ranking = pc.plan(step, *args, profile=profile, compilations=options.compilations)
        first, again = ([one.seconds for one in measure(ranking.plans, step, *args, steps=options.calls)] for _ in "12")
        took = list(map(min, first, again))
        predicted = [one.prediction.seconds for one in ranking]
        errors = [abs(p / t - 1) for p, t in zip(predicted, took, strict=True)]
        doubts = [note for note in ranking.notes if note not in profile.notes]
        cells = [
            name,
            f"{len(took)}",
            f"{min(took) * 1e3:.1f} to {max(took) * 1e3:.1f}",
            f"{statistics.median(errors):.0%}",
            f"{rank_correlation(predicted, took):.2f}",
            f"{rank_correlation(first, again):.2f}",
            f"{in_order(predicted, took):.0%}",
            f"{took[0] / min(took):.2f}",
            f"{min(took[:3]) / min(took):.2f}",
            "yes" if doubts else "",
        ]
        show(f"| {' | '.join(cells)} |")
        said += [f"{name}: {note}" for note in doubts]
        said += [
            f"{name}: {p * 1e3:.2f} ms predicted, {a * 1e3:.2f} and {b * 1e3:.2f} measured: {one.candidate.rule}"
            for p, a, b, one in zip(predicted, first, again, ranking, strict=True)
        ]
    show("\n" + "\n".join(said))


if __name__ == "__main__":
    main()
