"""What differs where mpi4jax carries the data: what is refused, and what is made of several of its functions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from tests.collective.programs import RUNTIME_ERRORS


def test_programs_call_mpi4jax(world: pc.Communicator) -> None:
    program = jax.jit(lambda x: pc.psum(x, world)).lower(jnp.ones(2)).as_text()
    targets = [name for name in ("pycollective_enter", "mpi_allreduce_ffi", "pycollective_leave") if name in program]
    assert targets == ["pycollective_enter", "mpi_allreduce_ffi", "pycollective_leave"]
    assert "pycollective_allreduce" not in program


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("function", "of_numpy"), [(pc.pmax, np.maximum), (pc.pmin, np.minimum)])
def test_nan_wins_on_whichever_rank(
    function: Callable[..., jax.Array], of_numpy: np.ufunc, dtype: str, world: pc.Communicator
) -> None:
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -1.5, 1e-30, -1e-30], np.float32)
    blocks = [np.roll(np.repeat(special, 3), 2 * rank) for rank in range(world.size)]
    got = function(jnp.asarray(blocks[world.rank], dtype), world)
    expected = of_numpy.reduce([np.asarray(jnp.asarray(block, dtype), np.float32) for block in blocks])
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), expected)


def test_several_arrays_are_compared(world: pc.Communicator) -> None:
    if world.size == 1:
        pytest.skip("LOUD: needs two ranks")
    arrays = (jnp.ones(2), jnp.ones(6)) if world.rank else (jnp.ones(6), jnp.ones(2))
    with pytest.raises(
        RUNTIME_ERRORS,
        match=r"allreduce: CollectiveMismatch: expected the same call on every rank, got allreduce\(.* here",
    ):
        jax.block_until_ready(jax.jit(lambda xs: pc.psum(xs, world))(arrays))


def test_a_permutation_does_not_meet_a_receive_from_any_rank(world: pc.Communicator) -> None:
    if world.size == 1:
        pytest.skip("LOUD: needs two ranks")
    x = jnp.full(3, 1.0 + world.rank)

    def permuted() -> jax.Array:
        return pc.ppermute(x, world, [(0, 1)])

    permuted().block_until_ready()  # the ranks compare it now, so that rank 0 does not wait below
    if world.rank == 0:
        permuted()  # its message is on the way before the other one
        pc.send(x + 100, world, dest=1)
    elif world.rank == 1:
        assert pc.recv(x, world).tolist() == [101.0] * 3
        assert permuted().tolist() == [1.0] * 3
    else:
        permuted()


def test_named_axes_of_a_mesh(world: pc.Communicator) -> None:
    if world.size % 2:
        pytest.skip("LOUD: needs an even number of ranks")
    mesh = pc.make_mesh((world.size // 2, 2), ("row", "column"))
    spec = jax.sharding.PartitionSpec(("row", "column"))

    def along_both(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return lax.psum(x, "column"), lax.pmax(x, "row"), lax.all_gather(x, ("row", "column"), tiled=True)

    x = jnp.arange(2.0) + 10 * world.rank
    mapped = pc.shard_map(along_both, mesh=mesh, in_specs=spec, out_specs=spec)
    over_columns, over_rows, everywhere = mapped(x)
    first = world.rank // 2 * 2
    np.testing.assert_array_equal(over_columns, 2 * np.arange(2.0) + 10 * (2 * first + 1))
    np.testing.assert_array_equal(over_rows, np.arange(2.0) + 10 * (world.size - 2 + world.rank % 2))
    np.testing.assert_array_equal(everywhere, np.ravel(np.arange(2.0) + 10 * np.arange(world.size)[:, None]))


def test_refused_where_mpi4jax_would_be_wrong(world: pc.Communicator) -> None:
    with pytest.raises(NotImplementedError, match="allreduce: expected a reduction of sum, .* got sum_bfloat16"):
        pc.psum(jnp.ones(3), world, wire_dtype=jnp.bfloat16)
    many = jax.ShapeDtypeStruct((2**31,), jnp.int8)
    with pytest.raises(
        NotImplementedError, match="bcast: expected arrays of at most 2147483647 elements .* got 2147483648"
    ):
        jax.jit(lambda x: pc.broadcast(x, world)).lower(many)
    if jax.local_device_count() > 1:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "i")
        on_both = jax.device_put(jnp.ones(2), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
        with pytest.raises(NotImplementedError, match="allreduce: expected a program on one device .*, got one on 2"):
            jax.jit(lambda x: pc.psum(x, world))(on_both)


def test_a_program_of_a_freed_communicator(world: pc.Communicator) -> None:
    part = world.split(color=0)
    assert part is not None
    program = jax.jit(lambda x: pc.psum(x, part))
    np.testing.assert_array_equal(program(jnp.ones(2)), world.size)
    part.free()
    with pytest.raises(RUNTIME_ERRORS, match="allreduce: expected a live communicator, got a freed one"):
        jax.block_until_ready(program(jnp.ones(2)))


def test_the_mark_of_a_program_that_failed(world: pc.Communicator) -> None:
    """Its record must not be under way after the next call."""

    def fails(_: jax.Array) -> jax.Array:
        raise RuntimeError("the callback fails")

    @jax.jit
    def program(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pc.psum(x, world), jax.pure_callback(fails, x, x)

    part = world.split(color=0)
    assert part is not None
    pc.psum(jnp.ones(3), world).block_until_ready()
    with pytest.raises(RUNTIME_ERRORS, match="the callback fails"):
        jax.block_until_ready(program(jnp.ones(3)))
    pc.psum(jnp.ones(3), part).block_until_ready()
    states = {entry["state"] for entry in pc.recorder.dump()["entries"]}
    assert "completed" in states
    assert not states & {"scheduled", "started"}
    part.free()


def test_options_of_a_later_call() -> None:
    with pytest.raises(ValueError, match="init: expected the transport of the first call, mpi4jax, got native"):
        pc.init(transport="native")
