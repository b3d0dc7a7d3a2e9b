"""Measures how much of the time of its sums a training step hides: with a clock, and in a profile of the GPU.

``steps.py`` starts this program on several ranks. It trains a network of equal layers, with a batch that makes
computing alone take about as long as summing alone. Rank 0 prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pycollective as pc
from tests.gpu_check import streams

AXIS = "i"
_RATE = 1e-3
_ROWS = (256, 32768)


def gradient(params: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    def loss(params: list[jax.Array]) -> jax.Array:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return jax.grad(loss)(params)


def update(params: list[jax.Array], grads: list[jax.Array]) -> list[jax.Array]:
    return [w - _RATE * g for w, g in zip(params, grads, strict=True)]


def main() -> None:
    """Measures the steps and prints the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--calls", type=int, default=7)
    parser.add_argument("--folder", type=Path, required=True, help="directory for the profile")
    options = parser.parse_args()
    world = pc.init()
    generator = np.random.default_rng(0)
    shape = (options.width, options.width)
    start = [jnp.asarray(generator.normal(size=shape) / options.width**0.5, jnp.float32) for _ in range(options.layers)]

    step = pc.jit(lambda params, x: update(params, lax.pmean(gradient(params, x), AXIS)), axis_name=AXIS)
    alone = pc.jit(lambda params, x: update(params, gradient(params, x)), axis_name=AXIS)
    sums = pc.jit(lambda grads: lax.pmean(grads, AXIS), axis_name=AXIS)

    def batch(rows: int) -> jax.Array:
        return jnp.asarray(generator.normal(size=(rows, options.width)) + 0.1 * world.rank, jnp.float32)

    def ms(call: Callable[..., Any], *args: Any) -> float:
        """Returns the milliseconds of a call: the slowest rank's median of calls that all ranks begin together."""
        times = []
        for turn in range(options.calls + 2):
            world.mpi.Barrier()
            began = time.perf_counter()
            jax.block_until_ready(call(*args))
            if turn >= 2:
                times.append(time.perf_counter() - began)
        return 1e3 * max(world.mpi.allgather(median(times)))

    rows = 1024
    wanted = rows * ms(sums, start) / ms(alone, start, batch(rows))
    rows = int(min(max(wanted, _ROWS[0]), _ROWS[1])) // 128 * 128
    x = batch(rows)
    times = {"step": ms(step, start, x), "compute": ms(alone, start, x), "sums": ms(sums, start)}
    # The program is lowered after the first call, since the ranks agree on an order of the sums in that call.
    begun = step.lower(start, x).as_text().count("allreduce_start")
    # All ranks must still have the same parameters, and the parameters must be finite.
    params = jax.block_until_ready(step(step(start, x), x))
    for mine, theirs in zip(params, world.mpi.bcast([np.asarray(w) for w in params]), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert np.isfinite(theirs).all()

    told = {"rows": rows, "width": options.width, "layers": options.layers, "ms": times, "begun": begun}

    def calls() -> None:
        for _ in range(options.calls):
            jax.block_until_ready(step(start, x))

    world.mpi.Barrier()
    if world.rank > 0:
        calls()
        return
    try:
        jax.profiler.start_trace(str(options.folder))
    except RuntimeError as error:  # go on: the other ranks wait for the calls below
        told["no_profile"] = str(error)
    calls()
    if "no_profile" not in told:
        told |= profile_of(options.folder, options.calls)
    sys.stdout.write(f"overlap: {json.dumps(told)}\n")


def profile_of(folder: Path, calls: int) -> dict[str, Any]:
    """Returns the milliseconds of each call that was traced, or why there are none."""
    try:
        jax.profiler.stop_trace()
        seen = streams.overlap(streams.read(folder))
    except (OSError, RuntimeError, ValueError) as error:
        return {"no_profile": str(error)}
    ms = {"sums": seen.sums / calls / 1e6, "kernels": seen.kernels / calls / 1e6}
    return {"profile": {**ms, "share": seen.share}}


if __name__ == "__main__":
    main()
