"""Solves the equations of shallow water on a doubly periodic square that is cut into blocks, one for each device.

    python examples/shallow_water.py
    mpirun -n 2 python examples/shallow_water.py --plot jets.png
    JAX_NUM_CPU_DEVICES=2 mpirun -n 2 python examples/shallow_water.py --columns 2     # 2 x 2 devices

Two jets on a rotating plane, one to the east and one to the west, bend and break up into vortices. With the depth h,
the velocities u and v, the potential vorticity q = (f + dv/dx - du/dy) / h and B = g h + (u^2 + v^2) / 2:

    du/dt =  q h v - dB/dx        dv/dt = -q h u - dB/dy        dh/dt = -d(h u)/dx - d(h v)/dy

The grid is Arakawa's C grid: h lies in the middle of a cell, u on its eastern edge, v on its northern edge, q at its
northeastern corner. Differences and means are those of Sadourny that conserve energy ("The Dynamics of
Finite-Difference Models of the Shallow-Water Equations", J. Atmos. Sci. 32, 1975); time steps are those of Runge and
Kutta, of fourth order. Vorticity on the scale of the cells piles up in the end, since nothing dissipates it. Each
tendency needs one row or column of the neighbours, which ``halo_exchange`` fetches. Besides that only the sums and the
output communicate. The fields are the same on any mesh, up to rounding.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import erf
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import pycollective as pc
from pycollective.parallel import join_from
from pycollective.parallel.spatial import halo_exchange

GRAVITY, DEPTH, CORIOLIS = 9.81, 100.0, 1e-4  # m/s^2, m, 1/s
SIDE, JET_SPEED, JET_WIDTH = 1e6, 12.0, 4e4  # m, m/s, m
STEP_OF_WAVES = 0.4  # cells that a wave passes in a time step; the scheme is stable below 1


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500, help="of time (default %(default)s)")
    parser.add_argument("--size", type=int, default=128, help="cells along each side (default %(default)s)")
    parser.add_argument("--columns", type=int, default=1, help="devices from west to east (default %(default)s)")
    parser.add_argument("--report-every", type=int, default=100, help="steps between two sums (default %(default)s)")
    parser.add_argument("--output", type=Path, help="write fields, masses and energies to this .npz file")
    parser.add_argument("--plot", type=Path, help="draw the vorticity at the end to this file")
    return parser.parse_args()


# The equations, on a block with a border of one cell ----------------------------------------------------------


def mean_x(a):
    return (a[:, 1:] + a[:, :-1]) / 2


def mean_y(a):
    return (a[1:] + a[:-1]) / 2


def vorticity(u, v, cell):
    """Returns dv/dx - du/dy at the corners between the cells."""
    return (jnp.diff(v[:-1], axis=1) - jnp.diff(u[:, :-1], axis=0)) / cell


def with_neighbours(state):
    """Adds the border. The second exchange carries what the first has fetched, and so the corners."""
    state = halo_exchange(state, "y", 1, axis=1, periodic=True)
    return halo_exchange(state, "x", 1, axis=2, periodic=True)


def tendencies(state, cell):
    """Returns the rates of change of h, u and v, stacked."""
    h, u, v = with_neighbours(state)
    hu = mean_x(h) * u[:, :-1]
    hv = mean_y(h) * v[:-1]
    q = (CORIOLIS + vorticity(u, v, cell)) / mean_x(mean_y(h))
    b = GRAVITY * h[1:, 1:] + (mean_x(u**2)[1:] + mean_y(v**2)[:, 1:]) / 2
    dh = -(jnp.diff(hu[1:-1], axis=1) + jnp.diff(hv[:, 1:-1], axis=0)) / cell
    du = mean_y(q * mean_x(hv))[:, 1:] - jnp.diff(b[:-1], axis=1) / cell
    dv = -mean_x(q * mean_y(hu))[1:] - jnp.diff(b[:, :-1], axis=0) / cell
    return jnp.stack([dh, du, dv])


def time_step(state, cell):
    dt = STEP_OF_WAVES * cell / np.sqrt(GRAVITY * DEPTH)
    k1 = tendencies(state, cell)
    k2 = tendencies(state + dt / 2 * k1, cell)
    k3 = tendencies(state + dt / 2 * k2, cell)
    k4 = tendencies(state + dt * k3, cell)
    return state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def two_jets(shape, cell):
    """Returns this device's block of the first state: jets whose Coriolis force the slope of the water balances."""
    y, x = (cell * (lax.axis_index(name) * n + jnp.arange(n)) for name, n in zip(("y", "x"), shape, strict=True))
    north, south = (y - 0.25 * SIDE) / JET_WIDTH, (y - 0.75 * SIDE) / JET_WIDTH
    u = JET_SPEED * (jnp.exp(-(north**2)) - jnp.exp(-(south**2)))
    slope = CORIOLIS * JET_SPEED * JET_WIDTH * np.sqrt(np.pi) / (2 * GRAVITY)
    h = DEPTH - slope * (erf(north) - erf(south))
    # A small wave makes the jets bend.
    wave = 0.5 * jnp.sin(6 * np.pi * x / SIDE)[None] * (jnp.exp(-(north**2)) + jnp.exp(-(south**2)))[:, None]
    return jnp.stack([h[:, None] + wave, u[:, None] + 0 * wave, 0 * wave])


# What the devices do together ---------------------------------------------------------------------------------


def totals(state, cell):
    """Returns the mass, and the energy above that of water at rest, of the whole square."""
    h, u, v = with_neighbours(state)
    kinetic = (mean_x(h)[1:-1, 1:] * u[1:-1, 1:-1] ** 2 + mean_y(h)[1:, 1:-1] * v[1:-1, 1:-1] ** 2) / 2
    rise = state[0] - DEPTH  # a sum of small numbers has small rounding errors
    rise, energy = lax.psum((jnp.sum(rise), jnp.sum(kinetic + GRAVITY * rise**2 / 2)), ("y", "x"))
    return SIDE**2 * DEPTH + cell**2 * rise, cell**2 * energy


def whole(state):
    for axis, name in ((1, "y"), (2, "x")):
        state = join_from(state, name, axis)
    return state


def solve(mesh, args, prints):
    """Returns the fields h, u, v at the end, and the mass and the energy at the beginning and after each report."""
    shape, cell = [args.size // mesh.shape[name] for name in ("y", "x")], SIDE / args.size
    blocks = P(None, "y", "x")
    start = pc.shard_map(lambda: two_jets(shape, cell), mesh=mesh, in_specs=(), out_specs=blocks)
    add_up = pc.shard_map(lambda state: totals(state, cell), mesh=mesh, in_specs=blocks, out_specs=P())
    advance = pc.shard_map(
        lambda state, steps: lax.fori_loop(0, steps, lambda _, state: time_step(state, cell), state),
        mesh=mesh,
        in_specs=(blocks, P()),
        out_specs=blocks,
    )

    state, done = start(), 0
    sums = [add_up(state)]
    with tqdm(total=args.steps, unit="step", disable=not prints) as bar:
        while done < args.steps:
            steps = min(args.report_every, args.steps - done)
            state = advance(state, np.int32(steps))
            sums.append(add_up(state))
            bar.set_postfix(energy=f"{sums[-1][1]:.4g} J")  # this waits for the steps
            done += steps
            bar.update(steps)
    fields = pc.shard_map(whole, mesh=mesh, in_specs=blocks, out_specs=P())(state)
    return np.asarray(fields), np.asarray(sums)


def plot(fields, cell, path):
    from matplotlib.figure import Figure  # only rank 0 draws, so the other ranks need not import it

    _, u, v = np.pad(fields, [(0, 0), (0, 1), (0, 1)], "wrap")
    figure = Figure(figsize=(6, 5), layout="constrained")  # without pyplot, which would look for a display
    axes = figure.subplots()
    scale, side = JET_SPEED / JET_WIDTH / CORIOLIS, SIDE / 1e3
    relative = np.asarray(vorticity(u, v, cell)) / CORIOLIS
    options = {"cmap": "RdBu_r", "vmin": -scale, "vmax": scale}
    image = axes.imshow(relative, origin="lower", extent=(0, side, 0, side), **options)
    axes.set(xlabel="x (km)", ylabel="y (km)", title="vorticity / f")
    figure.colorbar(image)
    figure.savefig(path, dpi=120)


def main():
    args = parse_arguments()
    comm = pc.init()
    prints, devices = comm.rank == 0, comm.size * jax.local_device_count()
    rows = devices // max(1, args.columns)
    if args.columns < 1 or rows * args.columns != devices or args.size % rows or args.size % args.columns:
        error = (
            f"shallow_water: expected --columns to be a divisor of {devices} devices, and --size a multiple of the "
            f"rows and columns of devices, got --columns {args.columns}, --size {args.size}. Choose powers of two."
        )
        sys.exit(error if prints else 1)
    if args.steps < 1 or args.report_every < 1:
        error = (
            f"shallow_water: expected --steps and --report-every to be positive, got {args.steps} and "
            f"{args.report_every}. Leave them out for the defaults."
        )
        sys.exit(error if prints else 1)

    mesh = pc.make_mesh((rows, args.columns), ("y", "x"))
    fields, sums = solve(mesh, args, prints)
    if prints:
        (first_mass, first_energy), (mass, energy) = sums[0], sums[-1]
        print(f"{rows} x {args.columns} devices, {args.size} x {args.size} cells, {args.steps} steps")
        print(f"mass   {first_mass:.6e} m^3, relative change {mass / first_mass - 1:+.1e}")
        print(f"energy {first_energy:.6e} m^5/s^2, relative change {energy / first_energy - 1:+.1e}")
        if args.output:
            h, u, v = fields
            np.savez(args.output, h=h, u=u, v=v, masses=sums[:, 0], energies=sums[:, 1])
        if args.plot:
            plot(fields, SIDE / args.size, args.plot)


if __name__ == "__main__":
    main()
