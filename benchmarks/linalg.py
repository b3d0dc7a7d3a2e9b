"""Iterations per second of conjugate gradients, beside those of NumPy with mpi4py, and of JAX in one process.

    mpirun -n 2 python benchmarks/linalg.py
    python benchmarks/linalg.py

The matrix is that of the Laplace operator on a square, whose rows are cut over the ranks. A product with it fetches one
row of each neighbour. The three programs take turns, so that what else the machine does meets all of them; the figures
are the fastest of all rounds, since other work only adds time. In the second program each rank calls NumPy,
MPI_Sendrecv twice and MPI_Allreduce twice in an iteration, as the classical form of the method needs. The third is
``jax.scipy.sparse.linalg.cg`` on rank 0, with the whole square; the other ranks sleep meanwhile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pycollective as pc
from pycollective.transport.mpi import MPI

Array = Any


def laplace(u: Array, above: Array, below: Array, module: Any) -> Array:
    """Returns the product with rows of the matrix, given the rows before and after them."""
    tall = module.concatenate([above, u, below])
    wide = module.pad(u, ((0, 0), (1, 1)))
    return 4 * u - tall[:-2] - tall[2:] - wide[:, :-2] - wide[:, 2:]


def ours(comm: pc.Communicator, iterations: int) -> Callable[[Array], Any]:
    down = [(r, r + 1) for r in range(comm.size - 1)]
    up = [(r + 1, r) for r in range(comm.size - 1)]

    def operator(u: Array) -> Array:
        return laplace(u, pc.ppermute(u[-1:], comm, down), pc.ppermute(u[:1], comm, up), jnp)

    return pc.jit(lambda b: pc.linalg.cg(operator, b, axis_name=comm, tol=0, maxiter=iterations)[0])


def by_mpi4py(comm: pc.Communicator, iterations: int) -> Callable[[Array], Any]:
    mpi = comm.mpi
    before = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    after = comm.rank + 1 if comm.rank + 1 < comm.size else MPI.PROC_NULL

    def operator(u: Array) -> Array:
        above, below = np.zeros_like(u[:1]), np.zeros_like(u[:1])
        mpi.Sendrecv(u[-1:], after, 0, above, before, 0)
        mpi.Sendrecv(u[:1], before, 1, below, after, 1)
        return laplace(u, above, below, np)

    def dot(x: Array, y: Array) -> Any:
        total = np.empty(1, x.dtype)
        mpi.Allreduce(np.vdot(x, y)[None], total)
        return total[0]

    def solve(b: Array) -> Array:
        x, r, p = np.zeros_like(b), b.copy(), b.copy()
        squares = dot(r, r)
        for _ in range(iterations):
            q = operator(p)
            alpha = squares / dot(p, q)
            x += alpha * p
            r -= alpha * q
            squares, old = dot(r, r), squares
            p = r + squares / old * p
        return x

    return solve


def in_one_process(iterations: int) -> Callable[[Array], Any]:
    def operator(u: Array) -> Array:
        zeros = jnp.zeros_like(u[:1])
        return laplace(u, zeros, zeros, jnp)

    return jax.jit(lambda b: jax.scipy.sparse.linalg.cg(operator, b, tol=0, maxiter=iterations)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sides", type=int, nargs="+", default=[32, 256, 1024], help="points along each side")
    parser.add_argument("--iterations", type=int, default=50, help="of a solution (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=60, help="solutions by each program (default %(default)s)")
    args = parser.parse_args()
    comm = pc.init()
    if comm.rank == 0:
        print("| points | pycollective | mpi4py, NumPy | JAX, one process |\n| ---: | ---: | ---: | ---: |")
    for side in args.sides:
        rows = side // comm.size
        whole = np.random.default_rng(0).standard_normal((rows * comm.size, side)).astype(np.float32)
        part = whole[rows * comm.rank : rows * (comm.rank + 1)]
        programs: list[tuple[Callable[[Array], Any], Array]] = [
            (ours(comm, args.iterations), jnp.asarray(part)),
            (by_mpi4py(comm, args.iterations), part),
        ]
        if comm.rank == 0:
            programs.append((in_one_process(args.iterations), jnp.asarray(whole)))
        times: list[list[float]] = [[] for _ in programs]
        results = [np.asarray(solve(b)) for solve, b in programs]
        np.testing.assert_allclose(results[0], results[1], 0, 1e-2 * np.abs(results[1]).max())
        for _ in range(args.rounds):
            for (solve, b), taken in zip(programs, times, strict=True):
                begun = time.perf_counter()
                jax.block_until_ready(solve(b))
                taken.append(time.perf_counter() - begun)
            waits = comm.mpi.Ibarrier()
            while not waits.Test():
                time.sleep(0.001)
        if comm.rank == 0:
            rates = (f"{args.iterations / min(taken):,.0f}/s" for taken in times)
            print(f"| {side} x {side} |", " | ".join(rates), "|", flush=True)


if __name__ == "__main__":
    main()
