"""How much of a training step's communication travels while the step computes.

    scripts/hosts --gbps 1 python benchmarks/gpt_step.py --layers 6 --width 256 --rows 8
    PYCOLLECTIVE_OVERLAP=off scripts/hosts --gbps 1 python benchmarks/gpt_step.py --layers 6 --width 256 --rows 8

Three programs take turns: a data-parallel training step of ``examples/gpt.py`` over all ranks; the same step of a rank
by itself, which only computes; and the sums of the gradients alone. The first should take as long as the longer of the
others, not as long as both. Each rank gets one core, as on a cluster, where hosts do not share cores.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import pycollective as pc
from pycollective.transport.mpi import MPI

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import gpt

VOCABULARY = 128


def take_one_core() -> None:
    """Comes before JAX makes its threads. Hosts of ``scripts/hosts`` share cores that each takes for its own."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[MPI.COMM_WORLD.rank % len(cores)]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6, help="of the network (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the network (default %(default)s)")
    parser.add_argument("--rows", type=int, default=[8], nargs="+", help="of each rank's batch (default 8)")
    parser.add_argument("--repeats", type=int, default=9, help="steps of each program (default %(default)s)")
    args = parser.parse_args()
    take_one_core()
    world = pc.init()
    alone = world.split(world.rank)
    params = gpt.init_params(np.random.default_rng(0), VOCABULARY, args.layers, args.width)
    optimizer = optax.adam(1e-3)
    state = optimizer.init(params)
    network = gpt.forward(gpt.part_names(args.layers))

    def program(comm: pc.Communicator, fun: Callable[..., Any], in_specs: Any) -> Callable[..., Any]:
        mesh = pc.make_mesh((-1, 1, 1), ("data", "context", "model"), comm=comm)
        return pc.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False)

    def mean(grads: Any) -> Any:
        return jax.tree.map(lambda g: lax.pmean(g, "data"), grads)

    def step(params: Any, state: Any, rows: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: network(p, None, (rows[:, :-1], rows[:, 1:])))(params)
        updates, state = optimizer.update(mean(grads), state, params)
        return optax.apply_updates(params, updates), state, lax.pmean(loss, "data")

    programs = {
        "step": program(world, step, (P(), P(), P("data"))),
        "compute": program(alone, step, (P(), P(), P("data"))),
        "communicate": program(world, mean, P()),
    }
    nbytes = sum(x.nbytes for x in jax.tree.leaves(params))
    overlap = os.environ.get("PYCOLLECTIVE_OVERLAP", "auto")
    if world.rank == 0:
        print(
            f"{world.size} ranks, {nbytes / 2**20:.1f} MiB of gradients, PYCOLLECTIVE_OVERLAP={overlap}; medians in ms"
        )
        print("rows   compute   communicate   step   step / longer   step / sum")
    for count in args.rows:
        rows = np.random.default_rng(1).integers(VOCABULARY, size=(count, gpt.CONTEXT + 1))
        arguments = {"step": (params, state, rows), "compute": (params, state, rows), "communicate": (params,)}
        arguments = jax.device_put(arguments)
        times = {name: [] for name in programs}
        for turn in range(args.repeats + 2):
            for name, run in programs.items():
                world.mpi.Barrier()
                begin = time.perf_counter()
                jax.block_until_ready(run(*arguments[name]))
                taken = max(world.mpi.allgather(time.perf_counter() - begin))
                if turn >= 2:  # the first compile
                    times[name].append(taken * 1e3)
        compute, communicate, step = (float(np.median(times[name])) for name in ("compute", "communicate", "step"))
        if world.rank == 0:
            longer = step / max(compute, communicate)
            share = step / (compute + communicate)
            print(f"{count:4} {compute:9.1f} {communicate:13.1f} {step:6.1f} {longer:15.2f} {share:12.2f}", flush=True)


if __name__ == "__main__":
    main()
