"""Solves Poisson's equation in a periodic cube by Fourier transforms, and differentiates the solver.

    python examples/poisson.py
    mpirun -n 2 python examples/poisson.py --size 96
    JAX_NUM_CPU_DEVICES=2 mpirun -n 2 python examples/poisson.py --columns 2     # 2 x 2 devices

The equation is -laplace(u) = f in a cube of side 2 pi, where f and u have the mean 0. In frequencies it is a division
by |k|^2. The cube is cut along its first two dimensions, its spectrum along the last two, which saves exchanges. Any
size works: the blocks of the last devices may be shorter, and end with padding.

The solution is known, u = exp(sin x + sin y + sin z) less its mean, and so is the gradient of a misfit. With
J(f) = h^3 / 2 sum (u(f) - target)^2 the gradient is h^3 times the solution of the same equation for u(f) - target. The
example prints the largest errors of both, relative to the largest value.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import pycollective as pc

CUBE, SPECTRUM = P("y", "x"), P(None, "y", "x")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=64, help="points along each side (default %(default)s)")
    parser.add_argument("--columns", type=int, default=1, help="devices along the second side (default %(default)s)")
    parser.add_argument("--double", action="store_true", help="compute in double precision")
    return parser.parse_args()


def solve(f, size):
    """Returns this device's block of u, for its block of f."""
    shape = (size,) * 3
    z, y, x = jnp.fft.fftfreq(size, 1 / size), pc.fft.fftfreq(size, "y", 1 / size), pc.fft.rfftfreq(size, "x", 1 / size)
    squares = z[:, None, None] ** 2 + y[:, None] ** 2 + x**2
    spectrum = pc.fft.rfftn(f, CUBE, shape, out_spec=SPECTRUM)
    spectrum = jnp.where(squares > 0, spectrum / jnp.where(squares > 0, squares, 1), 0)
    return pc.fft.irfftn(spectrum, SPECTRUM, shape, out_spec=CUBE)


def errors(size):
    """Returns the relative errors of the solution and of the gradient."""
    points = 2 * jnp.pi * jnp.arange(size) / size
    z, y, x = pc.fft.cut(points, "y")[:, None, None], pc.fft.cut(points, "x")[:, None], points
    ones = jnp.ones(size)
    is_inside = pc.fft.cut(ones, "y")[:, None, None] * pc.fft.cut(ones, "x")[:, None] * ones > 0

    def centred(u):
        """Returns u less its mean, and zeros in the padding."""
        mean = lax.psum(jnp.sum(jnp.where(is_inside, u, 0)), ("y", "x")) / size**3
        return jnp.where(is_inside, u - mean, 0)

    exact = jnp.exp(jnp.sin(x) + jnp.sin(y) + jnp.sin(z))
    f = centred(-exact * sum(jnp.cos(a) ** 2 - jnp.sin(a) for a in (x, y, z)))
    exact = centred(exact)
    target = centred(jnp.cos(x) * jnp.sin(2 * y) + jnp.sin(3 * z))

    def misfit(f):
        """Returns this device's term: in reverse mode the terms of all devices count."""
        return (2 * jnp.pi / size) ** 3 / 2 * jnp.sum((solve(f, size) - target) ** 2)

    def relative(got, want):
        return lax.pmax(jnp.max(jnp.abs(got - want)), ("y", "x")) / lax.pmax(jnp.max(jnp.abs(want)), ("y", "x"))

    gradient = (2 * jnp.pi / size) ** 3 * solve(exact - target, size)
    return relative(solve(f, size), exact), relative(jax.grad(misfit)(f), gradient)


def main():
    args = parse_arguments()
    if args.double:
        jax.config.update("jax_enable_x64", True)
    world = pc.init()
    devices = world.size * jax.local_device_count()
    if args.size < 1 or args.columns < 1 or devices % args.columns:
        got = f"--size {args.size}, --columns {args.columns}"
        sys.exit(f"expected a positive --size and --columns to be a divisor of {devices} devices, got {got}")
    mesh = pc.make_mesh((devices // args.columns, args.columns), ("y", "x"))
    run = pc.shard_map(lambda: errors(args.size), mesh=mesh, in_specs=(), out_specs=P())
    of_solution, of_gradient = run()
    if world.rank == 0:
        print(
            f"{devices // args.columns} x {args.columns} devices, {args.size}^3 points: "
            f"error of the solution {np.asarray(of_solution):.1e}, of the gradient {np.asarray(of_gradient):.1e}"
        )


if __name__ == "__main__":
    main()
