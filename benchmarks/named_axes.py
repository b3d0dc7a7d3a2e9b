"""Times sums over a named axis, trees of many leaves, and tracing; beside jax.pmap and raw MPI.

    JAX_NUM_CPU_DEVICES=4 mpirun -n 2 python benchmarks/named_axes.py --devices 2

It prints medians of rank 0, in microseconds. mpi4jax takes part if it is installed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pycollective as pc
from pycollective.bench.workloads import TREES as MODELS
from pycollective.config import config
from pycollective.transport.mpi import MPI

try:
    import mpi4jax
except ImportError:
    mpi4jax = None

TREES = {
    "148 x 1 KiB": MODELS["many-small"],
    "148 x 64 KiB": [16384] * 148,
    "10 x 144 KiB, 8 x 576 KiB, 80 small, 2 x 9 MiB": [36864] * 10
    + [147456] * 8
    + [64] * 40
    + [128] * 40
    + [2359296] * 2,
}
LOOP = 20


def median_us(comm: pc.Communicator, call: Callable[[], Any], repeats: int) -> float:
    """Returns the median time of ``repeats`` calls that start together on all ranks."""
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
    parser.add_argument("--gpt2", action="store_true", help="also the tree of GPT-2 small: 2 GiB of memory a device")
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
        alone = jax.pmap(lambda x: lax.psum(x, "i") / local, "i", devices=own)  # over this rank's devices alone
        ours = pc.pmap(lambda x: lax.psum(x, "i") / n, "i")
        flat = np.zeros(elements, np.float32), np.zeros(elements, np.float32)
        calls = {
            "jax.pmap within a rank": in_turn(alone, alone(x)),
            "raw Allreduce": lambda flat=flat: comm.mpi.Allreduce(*flat),
            "pc.pmap over all ranks": in_turn(ours, ours(x)),
        }
        rounds = [{name: median_us(comm, call, options.repeats) for name, call in calls.items()} for _ in range(5)]
        us = {name: statistics.median(each[name] for each in rounds) for name in calls}
        theirs = us["jax.pmap within a rank"] + us["raw Allreduce"]
        for name in calls:
            say(f"{4 * elements} B a device", name, f"{us[name]:.1f}")
        say("  pc.pmap over the sum of the two", f"{us['pc.pmap over all ranks'] / theirs:.2f}x")
    trees = {name: (sizes, LOOP, options.repeats) for name, sizes in TREES.items()}
    if options.gpt2:
        trees["GPT-2 small"] = (MODELS["gpt2-small"], 2, 5)
    for name, (sizes, loop, repeats) in trees.items():
        tree = [np.zeros((local, size), np.float32) for size in sizes]
        total = pc.pmap(repeated(lambda t: lax.psum(t, "i"), loop), "i", donate_argnums=0)
        ours = median_us(comm, in_turn(total, tree), repeats) / loop
        flat, out = np.zeros(sum(sizes), np.float32), np.zeros(sum(sizes), np.float32)
        raw = median_us(comm, lambda flat=flat, out=out: comm.mpi.Allreduce(flat, out), repeats)  # type: ignore[misc]
        say(f"tree {name}, in a loop", f"{ours:.1f}")
        say("  one raw Allreduce of as many bytes", f"{raw:.1f}", f"ours {ours / raw:.2f}x")
        if mpi4jax is not None and local == 1 and loop == LOOP:
            leaves = [np.zeros(size, np.float32) for size in sizes]
            theirs = jax.jit(repeated(lambda t: [mpi4jax.allreduce(x, op=MPI.SUM) for x in t], loop), donate_argnums=0)
            us = median_us(comm, in_turn(theirs, leaves), repeats) / loop
            say("  mpi4jax, leaf by leaf", f"{us:.1f}", f"{us / ours:.1f}x ours")
    for name, mapped in (("jax.pmap", jax.pmap), ("pc.pmap", pc.pmap)):
        us = median_us(comm, lambda mapped=mapped: traced(mapped, local), options.repeats)  # type: ignore[misc]
        say("tracing and lowering a training step of 40 layers", name, f"{us:.0f}")


def repeated(fun: Callable[[Any], Any], loop: int) -> Callable[[Any], Any]:
    """Returns a program that applies ``fun`` to its own result ``loop`` times."""
    return lambda x: lax.fori_loop(0, loop, lambda _, x: fun(x), x)


def in_turn(fun: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
    """Returns a function that calls ``fun`` on its own last result, so that the arrays already lie on its devices."""

    def call() -> Any:
        nonlocal x
        x = fun(x)
        return x

    return call


def traced(mapped: Callable[..., Any], local: int) -> Any:
    """Traces and lowers a training step that is new to all caches."""

    def loss(params: list[Any], x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def step(params: list[Any], x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return lax.pmean(value, "i"), lax.pmean(grads, "i")

    params = [np.zeros((8, 8), np.float32)] * 40
    devices = jax.devices()[:local]
    mapped(step, "i", in_axes=(None, 0), devices=devices).lower(params, np.zeros((local, 4, 8), np.float32))
    return ()


if __name__ == "__main__":
    main()
