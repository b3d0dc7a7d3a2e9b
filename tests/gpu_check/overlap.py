"""Measures how much of the time of its sums a training step hides: with a clock, and in a profile of the GPU.

``steps.py`` starts this program on several ranks. It trains a network of equal layers, with a batch that makes
computing alone take about as long as summing alone. Rank 0 prints a line of JSON. With PYCOLLECTIVE_OVERLAP=off no time
is hidden: then it tells what each sum costs (``whole`` of them), and how long the dispatch of a step takes.
"""

from __future__ import annotations

import argparse
import json
import re
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
    parser.add_argument("--folder", type=Path, help="directory for the profile; default: none is made")
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

    def both_ms(call: Callable[..., Any], *args: Any) -> tuple[float, float]:
        """Milliseconds until a call has ended and until it returns: the slowest rank's medians.

        All ranks begin each call together.
        """
        times = []
        for _ in range(options.calls + 2):
            world.mpi.Barrier()
            began = time.perf_counter()
            results = call(*args)
            returned = time.perf_counter()
            jax.block_until_ready(results)
            times.append((time.perf_counter() - began, returned - began))
        ended, returned = (1e3 * max(world.mpi.allgather(median(column))) for column in zip(*times[2:], strict=True))
        return ended, returned

    def ms(call: Callable[..., Any], *args: Any) -> float:
        return both_ms(call, *args)[0]

    rows = 1024
    wanted = rows * ms(sums, start) / ms(alone, start, batch(rows))
    rows = int(min(max(wanted, _ROWS[0]), _ROWS[1])) // 128 * 128
    x = batch(rows)
    of_step, dispatch = both_ms(step, start, x)
    times = {"step": of_step, "dispatch": dispatch, "compute": ms(alone, start, x), "sums": ms(sums, start)}
    # The program is lowered after the first call, since the ranks agree on an order of the sums in that call.
    program = step.lower(start, x).as_text()
    begun, whole = (len(re.findall(rf"@pycollective_device_allreduce{end}\(", program)) for end in ("_start", ""))
    # All ranks must still have the same parameters, and the parameters must be finite.
    params = jax.block_until_ready(step(step(start, x), x))
    for mine, theirs in zip(params, world.mpi.bcast([np.asarray(w) for w in params]), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert np.isfinite(theirs).all()

    told = {"rows": rows, "width": options.width, "layers": options.layers, "ms": times}
    told |= {"begun": begun, "whole": whole}
    if options.folder is None:
        if world.rank == 0:
            sys.stdout.write(f"overlap: {json.dumps(told)}\n")
        return

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
