"""A jet in a channel on a rotating planet: the equations of shallow water, as mpi4jax's example solves them.

The ranks cut the channel into blocks, with one row or column of the neighbours' around each. The channel is periodic
from west to east and has walls in the south and north. Heights lie in the middle of the cells, velocities on their
eastern and northern edges (a C grid); the time steps are those of Adams and Bashforth. Under mpirun,
``python -m tests.mpi4jax.shallow_water [mpi4jax]`` tells the time of 1,000 steps.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

Array = Any

GRAVITY, DEPTH, CELL = 9.81, 100.0, 5e3
CORIOLIS, BETA = 2e-4, 2e-11
VISCOSITY = 1e-3 * CORIOLIS * CELL**2
STEP = 0.125 * CELL / np.sqrt(GRAVITY * DEPTH)  # seconds; waves pass an eighth of a cell
NEW, OLD = 1.6, -0.6  # the weights of this step's tendencies and of the last step's


class State(NamedTuple):
    """Height and velocities, and how fast they changed in the last step."""

    h: Array
    u: Array
    v: Array
    dh: Array
    du: Array
    dv: Array


class Channel:
    """This rank's block of the channel.

    Args:
        mpi: mpi4jax, or a module in its place.
        cells: the number of cells from south to north and from west to east.
        comm: the ranks.
    """

    def __init__(self, mpi: Any, cells: tuple[int, int], comm: MPI.Intracomm = MPI.COMM_WORLD) -> None:
        self.mpi, self.comm, self.cells = mpi, comm, cells
        rows = min(comm.size, 2)
        self.grid = rows, comm.size // rows
        assert not cells[0] % rows
        assert not cells[1] % self.grid[1]
        self.place = divmod(comm.rank, self.grid[1])
        self.shape = cells[0] // rows + 2, cells[1] // self.grid[1] + 2
        y, x = (CELL * (np.arange(n) + (n - 2) * at - 1) for n, at in zip(self.shape, self.place, strict=True))
        self.x, self.y = np.meshgrid(x, y)
        self.coriolis = jnp.asarray(CORIOLIS + BETA * self.y)

    def neighbour(self, rows: int, columns: int) -> int | None:
        """The rank in that direction; None behind a wall."""
        row, column = self.place[0] + rows, (self.place[1] + columns) % self.grid[1]
        return row * self.grid[1] + column if 0 <= row < self.grid[0] else None

    def exchange(self, field: Array, *, wall: bool = False) -> Array:
        """Fills the edges with the neighbours' values. ``wall``: what goes through the northern wall is zero."""
        inner, edge = {-1: 1, 1: -2}, {-1: 0, 1: -1}
        # To the west and east, then to the north and south with the corners that came from west and east.
        for axis, sign in ((1, -1), (1, 1), (0, 1), (0, -1)):
            step = [0, 0]
            step[axis] = sign
            dest, source = self.neighbour(*step), self.neighbour(*(-n for n in step))
            sent = jnp.take(field, inner[sign], axis=axis)
            if dest is not None and source is not None:
                got = self.mpi.sendrecv(sent, sent, source, dest, comm=self.comm)
            elif source is not None:
                got = self.mpi.recv(sent, source, comm=self.comm)
            elif dest is not None:
                self.mpi.send(sent, dest, comm=self.comm)
            if source is not None:
                field = field.at[(slice(None),) * axis + (edge[-sign],)].set(got)
        return field.at[-2].set(0) if wall and self.place[0] == self.grid[0] - 1 else field

    def start(self) -> State:
        """A jet from west to east in balance with the height, and small waves on it."""
        length, width = CELL * (self.cells[1] - 1), CELL * (self.cells[0] - 1)
        jet = lambda y: 10 * np.exp(-(((y - width / 2) / (0.02 * length)) ** 2))
        everywhere = CELL * np.arange(-1, self.cells[0] + 1)
        slope = -CELL / GRAVITY * np.cumsum(jet(everywhere) * (CORIOLIS + BETA * everywhere))
        level = (slope - slope.mean())[(self.shape[0] - 2) * self.place[0] :][: self.shape[0], None]
        waves = 0.2 * np.sin(10 * np.pi * self.x / length) * np.cos(8 * np.pi * self.y / width)
        h = self.exchange(jnp.asarray(DEPTH + level + waves, jnp.float32))
        u = self.exchange(jnp.asarray(jet(self.y), jnp.float32))
        zero = jnp.zeros_like(h)
        return State(h, u, zero, zero, zero, zero)

    def tendencies(self, h: Array, u: Array, v: Array) -> tuple[Array, Array, Array]:
        """How fast height and velocities change, without friction."""
        deep = self.exchange(jnp.pad(here(h), 1, "edge"))
        flux_u = self.exchange(inside((here(deep) + east(deep)) / 2 * here(u)))
        flux_v = self.exchange(inside((here(deep) + north(deep)) / 2 * here(v)), wall=True)
        dh = -(here(flux_u) - west(flux_u) + here(flux_v) - south(flux_v)) / CELL
        vorticity = here(self.coriolis) + (east(v) - here(v) - north(u) + here(u)) / CELL
        q = self.exchange(inside(4 * vorticity / (here(deep) + east(deep) + north(deep) + deep[2:, 2:])))
        energy = (here(u) ** 2 + west(u) ** 2 + here(v) ** 2 + south(v) ** 2) / 4
        energy = self.exchange(inside(energy))
        across_v = here(q) * (here(flux_v) + east(flux_v)) + south(q) * (south(flux_v) + flux_v[:-2, 2:])
        across_u = here(q) * (here(flux_u) + north(flux_u)) + west(q) * (west(flux_u) + flux_u[2:, :-2])
        du = across_v / 4 - (GRAVITY * (east(h) - here(h)) + east(energy) - here(energy)) / CELL
        dv = -across_u / 4 - (GRAVITY * (north(h) - here(h)) + north(energy) - here(energy)) / CELL
        return inside(dh), inside(du), inside(dv)

    def friction(self, w: Array) -> Array:
        """How fast friction changes a velocity."""
        flux_x = self.exchange(inside(VISCOSITY / CELL * (east(w) - here(w))))
        flux_y = self.exchange(inside(VISCOSITY / CELL * (north(w) - here(w))), wall=True)
        return inside((here(flux_x) - west(flux_x) + here(flux_y) - south(flux_y)) / CELL)

    def step(self, state: State, *, first: bool = False) -> State:
        new = self.tendencies(*state[:3])
        a, b = (1.0, 0.0) if first else (NEW, OLD)
        h, u, v = (w + STEP * (a * dw + b * old) for w, dw, old in zip(state[:3], new, state[3:], strict=True))
        h, u, v = self.exchange(h), self.exchange(u), self.exchange(v, wall=True)
        return State(h, u + STEP * self.friction(u), v + STEP * self.friction(v), *new)

    def run(self, steps: int, jit: Any = jax.jit) -> State:
        """The state after some steps, all in one program."""
        state = jit(lambda: self.step(self.start(), first=True))()
        return jit(lambda state: jax.lax.fori_loop(1, steps, lambda _, state: self.step(state), state))(state)


def here(w: Array) -> Array:
    return w[1:-1, 1:-1]


def east(w: Array) -> Array:
    return w[1:-1, 2:]


def west(w: Array) -> Array:
    return w[1:-1, :-2]


def north(w: Array) -> Array:
    return w[2:, 1:-1]


def south(w: Array) -> Array:
    return w[:-2, 1:-1]


def inside(w: Array) -> Array:
    """With an edge of zeros."""
    return jnp.pad(w, 1)


if __name__ == "__main__":
    name = "mpi4jax" if sys.argv[1:] == ["mpi4jax"] else "pycollective.compat.mpi4jax"
    channel = Channel(importlib.import_module(name), (180, 360))
    jax.block_until_ready(channel.run(10))
    began = time.perf_counter()
    jax.block_until_ready(channel.run(1000))
    if MPI.COMM_WORLD.rank == 0:
        sys.stdout.write(f"{name}: {time.perf_counter() - began:.2f} s\n")
