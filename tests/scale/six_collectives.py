"""Six collectives in a program of ``pc.jit``, whose results are compared with NumPy's.

    scripts/hosts --hosts 16 --ranks 2 python tests/scale/six_collectives.py

Rank 0 writes the memory that it has taken.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pycollective as pc

RUNS = 3
"""The first run compares each call, a later one the program."""


def main() -> None:
    comm = pc.init()
    rank, size = comm.rank, comm.size
    next_ranks = [(of, (of + 1) % size) for of in range(size)]

    def operand(of: int) -> np.ndarray[Any, Any]:
        return np.arange(size * 8, dtype=np.float32).reshape(size, 8) % 7 + of

    @pc.jit
    def program(x: jax.Array) -> tuple[Any, ...]:
        return (
            pc.psum(x, comm),
            pc.all_gather(x, comm),
            pc.psum_scatter(x, comm),
            pc.all_to_all(x, comm),
            pc.ppermute(x, comm, next_ranks),
            pc.broadcast(x, comm, root=size - 1),
        )

    everyone = np.stack([operand(of) for of in range(size)])
    total = everyone.sum(0)
    wanted = [total, everyone, total[rank], everyone[:, rank], operand((rank - 1) % size), operand(size - 1)]
    for _ in range(RUNS):
        for got, want in zip(program(jnp.asarray(operand(rank))), wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)
    if rank == 0:
        mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        sys.stdout.write(f"all results are right on {size} ranks; rank 0 took up to {mebibytes:.0f} MiB\n")


if __name__ == "__main__":
    main()
