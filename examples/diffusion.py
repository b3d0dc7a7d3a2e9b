"""Finds how well a material conducts from a temperature that was measured: gradient descent through a linear solver.

    python examples/diffusion.py
    mpirun -n 2 python examples/diffusion.py --size 128
    JAX_NUM_CPU_DEVICES=2 mpirun -n 2 python examples/diffusion.py --columns 2     # 2 x 2 devices

On the unit square, with the temperature u = 0 at its border, a conductivity k > 0 and one source of heat everywhere:

    -div(k grad u) = 1

The grid is cut into blocks, one for each device. The difference operator needs one row or column of the neighbours,
which ``halo_exchange`` fetches; it is symmetric and positive, so ``pc.linalg.cg`` solves the system, with the inverse
of the diagonal as its preconditioner. The logarithm of k is a sum of 9 waves, whose amplitudes Adam finds. The gradient
needs one more solution of the same system: ``jax.grad`` goes through ``cg``, and through the messages in the operator.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import pycollective as pc
from pycollective.parallel.spatial import halo_exchange

AXES = ("y", "x")
TRUTH = np.array([[0.3, -0.5, 0.2], [0.4, 0.1, -0.2], [-0.3, 0.2, 0.1]], np.float32)  # amplitudes of the waves


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=64, help="points along each side (default %(default)s)")
    parser.add_argument("--columns", type=int, default=1, help="devices from left to right (default %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of the descent (default %(default)s)")
    parser.add_argument("--output", type=Path, help="write the amplitudes, losses and temperature to this .npz file")
    return parser.parse_args()


def conductivity(amplitudes, shape, size):
    """Returns k at this device's points, with one more row or column at each side."""
    y, x = ((lax.axis_index(name) * n + jnp.arange(n + 2)) / (size + 1) for name, n in zip(AXES, shape, strict=True))
    waves = jnp.arange(3)[:, None]
    return jnp.exp(jnp.einsum("ab,ai,bj->ij", amplitudes, jnp.cos(np.pi * waves * y), jnp.cos(np.pi * waves * x)))


def temperature(amplitudes, shape, size):
    """Returns u at this device's points, and how the solver ended."""
    k = conductivity(amplitudes, shape, size)
    below, right = (k[:-1] + k[1:])[:, 1:-1] / 2, (k[:, :-1] + k[:, 1:])[1:-1] / 2  # between two points
    diagonal = below[:-1] + below[1:] + right[:, :-1] + right[:, 1:]

    def operator(u):
        vertical = halo_exchange(u, "y", 1, axis=0)
        horizontal = halo_exchange(u, "x", 1, axis=1)
        flow = jnp.diff(below * jnp.diff(vertical, axis=0), axis=0)
        return -flow - jnp.diff(right * jnp.diff(horizontal, axis=1), axis=1)

    source = jnp.full(shape, 1 / (size + 1) ** 2)
    return pc.linalg.cg(operator, source, axis_name=AXES, tol=1e-5, M=lambda r: r / diagonal)


def main():
    args = parse_arguments()
    comm = pc.init()
    prints, devices = comm.rank == 0, comm.size * jax.local_device_count()
    rows = devices // max(1, args.columns)
    if args.columns < 1 or rows * args.columns != devices or args.size % rows or args.size % args.columns:
        error = (
            f"diffusion: expected --columns to be a divisor of {devices} devices, and --size a multiple of the rows "
            f"and columns of devices, got --columns {args.columns}, --size {args.size}. Choose powers of two."
        )
        sys.exit(error if prints else 1)

    mesh, blocks = pc.make_mesh((rows, args.columns), AXES), P(*AXES)
    shape = (args.size // rows, args.size // args.columns)
    solve = pc.shard_map(
        lambda amplitudes: temperature(amplitudes, shape, args.size), mesh=mesh, in_specs=P(), out_specs=(blocks, P())
    )
    measured, info = solve(TRUTH)

    def misfit(amplitudes, measured):
        u, _ = temperature(amplitudes, shape, args.size)
        return lax.psum(jnp.sum((u - measured) ** 2), AXES) / lax.psum(jnp.sum(measured**2), AXES)

    gradient = pc.shard_map(jax.value_and_grad(misfit), mesh=mesh, in_specs=(P(), blocks), out_specs=(P(), P()))
    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, args.steps))
    amplitudes = jnp.zeros_like(TRUTH)
    state, losses = optimizer.init(amplitudes), []
    with tqdm(total=args.steps, unit="step", disable=not prints) as bar:
        for _ in range(args.steps):
            loss, grad = gradient(amplitudes, measured)
            updates, state = optimizer.update(grad, state)
            amplitudes = optax.apply_updates(amplitudes, updates)
            losses.append(float(loss))
            bar.set_postfix(loss=f"{losses[-1]:.2e}")
            bar.update()

    whole = pc.shard_map(
        lambda u: lax.all_gather(lax.all_gather(u, "y", axis=0, tiled=True), "x", axis=1, tiled=True),
        mesh=mesh,
        in_specs=blocks,
        out_specs=P(),
        check_vma=False,
    )(measured)
    if prints:
        print(f"{rows} x {args.columns} devices, {args.size} x {args.size} points")
        print(f"solver: {int(info.iterations)} iterations, residual {float(info.residual_norm):.1e}")
        error = np.abs(amplitudes - TRUTH).max()
        print(f"misfit {losses[0]:.1e} -> {losses[-1]:.1e}, largest error of an amplitude {error:.3f}")
        if args.output:
            np.savez(args.output, amplitudes=amplitudes, losses=losses, temperature=whole)


if __name__ == "__main__":
    main()
