"""Sums over a named axis: calls on several local devices, and trees of many leaves, beside jax.pmap and raw MPI.

    JAX_NUM_CPU_DEVICES=4 mpirun -n 2 python benchmarks/named_axes.py --devices 2

Medians in microseconds, from rank 0.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

import pycollective as pc
from pycollective.config import config

TREES = {
    "148 x 1 KiB": [256] * 148,
    "148 x 64 KiB": [16384] * 148,
    "10 x 144 KiB, 8 x 576 KiB, 80 small, 2 x 9 MiB": [36864] * 10
    + [147456] * 8
    + [64] * 40
    + [128] * 40
    + [2359296] * 2,
}
LOOP = 20


def median_us(comm: pc.Communicator, call: Callable[[], Any], repeats: int) -> float:
    """Of ``repeats`` calls that start together on all ranks."""
    times = []
    for repeat in range(repeats + 2):
        comm.mpi.Barrier()
        start = time.perf_counter()
        jax.block_until_ready(call())
        if repeat >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="local devices of each rank")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    local = options.devices
    comm = pc.init(devices=local)
    n = comm.size * local

    def say(*columns: Any) -> None:
        if comm.rank == 0:
            print(*columns, sep="\t", flush=True)

    say(f"{comm.size} rank(s) x {local} device(s), bucket {config.bucket_bytes} bytes")
    for elements in (4, 1 << 18, 1 << 22):
        x = np.ones((local, elements), np.float32)
        own = jax.devices()[:local]
        alone = jax.pmap(lambda x: lax.psum(x, "i") / local, "i", devices=own)  # this rank's devices only
        ours = pc.pmap(lambda x: lax.psum(x, "i") / n, "i")
        for name, f in (("jax.pmap within a rank", alone), ("pc.pmap over all ranks", ours)):
            y = f(x)
            us = median_us(comm, lambda f=f, y=y: f(y), options.repeats)  # type: ignore[misc]
            say(f"{4 * elements} B a device", name, f"{us:.1f}")
    for name, sizes in TREES.items():
        tree = [np.zeros((local, size), np.float32) for size in sizes]
        total = pc.pmap(lambda t: lax.fori_loop(0, LOOP, lambda _, t: lax.psum(t, "i"), t), "i")
        tree = total(tree)  # zeros again, on the devices
        us = median_us(comm, lambda total=total, tree=tree: total(tree), options.repeats) / LOOP  # type: ignore[misc]
        flat, out = np.zeros(sum(sizes), np.float32), np.zeros(sum(sizes), np.float32)
        raw = median_us(comm, lambda flat=flat, out=out: comm.mpi.Allreduce(flat, out), options.repeats)  # type: ignore[misc]
        say(
            f"tree {name} in a loop",
            f"{us:.1f}",
            "one raw Allreduce of as many bytes",
            f"{raw:.1f}",
            f"{us / raw:.2f}x",
        )


if __name__ == "__main__":
    main()
