"""Times a step of an optimizer on every rank as a whole, and by pycollective.parallel.zero.

The optimizer is AdamW, on GPT-2 small's parameters, or Muon.

    mpirun -n 2 python benchmarks/zero.py
    mpirun -n 2 python benchmarks/zero.py --muon 512    # Muon on 24 matrices of this width

Each variant has its own parameters and state, about 2 GiB on a rank. The variants take turns, so that what else the
machine does meets all of them. Rank 0 prints the median time of a step of each, and its ratio to the first.
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
import optax
from jax import lax

import pycollective as pc
from pycollective import parallel
from pycollective.bench.workloads import TREES

Tree = Any


def step_of(optimizer: optax.GradientTransformation, *, average: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns what makes the state, and a step from parameters, state and a number that differs from rank to rank."""

    def step(params: Tree, state: Any, scale: Any) -> tuple[Tree, Any]:
        grads = jax.tree.map(lambda w: scale * w, params)  # as cheap as a gradient can be
        updates, state = optimizer.update(lax.pmean(grads, "batch") if average else grads, state, params)
        return optax.apply_updates(params, updates), state

    return pc.jit(optimizer.init, axis_name="batch"), pc.jit(step, axis_name="batch", donate_argnums=(0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=TREES, default="gpt2-small", help="whose parameters (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="steps of each variant (default %(default)s)")
    parser.add_argument("--muon", type=int, metavar="WIDTH", help="Muon on 24 matrices instead, each with this width")
    options = parser.parse_args()
    comm = pc.init()
    name, inner = ("adamw", optax.adamw(1e-3)) if options.muon is None else ("muon", optax.contrib.muon(1e-3))
    shapes = TREES[options.model] if options.muon is None else [(options.muon, options.muon)] * 24
    variants = {
        f"psum and {name}": step_of(inner, average=True),
        f"zero({name}), stage 2": step_of(parallel.zero(inner, "batch"), average=False),
        f"zero({name}), stage 1": step_of(parallel.zero(inner, "batch", stage=1), average=False),
    }
    scale = np.float32(1 + comm.rank)
    random = np.random.default_rng(0)
    start = [random.normal(size=size).astype(np.float32) for size in shapes]
    states = {}
    for name, (init, _) in variants.items():
        params = [jnp.array(x) for x in start]
        states[name] = params, init(params)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(options.repeats + 2):
        for name, (_, step) in variants.items():
            comm.mpi.Barrier()
            begin = time.perf_counter()
            states[name] = jax.block_until_ready(step(*states[name], scale))
            if repeat >= 2:
                times[name].append(time.perf_counter() - begin)
    first, *others = [states[name][0] for name in variants]
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    if comm.rank == 0:
        base = statistics.median(next(iter(times.values())))
        for name, seconds in times.items():
            print(f"{name:24}{1e3 * statistics.median(seconds):10.1f} ms{statistics.median(seconds) / base:8.2f}")


if __name__ == "__main__":
    main()
