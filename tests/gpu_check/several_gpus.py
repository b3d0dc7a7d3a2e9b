"""Runs XLA's own collectives between the GPUs of a rank and MPI between ranks in one program, again and again.

``steps.py`` starts this program on several ranks, each with two GPUs or more. All numbers are small and whole, so the
results are exact.
"""

from __future__ import annotations

import argparse
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pycollective as pc
from pycollective.ranks.setup import devices_of_this_rank

_TURNS = 20
_LOCAL = r"\b(all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(-start)?\("


def program(x: jax.Array) -> tuple[jax.Array, ...]:
    """Calls each collective in a loop; the operands differ in each turn."""
    n = lax.axis_size("i")
    ring = [(i, (i + 1) % n) for i in range(n)]

    def turn(carry: tuple[jax.Array, ...], k: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        x, total, block = carry
        total = total + lax.psum(x * k, "i")
        block = block + lax.psum_scatter(x.reshape(n, -1) + k, "i")
        x = lax.all_to_all(lax.ppermute(x, "i", ring).reshape(n, -1), "i", 0, 0).reshape(-1)
        return (x, total, block), None

    start = (x, jnp.zeros_like(x), jnp.zeros(x.size // n, x.dtype))
    (x, total, block), _ = lax.scan(turn, start, jnp.arange(_TURNS, dtype=x.dtype))
    return x, total, block, lax.all_gather(block, "i", tiled=True)


def expected(xs: np.ndarray) -> list[np.ndarray]:
    """Returns the results that ``program`` must have on all devices, stacked, for their stacked operands."""
    n = len(xs)
    totals, blocks = np.zeros_like(xs), np.zeros((n, xs.shape[1] // n), xs.dtype)
    for k in range(_TURNS):
        totals = totals + (k * xs).sum(axis=0)
        blocks = blocks + (xs.reshape(n, n, -1) + k).sum(axis=0)
        xs = np.roll(xs, 1, axis=0).reshape(n, n, -1).swapaxes(0, 1).reshape(n, -1)
    return [xs, totals, blocks, np.broadcast_to(blocks.reshape(-1), (n, blocks.size))]


def main() -> None:
    """Checks the results, and prints how many devices and which local collectives the program has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=1 << 20, help="of each device's array")
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()
    world = pc.init()
    devices = devices_of_this_rank()
    if len(devices) < 2:
        sys.exit(f"several_gpus: expected two devices or more on each rank, got {devices}")
    n = world.size * len(devices)
    xs = np.random.default_rng(0).integers(0, 4, (n, n * (options.elements // n))).astype(np.float32)
    own = slice(world.rank * len(devices), (world.rank + 1) * len(devices))
    mapped = pc.pmap(program, "i")
    text = mapped.lower(xs[own]).compile().as_text()
    found = sorted({match[1] for match in re.finditer(_LOCAL, text)})
    want = expected(xs)
    for _ in range(options.calls):
        for got, right in zip(mapped(xs[own]), want, strict=True):
            np.testing.assert_array_equal(got, right[own])
    if world.rank == 0:
        told = {"ranks": world.size, "devices": len(devices), "local": found, "mpi": text.count("pycollective_device_")}
        sys.stdout.write(f"several: {json.dumps(told)}\n")


if __name__ == "__main__":
    main()
