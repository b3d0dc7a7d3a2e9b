"""The same sum through jax.distributed with gloo, one process for each device: for comparison with named_axes.py.

    mpirun -n 4 python benchmarks/gloo.py --bytes 67108864

mpirun only starts the processes and tells them the port. Medians in microseconds, from process 0.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time

import jax
import numpy as np
from jax import lax
from mpi4py import MPI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=64 << 20, help="a device")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    port = world.bcast(port)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", world.size, world.rank)
    total = jax.pmap(lambda x: lax.psum(x, "i") / world.size, "i", devices=jax.devices())
    x = total(np.ones((1, options.bytes // 4), np.float32))
    times = []
    for _ in range(options.repeats):
        world.Barrier()
        start = time.perf_counter()
        x = jax.block_until_ready(total(x))
        times.append(time.perf_counter() - start)
    if world.rank == 0:
        us = statistics.median(times) * 1e6
        print(f"{world.size} processes, {options.bytes} B a device: {us:.0f} us", flush=True)


if __name__ == "__main__":
    main()
