"""What training loses, and what it gains in speed, where devices communicate less often or later.

    python benchmarks/local_steps.py                                     # losses: four devices in this process
    scripts/hosts --gbps 1 python benchmarks/local_steps.py --speed      # steps per second: two hosts, 1 Gbit/s

The first command trains two networks by each strategy for the same number of steps, on the same examples: a perceptron
on handwritten digits, and a small GPT on the source text of Python's standard library. It prints the loss and accuracy
on examples that were held out, of the mean of the devices' parameters, and the bytes that a device sends in a step.

The second times steps of a large perceptron on few examples, whose gradients travel for longer than they take to
compute. The strategies take turns, so that what else the machine does meets all of them; the figures are medians. Each
rank gets one core, as on a cluster, where hosts do not share cores.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import pycollective as pc
from pycollective.parallel.overlapped_averaging import delayed, gossip
from pycollective.parallel.periodic_averaging import diloco, local_sgd
from pycollective.transport.mpi import MPI

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from corpus import draw_starts, read_text

Array = Any
Tree = Any

AXIS = "batch"


class Strategy(NamedTuple):
    """A way to train.

    Attributes:
        optimizer: takes each device's own gradients.
        sent: how many bytes each device sends in a step for each byte of parameters, if a sum is sent as a ring does.
    """

    optimizer: optax.GradientTransformation
    sent: float


def averaged(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Plain data parallelism."""
    return optax.GradientTransformation(inner.init, lambda g, s, p: inner.update(lax.pmean(g, AXIS), s, p))


def strategies(inner: optax.GradientTransformation, every: int, fragments: int, devices: int) -> dict[str, Strategy]:
    allreduce = 2 * (devices - 1) / devices
    calm = optax.sgd(0.7, momentum=0.5, nesterov=True)
    streaming = partial(diloco, inner, None, every, AXIS, wire_dtype=jnp.bfloat16)
    return {
        "data parallel": Strategy(averaged(inner), allreduce),
        f"local_sgd, every {every}": Strategy(local_sgd(inner, every, AXIS), allreduce / every),
        f"diloco, every {every}": Strategy(diloco(inner, None, every, AXIS), allreduce / every),
        "  in bfloat16, in parts": Strategy(streaming(fragments=fragments), allreduce / every / 2),
        "  outer momentum 0.5": Strategy(diloco(inner, calm, every, AXIS), allreduce / every),
        "delayed": Strategy(delayed(inner, AXIS), allreduce),
        "gossip": Strategy(gossip(inner, AXIS), 1.0),
        "each device by itself": Strategy(inner, 0.0),
    }


def nbytes(params: Tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(params))


def perceptron(random: np.random.Generator, widths: list[int]) -> Tree:
    scales = [math.sqrt(2 / n) for n in widths]
    return [
        {"w": random.normal(scale=s, size=(n, m)).astype(np.float32), "b": np.zeros(m, np.float32)}
        for s, n, m in zip(scales, widths, widths[1:], strict=False)
    ]


def apply_perceptron(params: Tree, x: Array) -> Array:
    for p in params[:-1]:
        x = jax.nn.gelu(x @ p["w"] + p["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


# Losses ------------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """A training.

    Attributes:
        params: at the beginning.
        logits: maps parameters and inputs to logits.
        batches: yields inputs and labels of each step, for all devices together.
        held_out: inputs and labels for the test.
        peak: the largest learning rate.
    """

    params: Tree
    logits: Callable[[Tree, Array], Array]
    batches: Callable[[int], Iterator[tuple[Array, Array]]]
    held_out: tuple[Array, Array]
    peak: float


def digits(rows: int) -> Task:
    data = load_digits()
    images, labels = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
    x, test_x, y, test_y = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)

    def batches(steps: int) -> Iterator[tuple[Array, Array]]:
        random = np.random.default_rng(1)
        for _ in range(steps):
            chosen = random.choice(len(x), rows, replace=False)
            yield x[chosen], y[chosen]

    return Task(perceptron(np.random.default_rng(0), [64, 128, 10]), apply_perceptron, batches, (test_x, test_y), 5e-3)


def gpt(rows: int, layers: int = 2, width: int = 64, heads: int = 4, context: int = 64) -> Task:
    text, vocabulary = read_text()
    random = np.random.default_rng(0)

    def normal(*shape: int, scale: float) -> Array:
        return random.normal(scale=scale, size=shape).astype(np.float32)

    into, back = width**-0.5, (2 * layers * width) ** -0.5
    layer = {"qkv": (3, width, heads, width // heads), "up": (width, 4 * width)}
    layer_back = {"out": (heads, width // heads, width), "down": (4 * width, width)}
    params = {
        "embed": normal(len(vocabulary), width, scale=0.05),
        "position": normal(context, width, scale=0.05),
        "layers": [
            {name: normal(*shape, scale=into) for name, shape in layer.items()}
            | {name: normal(*shape, scale=back) for name, shape in layer_back.items()}
            for _ in range(layers)
        ],
    }

    def logits(params: Tree, tokens: Array) -> Array:
        x = params["embed"][tokens] + params["position"]
        for p in params["layers"]:
            q, k, v = jnp.einsum("rtw,cwhd->crthd", jax.nn.standardize(x), p["qkv"])
            x += jnp.einsum("rthd,hdw->rtw", jax.nn.dot_product_attention(q, k, v, is_causal=True), p["out"])
            x += jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"]
        return jax.nn.standardize(x) @ params["embed"].T

    held_out = len(text) // 10

    def sequences(text: Array, rows: int, seed: Any) -> tuple[Array, Array]:
        drawn = text[draw_starts(text, context, rows, seed)[:, None] + np.arange(context + 1)]
        return drawn[:, :-1], drawn[:, 1:]

    def batches(steps: int) -> Iterator[tuple[Array, Array]]:
        for i in range(steps):
            yield sequences(text[held_out:], rows, (1, i))

    return Task(params, logits, batches, sequences(text[:held_out], 128, 2), 5e-3)


def train(task: Task, strategy: Strategy, steps: int, devices: int) -> tuple[float, float]:
    """Returns the loss and the accuracy of the mean of the devices' parameters."""

    def loss(params: Tree, x: Array, y: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(task.logits(params, x), y).mean()

    def step(params: Tree, state: Any, x: Array, y: Array) -> tuple[Tree, Any]:
        updates, state = strategy.optimizer.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(lambda x: jnp.stack([x] * devices), task.params)
    state = jax.vmap(strategy.optimizer.init, axis_name=AXIS)(params)
    mapped = jax.jit(jax.vmap(step, axis_name=AXIS), donate_argnums=(0, 1))
    for batch in task.batches(steps):
        params, state = mapped(params, state, *(x.reshape(devices, -1, *x.shape[1:]) for x in batch))
    mean = jax.tree.map(lambda x: x.mean(0), params)
    x, y = task.held_out
    return float(jax.jit(loss)(mean, x, y)), float(jnp.mean(task.logits(mean, x).argmax(-1) == y))


def print_losses(options: argparse.Namespace) -> None:
    for name, make in (("digits", digits), ("gpt", gpt)):
        task = make(options.rows)
        size = nbytes(task.params)
        print(
            f"{name}: {options.steps} steps of {options.rows} rows on {options.devices} devices, "
            f"{size / 2**10:.0f} KiB of parameters"
        )
        print(f"{'':28}{'loss':>8}{'accuracy':>10}{'KiB sent a step':>17}{'seconds':>9}")
        inner = optax.adamw(optax.cosine_onecycle_schedule(options.steps, task.peak))
        for title, strategy in strategies(inner, options.every, options.fragments, options.devices).items():
            begin = time.perf_counter()
            loss, accuracy = train(task, strategy, options.steps, options.devices)
            seconds = time.perf_counter() - begin
            print(
                f"{title:28}{loss:8.4f}{accuracy:10.4f}{strategy.sent * size / 2**10:17.1f}{seconds:9.1f}", flush=True
            )


# Speed -------------------------------------------------------------------------------------------------------


def take_one_core() -> None:
    """Comes before JAX makes its threads. Hosts of ``scripts/hosts`` share cores that each takes for its own."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[MPI.COMM_WORLD.rank % len(cores)]})


def print_speed(options: argparse.Namespace) -> None:
    take_one_core()
    comm = pc.init()
    random = np.random.default_rng(comm.rank)
    x = random.normal(size=(options.rows, options.width)).astype(np.float32)
    params = perceptron(np.random.default_rng(0), [options.width] * (options.layers + 1))

    def loss(params: Tree, x: Array) -> Array:
        return jnp.mean(apply_perceptron(params, x) ** 2)

    if comm.rank == 0:
        size = nbytes(params)
        print(
            f"{comm.size} ranks on {comm.host_count} hosts, {size / 2**20:.1f} MiB of parameters, {options.rows} rows"
        )
        print(f"{'':28}{'ms a step':>10}{'steps a second':>16}{'times':>8}", flush=True)
    inner = optax.sgd(1e-3) if options.inner == "sgd" else optax.adamw(1e-4)
    table = strategies(inner, options.every, options.fragments, comm.size)
    programs, states = {}, {}
    for title, strategy in table.items():

        def step(params: Tree, state: Any, x: Array, optimizer: Any = strategy.optimizer) -> tuple[Tree, Any]:
            updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
            return optax.apply_updates(params, updates), state

        programs[title] = pc.jit(step, axis_name=AXIS, donate_argnums=(0, 1))
        own = jax.tree.map(jnp.array, params)
        states[title] = own, pc.jit(strategy.optimizer.init, axis_name=AXIS)(own)
    times: dict[str, list[float]] = {title: [] for title in table}
    for turn in range(options.repeats + 1):
        for title, strategy in table.items():
            # What does not send in each step makes a whole round, in which each parameter is sent once.
            steps = 3 if strategy.sent >= 1 else options.every
            comm.mpi.Barrier()
            begin = time.perf_counter()
            for _ in range(steps if turn else 1):  # the first step compiles
                states[title] = programs[title](*states[title], x)
            jax.block_until_ready(states[title])
            if turn:
                times[title].append(max(comm.mpi.allgather(time.perf_counter() - begin)) / steps)
    if comm.rank == 0:
        medians = {title: float(np.median(seconds)) for title, seconds in times.items()}
        for title, seconds in medians.items():
            gain = medians["data parallel"] / seconds
            print(f"{title:28}{1e3 * seconds:10.1f}{1 / seconds:16.2f}{gain:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true", help="time steps over ranks, instead of losses")
    parser.add_argument("--every", type=int, help="steps between two sums (default 20; 50 with --speed)")
    parser.add_argument("--fragments", type=int, default=4, help="of streaming DiLoCo (default %(default)s)")
    parser.add_argument("--rows", type=int, help="of a batch (default 16 of all devices; 8 of each rank with --speed)")
    parser.add_argument("--steps", type=int, default=1200, help="of each training (default %(default)s)")
    parser.add_argument("--devices", type=int, default=4, help="of each training (default %(default)s)")
    parser.add_argument("--width", type=int, default=2048, help="of the large perceptron (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the large perceptron (default %(default)s)")
    parser.add_argument("--inner", choices=["sgd", "adamw"], default="sgd", help="with --speed (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each strategy (default %(default)s)")
    options = parser.parse_args()
    options.every = options.every or (50 if options.speed else 20)
    options.rows = options.rows or (8 if options.speed else 16)
    (print_speed if options.speed else print_losses)(options)


if __name__ == "__main__":
    main()
