"""The claims of docs/guide.md about programs that come from mpi4jax, where the transpose of a sum is the identity."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import pycollective as pc

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
X = jnp.arange(1.0, 4.0)


@pytest.fixture
def allreduce(world: pc.Communicator) -> Any:
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "def allreduce" in code)
    names: dict[str, Any] = {"jax": jax, "pc": pc, "comm": world}
    exec(code, names)
    return names["allreduce"]


def piece(world: pc.Communicator) -> Any:
    return X + world.rank


def norm(total: Any) -> Any:
    """The norm of the vector whose pieces the ranks hold; the same on all ranks."""
    return jnp.sqrt(total.sum())


def test_a_sum(allreduce: Any, world: pc.Communicator) -> None:
    x = piece(world)
    ours = jax.grad(lambda x: pc.psum(x, world).sum())(x)
    np.testing.assert_array_equal(ours, jnp.full(3, float(world.size)))
    np.testing.assert_array_equal(jax.grad(lambda x: allreduce(x).sum())(x), jnp.ones(3))
    np.testing.assert_array_equal(allreduce(x), pc.psum(x, world))


def test_a_loss_that_is_the_same_on_all_ranks(allreduce: Any, world: pc.Communicator) -> None:
    x = piece(world)
    there = jax.grad(lambda x: norm(allreduce(jnp.sin(x) ** 2)))(x)
    here = jax.grad(lambda x: norm(pc.psum(jnp.sin(x) ** 2, world)) / world.size)(x)
    np.testing.assert_allclose(here, there, rtol=1e-6)
    # Both are right.
    pieces = jnp.stack([X + rank for rank in range(world.size)])
    whole = jax.grad(lambda pieces: norm(jnp.sum(jnp.sin(pieces) ** 2, 0)))(pieces)
    np.testing.assert_allclose(here, whole[world.rank], rtol=1e-6)


def test_losses_of_their_own(allreduce: Any, world: pc.Communicator) -> None:
    x = piece(world)
    here = jax.grad(lambda x: (world.rank + 1) * pc.psum(x, world).sum())(x)
    np.testing.assert_array_equal(here, jnp.full(3, world.size * (world.size + 1) / 2))  # of all ranks' losses
    there = jax.grad(lambda x: (world.rank + 1) * allreduce(x).sum())(x)
    np.testing.assert_array_equal(there, jnp.full(3, world.rank + 1.0))  # of the rank's own loss


def test_a_gradient_that_is_summed_afterwards(allreduce: Any, world: pc.Communicator) -> None:
    own = jax.grad(lambda x: jnp.vdot(x, x))(piece(world))
    np.testing.assert_array_equal(allreduce(own), pc.psum(own, world))


def test_the_calls_that_the_table_names(world: pc.Communicator) -> None:
    comm, root, x, n, r = world, world.size - 1, piece(world), world.size, world.rank
    stacked = np.stack([X + rank for rank in range(n)])
    mpi = world.mpi
    product = pc.broadcast(pc.reduce(x, comm, op="prod"), comm)
    np.testing.assert_allclose(product, mpi.allreduce(np.array(x), op=MPI.PROD), rtol=1e-6)
    np.testing.assert_array_equal(pc.pmax(r == 0, comm), mpi.allreduce(r == 0, op=MPI.LOR))
    np.testing.assert_array_equal(pc.pmin(r == 0, comm), mpi.allreduce(r == 0, op=MPI.LAND))
    np.testing.assert_array_equal(pc.all_gather(x, comm), mpi.allgather(np.array(x)))
    rows = jnp.asarray(stacked) * (r + 1)
    np.testing.assert_array_equal(pc.all_to_all(rows, comm), mpi.alltoall(list(np.array(rows))))
    np.testing.assert_array_equal(pc.broadcast(x, comm, root=root), X + root)
    gathered = pc.gather(x, comm, root=root)
    np.testing.assert_array_equal(gathered, stacked if r == root else 0 * stacked)
    np.testing.assert_array_equal(pc.scatter(rows, comm, root=root), n * stacked[r])
    reduced = pc.reduce(x, comm, op="sum", root=root)
    np.testing.assert_array_equal(reduced, stacked.sum(0) if r == root else 0 * X)
    np.testing.assert_array_equal(pc.scan(x, comm, op="sum"), stacked[: r + 1].sum(0))
    like = jax.ShapeDtypeStruct((3,), jnp.float32)
    source, dest = (r - 1) % n, (r + 1) % n
    got = pc.sendrecv(x, comm, source=source, dest=dest, like=like, send_tag=3, recv_tag=pc.ANY_TAG)
    np.testing.assert_array_equal(got, stacked[source])
    if n > 1 and r < 2:
        if r == 0:
            pc.send(x, comm, dest=1, tag=5)
        else:
            np.testing.assert_array_equal(pc.recv(like, comm, source=pc.ANY_SOURCE, tag=pc.ANY_TAG), X)
    pc.barrier(comm)
