"""Arrays longer than MPI's int: real ones if there is memory, and a lowered limit for every operation."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import pycollective as pc
from pycollective.transport import native
from tests.cases import CASES, operands
from tests.collective.programs import compare

GIB = 2**30
TWO = MPI.COMM_WORLD.size == 2  # more ranks would need more memory and show nothing new


def free_memory() -> int:
    """The bytes of memory that can be used without swapping."""
    with open("/proc/meminfo") as lines:
        table = dict(line.split(":") for line in lines)
    return int(table["MemAvailable"].split()[0]) * 1024


def needs(nbytes: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not TWO or free_memory() < nbytes,
        reason=f"LOUD: needs 2 ranks and {nbytes / GIB:.0f} GiB of free memory",
    )


@pytest.fixture(params=[1, 7])
def small_limit(request: pytest.FixtureRequest, world: pc.Communicator) -> Iterator[None]:
    library = native.library()
    library.pycollective_set_max_count(ctypes.c_int64(request.param))
    yield
    library.pycollective_set_max_count(ctypes.c_int64(2**31 - 1))


@pytest.mark.usefixtures("small_limit")
def test_every_operation_in_pieces(world: pc.Communicator) -> None:
    for extra in ((), (5,)):
        compare(
            world,
            [case for case in CASES if case.id != "psum_empty"],
            lambda case, extra=extra: [operands(case, world, extra=extra)],  # type: ignore[misc]
            lambda f, x, extra=extra: jax.vmap(f)(x) if extra else f(x),
            lambda f, xs, extra=extra: jnp.stack([f(xs[:, b]) for b in range(5)], axis=1) if extra else f(xs),
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.usefixtures("small_limit")
def test_messages_in_pieces(world: pc.Communicator) -> None:
    if world.size < 2:
        pytest.skip("LOUD: needs two ranks")
    for dtype in (np.int8, np.float32, np.complex64):
        x = np.arange(31).astype(dtype)
        if world.rank == 0:
            pc.send(jnp.asarray(x), world, dest=1)
        elif world.rank == 1:
            np.testing.assert_array_equal(pc.recv(jnp.zeros_like(x), world, source=0), x)


def marked(rank: int, count: int) -> jax.Array:
    """An array with ``rank + 1`` in every byte but the last, which has ``rank + 5``."""
    parts = [jnp.full(count - 1, rank + 1, jnp.int8), jnp.full(1, rank + 5, jnp.int8)]
    return jax.block_until_ready(jax.jit(jnp.concatenate)(parts))


@pytest.mark.whole
@needs(11 * GIB)
@pytest.mark.native
def test_more_than_2_31_elements(world: pc.Communicator) -> None:
    count = 2**31 + 12_345  # int8
    f = pc.jit(lambda x: pc.psum(x, world), donate_argnums=0)
    y = np.asarray(f(jnp.full(count, world.rank + 1, jnp.int8)))
    assert y.min() == y.max() == 3
    del y
    g = pc.jit(lambda x: pc.broadcast(x, world, root=1), donate_argnums=0)
    y = np.asarray(g(marked(world.rank, count)))
    assert (y[0], y[count // 2], y[-1]) == (2, 2, 6)


@pytest.mark.whole
@needs(13 * GIB)
@pytest.mark.native
def test_more_than_2_31_elements_in_a_block(world: pc.Communicator) -> None:
    # MPI 3 needs one element of a derived datatype for operations on blocks.
    count = 2**31 + 4_321
    other = 1 - world.rank
    y = np.asarray(pc.ppermute(marked(world.rank, count), world, [(0, 1), (1, 0)]))
    assert (y[0], y[count // 2], y[-1]) == (other + 1, other + 1, other + 5)
