"""A ring in a loop that carries its result, by ppermute and by sendrecv, over raw MPI's Sendrecv.

Each rank sends an array to the next rank and receives one from the rank before. Our loops and raw MPI's take turns in
one run; raw MPI uses two arrays in turns. Microseconds for a step, medians over the calls on rank 0.

    scripts/hosts --hosts 2 --ranks 1 python benchmarks/ring.py
    mpirun -n 2 python benchmarks/ring.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import pycollective as pc

STEPS = 20
SIZES = [256 * 4**i for i in range(8)]


def microseconds(step: Callable[[], object]) -> float:
    """The time of a step, of a call that makes STEPS of them when all ranks have come."""
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    step()
    return (time.perf_counter() - begin) / STEPS * 1e6


def measure(nbytes: int, calls: int) -> dict[str, float]:
    """Returns the median time of a step of each kind."""
    comm, world = MPI.COMM_WORLD, pc.world()
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    ring = [(rank, (rank + 1) % world.size) for rank in range(world.size)]

    def in_loop(step: Callable[[jax.Array], jax.Array]) -> Callable[[], object]:
        program = pc.jit(lambda x: jax.lax.fori_loop(0, STEPS, lambda _, y: step(y), x))
        x = jnp.arange(nbytes // 4, dtype=jnp.float32)
        whole_turn = np.roll(np.arange(world.size), STEPS)[world.rank]
        assert np.array_equal(program(x + world.rank), x + whole_turn)  # compiles it as well
        return lambda: program(x).block_until_ready()

    arrays = [np.zeros(nbytes // 4, np.float32) for _ in range(2)]

    def raw() -> None:
        for i in range(STEPS):
            comm.Sendrecv(arrays[i % 2], after, 0, arrays[(i + 1) % 2], before, 0)

    kinds = {
        "raw": raw,
        "ppermute": in_loop(lambda y: pc.ppermute(y, None, ring)),
        "sendrecv": in_loop(lambda y: pc.sendrecv(y, source=before, dest=after)),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(calls):
        for kind, call in kinds.items():
            times[kind].append(microseconds(call))
    return {kind: statistics.median(values) for kind, values in times.items()}


def main() -> None:
    """Prints a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=60, help="timed calls, fewer from 1 MiB on (default 60)")
    options = parser.parse_args()
    pc.init()
    for nbytes in SIZES:
        times = measure(nbytes, options.calls if nbytes < 1 << 20 else options.calls // 4)
        if pc.world().rank == 0:
            ratios = "  ".join(f"{kind} {us:8.1f} ({us / times['raw']:.2f})" for kind, us in times.items())
            print(f"{nbytes:8d} B  {ratios}", flush=True)


if __name__ == "__main__":
    main()
