"""Draws a random field with a given power spectrum in a periodic cube, and measures the spectrum of the field.

    python examples/power_spectrum.py
    mpirun -n 4 python examples/power_spectrum.py --size 128 --exponent -2.5
    mpirun -n 2 python examples/power_spectrum.py --output spectrum.npz

White noise is transformed, multiplied by the square root of the power k^exponent, and transformed back. The result is
the field, as in simulations of the large-scale structure of the universe. Its power is the mean of |spectrum|^2 over
the modes of each shell of wave numbers. The spectrum of a real field has the modes with one sign of the last wave
number only, so most of them count twice. With N modes, the measured power has a standard deviation of sqrt(2 / N) of
the given power.

The cube is cut along its first dimension and the spectrum along its second. Each row of noise has a key of its own, so
the field is the same on any number of devices.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import pycollective as pc

CUBE, SPECTRUM = P("i"), P(None, "i")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=64, help="points along each side (default %(default)s)")
    parser.add_argument("--exponent", type=float, default=-2.0, help="of the power k^exponent (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default %(default)s)")
    parser.add_argument("--output", type=Path, help="write wave numbers, powers and numbers of modes to this .npz file")
    return parser.parse_args()


def wave_numbers(size):
    """Returns |k| of the modes of this device's block of the spectrum, and how often each counts."""
    z, y, x = jnp.fft.fftfreq(size, 1 / size), pc.fft.fftfreq(size, "i", 1 / size), jnp.fft.rfftfreq(size, 1 / size)
    is_inside = pc.fft.cut(jnp.ones(size), "i")[:, None]
    has_partner = (x > 0) & (2 * x < size)
    counts = jnp.where(has_partner, 2, 1) * is_inside * jnp.ones((size, 1, 1))
    return jnp.sqrt(z[:, None, None] ** 2 + y[:, None] ** 2 + x**2), counts


def random_field(size, exponent, seed):
    rows = pc.fft.cut(jnp.arange(size), "i")

    def draw(row):
        return jax.random.normal(jax.random.fold_in(jax.random.key(seed), row), (size, size))

    white = pc.fft.rfftn(jax.vmap(draw)(rows), CUBE, (size,) * 3, out_spec=SPECTRUM)
    k, _ = wave_numbers(size)
    amplitude = jnp.where(k > 0, jnp.where(k > 0, k, 1) ** (exponent / 2), 0)
    return pc.fft.irfftn(white * amplitude, SPECTRUM, (size,) * 3, out_spec=CUBE)


def power_spectrum(field, size, exponent):
    """Returns the power, the mean of the given power, and the number of modes, of the shells around k = 1, 2, ..."""
    modes = pc.fft.rfftn(field, CUBE, (size,) * 3, norm="ortho", out_spec=SPECTRUM)
    k, counts = wave_numbers(size)
    given = jnp.where(k > 0, jnp.where(k > 0, k, 1) ** exponent, 0)
    shells = jnp.round(k).astype(int).ravel()

    def in_shells(weights):
        return jnp.bincount(shells, weights.ravel(), length=size // 2)[1:]

    totals = lax.psum((in_shells(counts * jnp.abs(modes) ** 2), in_shells(counts * given), in_shells(counts)), "i")
    return totals[0] / totals[2], totals[1] / totals[2], totals[2]


def main():
    args = parse_arguments()
    if args.size < 4:
        sys.exit(f"expected --size of at least 4, got {args.size}")
    world = pc.init()
    devices = world.size * jax.local_device_count()

    def measure():
        field = random_field(args.size, args.exponent, args.seed)
        return power_spectrum(field, args.size, args.exponent)

    mesh = pc.make_mesh((devices,), ("i",))
    power, given, modes = map(np.asarray, pc.shard_map(measure, mesh=mesh, in_specs=(), out_specs=P())())
    if world.rank != 0:
        return
    print(f"{devices} devices, {args.size}^3 points\n    k      modes      power      given   deviations")
    deviations = (power / given - 1) * np.sqrt(modes / 2)
    for i in range(len(power)):
        print(f"{i + 1:5d} {modes[i]:10.0f} {power[i]:10.3e} {given[i]:10.3e} {deviations[i]:12.2f}")
    if args.output:
        np.savez(args.output, k=np.arange(1, len(power) + 1), power=power, given=given, modes=modes)


if __name__ == "__main__":
    main()
