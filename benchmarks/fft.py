"""A three-dimensional transform of an array that is cut along its first dimension, over raw MPI and one process.

The kinds take turns in one run. Raw MPI is a flat transposition: jnp.fft of two dimensions, a copy into the blocks of
the ranks, MPI_Alltoall, jnp.fft of the first dimension. For a result that is cut as the operand a second MPI_Alltoall
follows. One process is rank 0 with the whole array, while the others wait. Milliseconds, medians over the calls of rank
0.

    mpirun -n 2 python benchmarks/fft.py
    scripts/hosts --hosts 2 --ranks 1 --gbps 1 python benchmarks/fft.py --pieces 1 2 4
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

COMM = MPI.COMM_WORLD


def milliseconds(call: Callable[[], object]) -> float:
    """The time of a call that begins when all ranks have come."""
    COMM.Barrier()
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def flat_transposition(n: int, *, back: bool) -> Callable[[np.ndarray], jax.Array]:
    """Returns the transform by raw MPI, of this rank's rows of an array of n^3 entries."""
    size, part = COMM.size, n // COMM.size
    first = jax.jit(lambda x: jnp.fft.fftn(x, axes=(1, 2)))
    second = jax.jit(lambda x: jnp.fft.fft(x, axis=0))

    def transform(x: np.ndarray) -> jax.Array:
        rows = np.asarray(first(x)).reshape(part, size, part, n)
        packed = np.ascontiguousarray(rows.transpose(1, 0, 2, 3))
        received = np.empty_like(packed)
        COMM.Alltoall(packed, received)
        y = second(received.reshape(n, part, n))
        if not back:
            return y.block_until_ready()
        COMM.Alltoall(np.asarray(y), received)
        joined = np.ascontiguousarray(received.reshape(size, part, part, n).transpose(1, 0, 2, 3))
        return jnp.asarray(joined.reshape(part, n, n)).block_until_ready()

    return transform


def kinds(n: int, all_pieces: list[int], dtype: str) -> dict[str, Callable[[], object]]:
    """Returns the calls to be timed. Their results have been compared."""
    world = pc.world()
    whole = np.random.default_rng(0).normal(size=(n, n, n)).astype(np.float32).astype(dtype)
    part = n // world.size
    rows = slice(world.rank * part, (world.rank + 1) * part)
    x = jnp.asarray(whole[rows])
    on_host = np.asarray(x)
    calls: dict[str, Callable[[], object]] = {}
    want = np.fft.fftn(whole)
    tolerance = 1e-5 * np.abs(want).max()
    for result, out_spec, own in (("moved", jax.P(None, world), want[:, rows]), ("in place", jax.P(world), want[rows])):
        raw = flat_transposition(n, back=result == "in place")
        np.testing.assert_allclose(raw(on_host), own, atol=tolerance)
        calls[f"{result}, raw MPI"] = lambda raw=raw: raw(on_host)
        for pieces in all_pieces:
            run = pc.jit(lambda x, out_spec=out_spec, pieces=pieces: pc.fft.fftn(x, out_spec=out_spec, pieces=pieces))
            np.testing.assert_allclose(run(x), own, atol=tolerance)
            calls[f"{result}, pc.fft, {pieces} pieces"] = lambda run=run: run(x).block_until_ready()
    alone = jax.jit(jnp.fft.fftn)
    on_one = jnp.asarray(whole) if world.rank == 0 else None
    calls["one process"] = lambda: None if on_one is None else alone(on_one).block_until_ready()
    calls["one process"]()
    return calls


def main() -> None:
    """Prints a line for each size and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64, 128, 256], help="lengths of the three sides")
    parser.add_argument("--pieces", type=int, nargs="+", default=[1, 4], help="numbers of pieces (default 1 4)")
    parser.add_argument("--calls", type=int, default=15, help="timed calls of each kind (default 15)")
    parser.add_argument("--dtype", default="complex64", help="of the array (default complex64)")
    options = parser.parse_args()
    pc.init()
    for n in options.sizes:
        if n % COMM.size:
            parser.error(f"expected sizes that {COMM.size} ranks divide, got {n}")
        calls = kinds(n, options.pieces, options.dtype)
        times: dict[str, list[float]] = {kind: [] for kind in calls}
        for _ in range(options.calls):
            for kind, call in calls.items():
                times[kind].append(milliseconds(call))
        if COMM.rank == 0:
            medians = {kind: statistics.median(values) for kind, values in times.items()}
            for kind, median in medians.items():
                raw = medians.get(f"{kind.split(',')[0]}, raw MPI")
                ratio = "" if raw is None else f"  ({median / raw:.2f} of raw MPI)"
                print(f"{n:4d}^3  {kind:28s} {median:9.2f} ms{ratio}", flush=True)


if __name__ == "__main__":
    main()
