"""Trains a network on scikit-learn's handwritten digits: by data parallelism, and by independent subnets.

    JAX_NUM_CPU_DEVICES=2 mpirun -n 2 python benchmarks/subnets.py     # 4 devices

Both ways make as many steps with as many rows on each device. For each way rank 0 prints the accuracy on the test set
of the whole network, as mean and standard deviation over seeds; the weights on a device; and how many bytes reach a
device in the training. The bytes are counted from the shapes: 2 (N - 1) / N of an array in an allreduce over N devices,
N - 1 parts in an allgather.

Both networks standardise what comes into a hidden layer, without parameters. So the sizes of a layer's values do not
depend on how many units are before it, and the whole network computes with the same sizes as its subnets.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import pycollective as pc
from pycollective.parallel.subnets import draw_subnets, join_subnets, take_subnet

Array = Any
Tree = Any

SPEC = {"w1": (None, "h1"), "b1": ("h1",), "w2": ("h1", "h2"), "b2": ("h2",), "w3": ("h2", None), "b3": (None,)}


def init_params(seed: int, width: int) -> Tree:
    random = np.random.default_rng(seed)
    sizes = (64, width, width, 10)
    params = {}
    for i in (1, 2, 3):
        params[f"w{i}"] = random.normal(scale=sizes[i - 1] ** -0.5, size=sizes[i - 1 : i + 1]).astype(np.float32)
        params[f"b{i}"] = np.zeros(sizes[i], np.float32)
    return params


def logits(p: Tree, x: Array) -> Array:
    x = jax.nn.relu(jax.nn.standardize(x @ p["w1"]) + p["b1"])
    x = jax.nn.relu(jax.nn.standardize(x @ p["w2"]) + p["b2"])
    return x @ p["w3"] / p["w3"].shape[0] ** 0.5 + p["b3"]


def mean_loss(p: Tree, x: Array, y: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(p, x), y).mean()


def gradients(p: Tree, x: Array, y: Array, key: Array, rows: int) -> Tree:
    """Returns those of rows that this device draws from its own."""
    drawn = jax.random.randint(jax.random.fold_in(key, lax.axis_index("i")), (rows,), 0, len(x))
    return jax.grad(mean_loss)(p, x[drawn], y[drawn])


def descend(p: Tree, grads: Tree, rate: Array) -> Tree:
    return jax.tree.map(lambda w, g: w - rate * g, p, grads)


def rate_at(step: Array, options: argparse.Namespace) -> Array:
    """Returns the learning rate, which falls to zero as a cosine."""
    return options.rate * (1 + jnp.cos(jnp.pi * step / options.steps)) / 2


def data_parallel(options: argparse.Namespace) -> Callable[..., Tree]:
    def train(p: Tree, key: Array, x: Array, y: Array) -> Tree:
        def step(p: Tree, i: Array) -> tuple[Tree, None]:
            grads = lax.pmean(gradients(p, x, y, jax.random.fold_in(key, i), options.rows), "i")
            return descend(p, grads, rate_at(i, options)), None

        return lax.scan(step, p, jnp.arange(options.steps))[0]

    return train


def independent_subnets(options: argparse.Namespace, every: int) -> Callable[..., Tree]:
    def train(p: Tree, key: Array, x: Array, y: Array) -> Tree:
        def round_of_steps(p: Tree, steps: Array) -> tuple[Tree, None]:
            def step(subnet: Tree, i: Array) -> tuple[Tree, None]:
                grads = gradients(subnet, x, y, jax.random.fold_in(key, i), options.rows)
                return descend(subnet, grads, rate_at(i, options)), None

            sizes = {"h1": options.width, "h2": options.width}
            units = draw_subnets(jax.random.fold_in(key, options.steps + steps[0]), sizes, "i")
            subnet, _ = lax.scan(step, take_subnet(p, SPEC, units, "i"), steps)
            return join_subnets(p, subnet, SPEC, units, "i"), None

        return lax.scan(round_of_steps, p, jnp.arange(options.steps).reshape(-1, every))[0]

    return train


def numbers(p: Tree, devices: int, *, divided: bool) -> tuple[int, float]:
    """Returns the number of weights on a device, and how many reach it when the devices meet."""
    own, received = 0, 0.0
    for name, w in p.items():
        hidden = len([layer for layer in SPEC[name] if layer is not None]) if divided else 0
        part = w.size // devices**hidden
        own += part
        received += (devices - 1) * part if hidden else 2 * (devices - 1) / devices * part
    return own, received


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of each training (default %(default)s)")
    parser.add_argument("--every", type=int, nargs="+", default=[1, 10, 50], help="steps of a round (default 1 10 50)")
    parser.add_argument("--rows", type=int, default=32, help="of a device in a step (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of both hidden layers (default %(default)s)")
    parser.add_argument("--rate", type=float, default=1.5, help="first learning rate (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="number of trainings of each kind (default %(default)s)")
    options = parser.parse_args()
    if any(every < 1 or options.steps % every for every in options.every):
        parser.error(f"expected --every to be divisors of --steps, {options.steps}, got {options.every}")
    comm, local = pc.init(), jax.local_device_count()
    devices = comm.size * local

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    images, tested, labels, right = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    share = len(images) // devices
    own = slice(comm.rank * local, (comm.rank + 1) * local)
    x = images[: devices * share].reshape(devices, share, 64)[own]
    y = labels[: devices * share].reshape(devices, share)[own]

    ways = {"data parallel": (data_parallel(options), options.steps, False)}
    for every in options.every:
        way = independent_subnets(options, every), options.steps // every, True
        ways[f"subnets, {every} steps a round"] = way
    if comm.rank == 0:
        print(f"{comm.size} x {local} devices, width {options.width}, {options.steps} steps, rate {options.rate}")
        print(f"{'':26}{'accuracy':>18}{'weights':>12}{'MB received':>14}")
    for name, (train, meetings, divided) in ways.items():
        run = pc.pmap(train, "i", in_axes=(None, None, 0, 0), out_axes=None)
        accuracies = []
        for seed in range(options.seeds):
            p = init_params(seed, options.width)
            trained = run(p, jax.random.key(seed), x, y)
            accuracies.append(np.mean(np.argmax(logits(trained, tested), axis=-1) == right))
        weights, received = numbers(p, devices, divided=divided)
        if comm.rank == 0:
            spread = f"{100 * np.mean(accuracies):.2f} +- {100 * np.std(accuracies):.2f} %"
            print(f"{name:26}{spread:>18}{weights:>12,}{4e-6 * meetings * received:>14.2f}", flush=True)


if __name__ == "__main__":
    main()
