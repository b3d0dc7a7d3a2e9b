"""Sums small whole numbers many times, between kernels that make and use them, and compares the sums on the device.

``steps.py`` starts this program on several ranks. All ranks begin with equal arrays, so a sum is known without a
collective: the number of ranks times the array, plus what each rank adds. A wait that is left out, on either side of a
sum, or memory that XLA has used again, gives another number. Nothing waits for a program but every 64th call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pycollective as pc
from pycollective.transport import native

_PRIME = 251
_SIZES = (1, 130, 4096, 70_000, 1 << 20, 3_000_001)
_DTYPES = ("float32", "int32", "bfloat16")
_FORMS = ("plain", "slice", "update", "scan", "tree")


def program(form: str, dtype: str, total: Callable[[Any], Any]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function of a vector of whole numbers below :data:`_PRIME`, whose result is one as well.

    Args:
        form: one of :data:`_FORMS`: what the sums are given, and what becomes of them.
        dtype: the dtype of the sums.
        total: sums a tree over ranks.
    """

    def once(x: jax.Array, k: jax.Array) -> jax.Array:
        a = ((x * k + 1) % _PRIME).astype(dtype)  # a kernel before
        half = max(len(a) // 2, 1)
        if form == "slice":
            s = jnp.concatenate([total(a[:half]), total(a[half:])]) if len(a) > 1 else total(a)
        elif form == "update":
            s = (total(a)).at[:half].set(total(a[:half] + 1))
        elif form == "tree":
            s = sum(total({"one": a, "two": a + 1, "three": a[::-1]}).values())
        else:
            s = total(a)
        return s.astype(jnp.int32) % _PRIME  # a kernel after

    def f(x: jax.Array, k: jax.Array) -> jax.Array:
        if form != "scan":
            return once(once(x, k), k + 1)
        return jax.lax.scan(lambda x, i: (once(x, k + i), None), x, jnp.arange(3, dtype=k.dtype))[0]

    return f


def main() -> None:
    """Runs the programs in turns until the time is over, and prints how many results were right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--largest", type=int, default=_SIZES[-1], help="size of the largest arrays, in elements")
    parser.add_argument("--forms", nargs="+", choices=_FORMS, default=_FORMS, help="what the programs do")
    options = parser.parse_args()
    world = pc.init()
    generator = np.random.default_rng(0)  # the same on all ranks
    sizes = itertools.cycle([size for size in _SIZES if size <= options.largest])
    cases, values = [], []
    for form, dtype in itertools.product(options.forms, _DTYPES):

        def alone(x: Any, dtype: str = dtype) -> Any:
            """What the sum is: whole numbers of at most 8 bits times the number of ranks, in the dtype of the sums."""
            return jax.tree.map(lambda x: (x.astype(jnp.float32) * world.size).astype(dtype), x)

        own = pc.jit(program(form, dtype, lambda x: pc.psum(x, world)), donate_argnums=0)
        cases.append((own, jax.jit(program(form, dtype, alone))))
        values.append(jnp.asarray(generator.integers(0, _PRIME, next(sizes)), jnp.int32))
    equal = jax.jit(lambda a, b, bad: bad + jnp.sum(a != b))
    bad = jnp.int32(0)
    began = time.monotonic()
    for calls in itertools.count(1):
        case = calls % len(cases) if calls <= len(cases) else int(generator.integers(len(cases)))
        own, reference = cases[case]
        k = jnp.int32(generator.integers(2, 100))
        want = reference(values[case], k)
        values[case] = own(values[case], k)  # it is donated
        bad = equal(values[case], want, bad)
        if calls == len(cases):
            bad.block_until_ready()
            began = time.monotonic()  # all programs are compiled
        if calls % 64 == 0:
            bad.block_until_ready()
            late = time.monotonic() - began > options.seconds
            if world.mpi.allreduce(late):  # all ranks stop together
                break
    wrong = world.mpi.allreduce(int(bad))
    if world.rank == 0:
        sys.stdout.write(f"soak: {json.dumps({'calls': calls, 'wrong': wrong, 'ahead': native.is_ahead()})}\n")


if __name__ == "__main__":
    main()
