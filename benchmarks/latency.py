"""Time of one allreduce: raw MPI, this package in each of its forms, and mpi4jax, interleaved in one run.

    mpirun -n 2 python benchmarks/latency.py [--json FILE]

Prints medians over all rounds and their ratio to raw MPI. A number of this machine at this time: compare within a run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import pycollective as pc

try:
    import mpi4jax
except ImportError:
    mpi4jax = None

LOOP = 1000
MIB = 2**20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="how often all contenders take turns (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the medians, in seconds, to this file")
    return parser.parse_args()


def measure(world: MPI.Comm, contenders: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """The median time of a call in seconds, as the slowest rank saw it; the contenders take turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        for _ in range(3):
            call()
    for _ in range(rounds):
        for name, call in contenders.items():
            call()
            for _ in range(calls):
                world.Barrier()
                started = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - started)
    return {name: world.allreduce(statistics.median(values), op=MPI.MAX) for name, values in times.items()}


def report(title: str, medians: dict[str, float], comm: pc.Communicator) -> None:
    if comm.rank == 0:
        raw = medians["raw MPI"]
        print(f"\n{title}")
        for name, value in medians.items():
            print(f"  {name:34s} {value * 1e6:11.1f} us   {value / raw:7.2f} x raw   {(value - raw) * 1e6:+11.1f} us")


def small(comm: pc.Communicator, rounds: int, nbytes: int) -> dict[str, float]:
    """One call on a small array."""
    send = np.ones(nbytes // 4, np.float32)
    recv = np.empty_like(send)
    x = jnp.asarray(send)
    world = comm.mpi
    fast = pc.jit(lambda x: pc.psum(x, comm))
    plain = jax.jit(lambda x: pc.psum(x, comm))
    alone = jax.jit(lambda x: x + 1)
    contenders = {
        "raw MPI": lambda: world.Allreduce(send, recv),
        "pc.jit": lambda: fast(x).block_until_ready(),
        "jax.jit": lambda: plain(x).block_until_ready(),
        "eager": lambda: pc.psum(x, comm).block_until_ready(),
        "jax.jit without communication": lambda: alone(x).block_until_ready(),
    }
    if mpi4jax is not None:
        peer = jax.jit(lambda x: first(mpi4jax.allreduce(x, op=MPI.SUM, comm=world)))
        contenders["mpi4jax in jax.jit"] = lambda: peer(x).block_until_ready()
    return measure(world, contenders, rounds, calls=100)


def first(result: object) -> jax.Array:
    """mpi4jax before 0.9 returns (array, token)."""
    return result[0] if isinstance(result, tuple) else result


def looped(comm: pc.Communicator, rounds: int) -> dict[str, float]:
    """A call inside a loop of the program; halved, so that the values stay finite."""
    send = np.ones(1, np.float32)
    recv = np.empty_like(send)
    x = jnp.asarray(send)
    world = comm.mpi

    def raw() -> None:
        for _ in range(LOOP):
            world.Allreduce(send, recv)

    loop = pc.jit(lambda x: jax.lax.fori_loop(0, LOOP, lambda _, c: pc.psum(c, comm) * 0.5, x))
    contenders = {"raw MPI": raw, "pc.jit": lambda: loop(x).block_until_ready()}
    if mpi4jax is not None:

        def body(_: int, c: jax.Array) -> jax.Array:
            return first(mpi4jax.allreduce(c, op=MPI.SUM, comm=world)) * 0.5

        peer = jax.jit(lambda x: jax.lax.fori_loop(0, LOOP, body, x))
        contenders["mpi4jax in jax.jit"] = lambda: peer(x).block_until_ready()
    return {name: value / LOOP for name, value in measure(world, contenders, rounds, calls=2).items()}


def large(comm: pc.Communicator, rounds: int, nbytes: int) -> dict[str, float]:
    """One call on a large array, with and without donation of the operand."""
    send = np.ones(nbytes // 4, np.float32)
    recv = np.empty_like(send)
    x = jnp.asarray(send)
    donated = [jnp.zeros_like(x)]
    world = comm.mpi
    keep = pc.jit(lambda x: pc.psum(x, comm))
    give = pc.jit(lambda x: pc.psum(x, comm), donate_argnums=0)

    def call_donated() -> None:
        donated[0] = give(donated[0]).block_until_ready()

    contenders = {
        "raw MPI": lambda: world.Allreduce(send, recv),
        "pc.jit, donated": call_donated,
        "pc.jit, not donated": lambda: keep(x).block_until_ready(),
    }
    if mpi4jax is not None:
        peer = jax.jit(lambda x: first(mpi4jax.allreduce(x, op=MPI.SUM, comm=world)))
        contenders["mpi4jax in jax.jit"] = lambda: peer(x).block_until_ready()
    return measure(world, contenders, rounds, calls=3)


def main() -> None:
    args = parse_arguments()
    comm = pc.world()
    results = {}
    for title, run in (
        ("one call, 4 B", lambda: small(comm, args.rounds, 4)),
        ("one call, 1 KiB", lambda: small(comm, args.rounds, 1024)),
        ("one call, 64 KiB", lambda: small(comm, args.rounds, 64 * 1024)),
        (f"one of {LOOP} calls in a loop, 4 B", lambda: looped(comm, args.rounds)),
        ("one call, 1 MiB", lambda: large(comm, args.rounds, MIB)),
        ("one call, 16 MiB", lambda: large(comm, args.rounds, 16 * MIB)),
        ("one call, 64 MiB", lambda: large(comm, args.rounds, 64 * MIB)),
    ):
        results[title] = run()
        report(title, results[title], comm)
    if comm.rank == 0 and args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
