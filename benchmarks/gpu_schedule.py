"""Shows the order in which XLA would run a training step on a GPU. It compiles the step on a machine without one.

    scripts/cuda-compiler python -m benchmarks.gpu_schedule --layers 6

It prints the scheduled program as letters: m is a product, C a copy of a whole matrix, A a sum between ranks, S and D
are the start and the end of such a sum. Products between S and D are computed while the sum is under way
(``pycollective/named_axes/overlap.py``). The GPU is an H100, from a description of it.
"""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp
from jax import lax

import pycollective as pc
from pycollective.bench.workloads import AXIS, step
from pycollective.named_axes import overlap
from tests.compiled_for_gpu import compiler
from tests.compiled_for_gpu.checks import letters


def train(*params: jax.Array) -> tuple[jax.Array, ...]:
    return step(params, lambda grads: lax.pmean(grads, AXIS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--width", type=int, default=2048, help="of the float32 weights; from 512 on each has a bucket of its own"
    )
    options = parser.parse_args()
    compiler.start(devices=1)
    w = jax.ShapeDtypeStruct((options.width, options.width), jnp.float32)
    overlapped = overlap.Overlap.__call__
    for name, arrange in (("as written", lambda _, jaxpr: jaxpr), ("overlap.py", overlapped)):
        overlap.Overlap.__call__ = arrange
        function = pc.jit(train, axis_name=AXIS, **compiler.on_one_gpu())
        program = compiler.compiled(function, *[w] * options.layers).program
        sys.stdout.write(f"{name:12} {letters(program, options.width**2)}\n")


if __name__ == "__main__":
    main()
