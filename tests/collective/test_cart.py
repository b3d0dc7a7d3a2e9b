"""Cartesian grids of ranks, and the exchange of halos in them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import pycollective as pc
from pycollective.transport import watch

Array = Any
Grid = pc.CartCommunicator

needs_two = pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="LOUD: needs two ranks (run under mpirun -n 2)")

GRIDS = [
    ((0,), True),
    ((0,), False),
    ((0, 0), True),
    ((0, 0), (False, True)),
    ((1, 0), (True, False)),
    ((0, 1, 0), True),
]
"""Arguments of make_cart."""


def made(*args: Any, **kwargs: Any) -> Grid:
    cart = pc.make_cart(*args, **kwargs)
    assert cart is not None
    return cart


def like_mpi(ranks: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(MPI.PROC_NULL if rank is pc.PROC_NULL else int(rank) for rank in ranks)


@pytest.mark.parametrize(("dims", "periods"), GRIDS)
def test_a_grid_is_that_of_mpi(world: pc.Communicator, dims: tuple[int, ...], periods: Any) -> None:
    cart = made(dims, periods)
    theirs = MPI.COMM_WORLD.Create_cart(MPI.Compute_dims(world.size, dims), cart.periods)
    assert (list(cart.dims), list(cart.coords)) == (theirs.dims, theirs.coords)
    assert list(cart.periods) == [bool(ring) for ring in theirs.periods]
    for rank in range(cart.size):
        assert list(cart.coords_of(rank)) == theirs.Get_coords(rank)
        assert cart.rank_of(cart.coords_of(rank)) == rank
    for axis, displacement in itertools.product(range(len(dims)), (-2, -1, 0, 1, 2, 7)):
        assert like_mpi(cart.shift(axis, displacement)) == theirs.Shift(axis, displacement)
        assert cart.shift(axis - len(dims), displacement) == cart.shift(axis, displacement)
    assert pc.Communicator(cart.mpi) is cart is Grid(cart.mpi)
    theirs.Free()
    cart.free()


def test_a_grid_is_a_communicator(world: pc.Communicator) -> None:
    cart = made((1, 0), periods=True, reorder=True)
    text = f"CartCommunicator(world/1x{world.size}, rank {cart.rank} of {world.size})"
    assert repr(cart) == text
    assert pc.psum(1, cart) == world.size
    source, dest = cart.shift(1)
    assert pc.sendrecv(jnp.int32(cart.rank), cart, source=source, dest=dest) == source
    row, column = cart.sub((False, True)), cart.sub((True, False))
    assert (row.dims, row.periods, row.coords, row.name) == (
        (world.size,),
        (True,),
        cart.coords[1:],
        f"{cart.name}[0, :]",
    )
    assert (column.dims, column.coords) == ((1,), (0,))
    assert (pc.psum(1, row), pc.psum(1, column)) == (world.size, 1)
    assert not isinstance(cart.split(color=0), Grid)
    for each in (row, column, cart):
        each.free()
    with pytest.raises(ValueError, match=r"CartCommunicator\.sub: expected a live communicator, .* which was freed"):
        cart.sub((True, False))


def test_ranks_beyond_the_grid_have_none(world: pc.Communicator) -> None:
    cart = pc.make_cart((max(1, world.size - 1),))
    assert (cart is None) == (world.rank >= max(1, world.size - 1))
    if cart is not None:
        assert pc.psum(1, cart) == cart.size == cart.dims[0]
        cart.free()


# Halos --------------------------------------------------------------------------------------------------------


class Whole:
    """An array that is cut among the ranks of a grid, with the entries beyond its open edges.

    The blocks of different coordinates have different lengths. Where an axis is open, the first and the last rank own
    their outer halos.
    """

    def __init__(self, cart: Grid, before: int, after: int) -> None:
        self.cart, self.before, self.after = cart, before, after
        self.lengths = [[3 + (axis + coord) % 2 for coord in range(n)] for axis, n in enumerate(cart.dims)]
        self.ends = [0 if ring else before + after for ring in cart.periods]
        self.shape = tuple(sum(each) + end for each, end in zip(self.lengths, self.ends, strict=True))

    def places(self, rank: int) -> list[np.ndarray]:
        """The places in the whole array of all entries of a rank's array, along each axis."""
        found = []
        for axis, coord in enumerate(self.cart.coords_of(rank)):
            start = sum(self.lengths[axis][:coord]) - (self.before if self.cart.periods[axis] else 0)
            entries = np.arange(start, start + self.before + self.lengths[axis][coord] + self.after)
            found.append(entries % self.shape[axis])
        return found

    def owned(self, rank: int) -> tuple[slice, ...]:
        """The entries of a rank's array that come from no neighbour."""
        found = []
        for coord, n, ring in zip(self.cart.coords_of(rank), self.cart.dims, self.cart.periods, strict=True):
            first, last = not ring and coord == 0, not ring and coord == n - 1
            found.append(slice(0 if first else self.before, None if last or not self.after else -self.after))
        return tuple(found)

    def taken(self, whole: Array, rank: int) -> Array:
        """The array of a rank with the right halos."""
        return whole[np.ix_(*self.places(rank))]

    def updated(self, arrays: list[Array]) -> list[Array]:
        """What ``update_halos`` makes of the arrays of all ranks, in one process."""
        whole = jnp.zeros(self.shape, arrays[0].dtype)
        for rank, array in enumerate(arrays):
            own = self.owned(rank)
            there = [places[part] for places, part in zip(self.places(rank), own, strict=True)]
            whole = whole.at[np.ix_(*there)].set(array[own])
        return [self.taken(whole, rank) for rank in range(len(arrays))]


@pytest.mark.parametrize(
    ("dims", "periods", "before", "after"),
    [((0,), True, 2, 0), ((0, 0), (False, True), 1, 2), ((0, 0), (True, False), 1, 1)],
)
def test_halos_are_the_neighbours_edges(dims: tuple[int, ...], periods: Any, before: int, after: int) -> None:
    cart = made(dims, periods)
    ndim, rank = len(dims), cart.rank
    whole = Whole(cart, before, after)
    random = np.random.default_rng(0)
    shapes = [whole.taken(np.zeros(whole.shape), r).shape for r in range(cart.size)]
    # Small integers, so that cotangents of bfloat16 are exact.
    arrays = [random.integers(-8, 9, shape).astype(float) for shape in shapes]
    weights = [random.integers(-1, 2, shape).astype(float) for shape in shapes]
    width = [(before, after)] * ndim

    def fields_of(x: Array) -> dict[str, Array]:
        half = x.astype(jnp.bfloat16)
        stacked = jnp.stack([x, 2 * x]).astype(jnp.float32)  # the axes are counted from the last one
        return {"x": x, "half": half, "land": x > 0, "stacked": stacked}

    def update(x: Array) -> dict[str, Array]:
        return pc.update_halos(fields_of(x), cart, width, axes=range(-ndim, 0))

    def loss(x: Array, weight: Array, y: dict[str, Array]) -> Array:
        return jnp.sum(weight * (y["x"] ** 2 + y["half"].astype(float) * y["x"] + y["stacked"].sum(0).astype(float)))

    @pc.jit
    def everything(x: Array, weight: Array) -> Any:
        trips = lax.fori_loop(0, 2, lambda _, x: pc.update_halos(2 * x, cart, width), x)
        batch = jax.vmap(update, in_axes=1, out_axes=1)(jnp.stack([x, -x], axis=1))
        gradient = jax.grad(lambda x: loss(x, weight, update(x)))(x)
        y, tangents = jax.jvp(update, (x,), (x,))
        return y, trips, batch, gradient, tangents["stacked"]

    with jax.enable_x64(True):
        y, trips, batch, gradient, tangent = everything(jnp.asarray(arrays[rank]), jnp.asarray(weights[rank]))
        expected = [whole.updated(list(map(jnp.asarray, leaves))) for leaves in [arrays, [-a for a in arrays]]]
        for name, field in fields_of(expected[0][rank]).items():
            np.testing.assert_array_equal(y[name], field, err_msg=name)
        np.testing.assert_array_equal(trips, 4 * np.asarray(expected[0][rank]))
        np.testing.assert_array_equal(batch["x"], jnp.stack([each[rank] for each in expected], axis=1))
        np.testing.assert_array_equal(batch["land"][:, 1], expected[1][rank] > 0)
        np.testing.assert_array_equal(tangent, y["stacked"])

        def loss_of_all(arrays: list[Array]) -> Array:
            ys = whole.updated(arrays)
            return sum(loss(x, w, fields_of(y)) for x, w, y in zip(arrays, weights, ys, strict=True))

        there = jax.grad(loss_of_all)(list(map(jnp.asarray, arrays)))[rank]
        np.testing.assert_array_equal(gradient, there)
    cart.free()


def test_halos_eagerly_and_of_keys(world: pc.Communicator) -> None:
    cart = made((0,), periods=True)
    keys = jax.vmap(jax.random.key)(jnp.full(3, world.rank))
    new = jax.random.key_data(pc.update_halos(keys, cart))[:, 1]
    below, above = like_mpi(cart.shift(0))
    assert new.tolist() == [below, world.rank, above]
    assert pc.update_halos({}, cart) == {}
    assert pc.update_halos(jnp.arange(3), cart, 0).tolist() == [0, 1, 2]
    cart.free()


@needs_two
@pytest.mark.native
def test_other_ranks_have_fields_where_one_has_none() -> None:
    cart = made((0,), periods=True)
    with pytest.raises(Exception, match=r"CollectiveMismatch.*an empty tree"):
        jax.block_until_ready(pc.update_halos({} if cart.rank == 0 else jnp.ones(3), cart))
    cart.free()
    pc.barrier()  # a rank whose last call had failed says so at its end


# Errors -------------------------------------------------------------------------------------------------------


def test_bad_grids(world: pc.Communicator) -> None:
    n = world.size
    for error, words, arguments in [
        (TypeError, "dims to be a sequence, got 2", (2,)),
        (TypeError, "a number of dims to be an integer, got 1.5", ((1.5, 0),)),
        (ValueError, rf"dims for {n} ranks, got \(\)", ((),)),
        (ValueError, rf"dims for {n} ranks, got \({n}, 2\)", ((n, 2),)),
        (ValueError, rf"dims for {n} ranks, got \({n + 1}, 0\)", ((n + 1, 0),)),
        (ValueError, r"dims for .* got \(-1, 0\)", ((-1, 0),)),
        (ValueError, r"periods to be True or False, or .* for 2 axes, got \(True,\)", ((0, 0), (True,))),
        (TypeError, "periods to be a sequence, got None", ((0, 0), None)),
        (TypeError, "a Communicator, got 'x'", ((0,), True, "x")),
    ]:
        with pytest.raises(error, match=f"pycollective.make_cart: expected {words}"):
            pc.make_cart(*arguments)
    with pytest.raises(TypeError, match="CartCommunicator: expected an mpi4py communicator with a Cartesian topology"):
        Grid(world.mpi)
    with pytest.raises(TypeError, match=r"update_halos: expected a Cartesian communicator, got Communicator\(world"):
        pc.update_halos(jnp.ones(3), world)


@needs_two
def test_ranks_with_other_arguments(world: pc.Communicator) -> None:
    """The comparison is a wait that the monitor sees."""

    def waits() -> list[int]:
        entries = json.loads(watch.recorder_json(world.rank, world.size, ""))["entries"]
        return [entry["record_id"] for entry in entries if entry["profiling_name"] == "pycollective:split"]

    before = waits()
    words = r"make_cart: expected the same arguments on all ranks, got \(.*True,.*\) on rank 0; \(.*False,.*\) on rank"
    with pytest.raises(ValueError, match=words):
        pc.make_cart((0, 0), periods=world.rank == 0)
    assert len(set(waits()) - set(before)) == 1


def test_bad_arguments_of_a_grid() -> None:
    cart = made((1, 0), periods=(True, False))

    def halos(**options: Any) -> Any:
        return pc.update_halos(jnp.ones((4, 4)), cart, **options)

    for error, words, call in [
        (
            ValueError,
            r"rank_of: expected 2 coordinates inside the grid \(1, \d\), got \(0, -1\)",
            lambda: cart.rank_of((0, -1)),
        ),
        (ValueError, "rank_of: expected 2 coordinates", lambda: cart.rank_of((0,))),
        (TypeError, "rank_of: expected coords to be a sequence, got 3", lambda: cart.rank_of(3)),
        (ValueError, rf"coords_of: expected a rank from 0 to {cart.size - 1}, got -1", lambda: cart.coords_of(-1)),
        (ValueError, "shift: expected an axis of a grid of 2, got 2", lambda: cart.shift(2)),
        (TypeError, "shift: expected displacement to be an integer, got 0.5", lambda: cart.shift(0, 0.5)),
        (ValueError, "sub: expected 2 truth values, one of them true, got", lambda: cart.sub((False, False))),
        (ValueError, "expected a width for each of 2 axes, got ", lambda: halos(width=[1])),
        (ValueError, "expected widths of zero or more, got -1", lambda: halos(width=-1)),
        (TypeError, "expected width to be an integer, got 1.5", lambda: halos(width=1.5)),
        (ValueError, "axes for the 2 axes of the grid, got", lambda: halos(axes=(0,))),
        (TypeError, "axes to be a sequence, got 0", lambda: halos(axes=0)),
        (ValueError, "expected axes from -2 to 1, got 2", lambda: halos(axes=(0, 2))),
        (ValueError, r"a dimension of its own for each axis of the grid, got \[1, 1\]", lambda: halos(axes=(1, -1))),
        (ValueError, "2 or more entries between halos of 2 and 2 in dimension 0, got 0", lambda: halos(width=2)),
        (TypeError, "expected arrays", lambda: pc.update_halos("x", cart)),
    ]:
        with pytest.raises(error, match=words):
            call()
    cart.free()
