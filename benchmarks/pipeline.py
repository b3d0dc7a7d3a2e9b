"""Measures the bubble of each schedule of pycollective.parallel's pipeline, and compares it with the planned one.

    mpirun -n 2 python benchmarks/pipeline.py                 # stages of matrix products, on as many cores as ranks
    mpirun -n 4 python benchmarks/pipeline.py --sleep 10      # stages that sleep, which needs no core

A forward pass, a backward pass of inputs and one of weights take about the same time each. The planned bubble is that
of the simulation for equal times, which is the formula in docs/parallel.md. Rank 0 prints

- the bubble by the clock, the share of the ranks' time in which they do not compute: the least over the steps, which
  the machine's other work has disturbed least, and the median;
- the median time of a step with these notes of times, and without them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pycollective as pc
from pycollective.parallel.pipeline import Record, measured, pipeline
from pycollective.parallel.schedule_picture import picture
from pycollective.parallel.schedule_simulator import Simulation, simulate
from pycollective.parallel.schedules import Schedule, gpipe, interleaved, one_f_one_b, zero_bubble

Array = Any


def products(layers: int) -> Any:
    """Returns a stage of so many products."""

    def stage(params: list[Array], x: Array) -> Array:
        for w in params[:layers]:
            x = jnp.tanh(x @ w)
        return x

    return stage


def sleeps(seconds: float) -> Any:
    """Returns a stage each of whose three passes sleeps so long."""

    def asleep(x: Array) -> Array:
        def sleep(x: Array) -> Array:
            time.sleep(seconds)
            return np.asarray(x)

        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def pass_on(w: Array, x: Array) -> Array:  # noqa: ARG001
        return asleep(x)

    def backward(w: Array, dy: Array) -> tuple[Array, Array]:
        return asleep(2 * dy).sum() + 0 * w, asleep(dy)

    pass_on.defvjp(lambda w, x: (asleep(x), w), backward)
    return lambda params, x: pass_on(params[0][0, 0], x)


def measure(schedule: Schedule, options: argparse.Namespace) -> tuple[list[Simulation], list[float]]:
    """Returns how the steps ran, and their times without a record."""
    comm = pc.world()
    width, batch, chunks = options.width, options.batch, schedule.chunks
    layers = options.layers // chunks
    body = sleeps(options.sleep / 1e3 / chunks) if options.sleep else products(layers)

    def stage(params: Any, x: Array, microbatch: Array, *, number: int) -> Array:
        x = (
            microbatch * params["scale"] if number == 0 else x
        )  # so the first stage needs gradients of its input as well
        y = body(params["layers"], x)
        return jnp.mean(y) if number == comm.size * chunks - 1 else y

    stages, params = [], []
    for chunk in range(chunks):
        number = chunk * comm.size + comm.rank
        stages.append(lambda *args, number=number: stage(*args, number=number))
        params.append(
            {
                "layers": [jnp.eye(width) * (1 + i / 100) for i in range(layers)],
                **({"scale": jnp.ones(())} if number == 0 else {}),
            }
        )
    between = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    microbatches = jnp.ones((schedule.microbatches, batch, width))
    record: Record = []
    noted = pc.jit(pipeline(stages, schedule, between, comm, record=record))
    plain = pc.jit(pipeline(stages, schedule, between, comm))
    runs, times = [], []
    for _ in range(options.repeats + 1):
        comm.mpi.Barrier()
        jax.block_until_ready(noted(params, microbatches))
        comm.mpi.Barrier()
        runs.append(measured(schedule, record, comm))
        comm.mpi.Barrier()
        begin = time.perf_counter()
        jax.block_until_ready(plain(params, microbatches))
        times.append(max(comm.mpi.allgather(time.perf_counter() - begin)))
        record.clear()
    return runs[1:], times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sleep", type=float, default=0, metavar="MS", help="milliseconds of a pass; 0: products")
    parser.add_argument("--width", type=int, default=512, help="of each layer (default %(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="rows of a microbatch (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of each rank (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="default %(default)s")
    parser.add_argument("--chunks", type=int, default=2, help="of the interleaved schedule (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="steps of each schedule (default %(default)s)")
    parser.add_argument("--picture", metavar="PREFIX", help="write PREFIX-SCHEDULE.svg, how the step in the middle ran")
    options = parser.parse_args()
    comm = pc.init(devices=1)
    numbers = comm.size, options.microbatches
    schedules = [gpipe(*numbers), one_f_one_b(*numbers), interleaved(*numbers, options.chunks), zero_bubble(*numbers)]
    if comm.rank == 0:
        print(f"{'':14}{'planned':>10}{'least':>10}{'median':>10}{'noted':>12}{'plain':>12}")
    for schedule in schedules:
        runs, times = measure(schedule, options)
        runs.sort(key=lambda run: run.bubble)
        middle = runs[len(runs) // 2]
        planned = simulate(schedule).bubble
        if comm.rank == 0:
            noted = statistics.median(run.total for run in runs)
            bubbles = "".join(f"{100 * bubble:8.1f} %" for bubble in (planned, runs[0].bubble, middle.bubble))
            print(f"{schedule.name:14}{bubbles}{1e3 * noted:9.1f} ms{1e3 * statistics.median(times):9.1f} ms")
            if options.picture:
                picture(middle, f"{options.picture}-{schedule.name}.svg")


if __name__ == "__main__":
    main()
