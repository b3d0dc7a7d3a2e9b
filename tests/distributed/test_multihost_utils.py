"""jax.experimental.multihost_utils, through which programs exchange what is not yet a global array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from tests.distributed.arrays import RANK, SIZE, check, mesh_of, put, values

OWN = values((SIZE, 2, 3))[RANK]


def test_process_allgather() -> None:
    everybody = values((SIZE, 2, 3))
    tree = {"float": OWN, "int": np.int32(RANK), "bool": np.array([RANK == 1]), "wide": np.int64(2**40 + RANK)}
    with jax.enable_x64(True):
        got = multihost_utils.process_allgather(tree)
    ranks = np.arange(SIZE)
    np.testing.assert_array_equal(got["float"], everybody)
    np.testing.assert_array_equal(got["int"], ranks)
    np.testing.assert_array_equal(got["bool"], ranks[:, None] == 1)
    np.testing.assert_array_equal(got["wide"], 2**40 + ranks)
    np.testing.assert_array_equal(multihost_utils.process_allgather(OWN, tiled=True), everybody.reshape(-1, 3))
    np.testing.assert_array_equal(multihost_utils.process_allgather(jnp.asarray(OWN)), everybody)


def test_process_allgather_of_a_global_array() -> None:
    value = values((4 * SIZE, 2 * SIZE))
    for spec in (("i",), (None, "i"), ()):
        got = multihost_utils.process_allgather(put(value, mesh_of(SIZE), *spec), tiled=True)
        np.testing.assert_array_equal(got, value)


def test_broadcast_one_to_all() -> None:
    everybody = values((SIZE, 2, 3))
    tree = {"a": OWN, "b": np.int32(RANK + 5), "c": np.array([RANK == 0, True])}
    got = multihost_utils.broadcast_one_to_all(tree)
    np.testing.assert_array_equal(got["a"], everybody[0])
    assert got["b"] == 5
    np.testing.assert_array_equal(got["c"], [True, True])
    np.testing.assert_array_equal(
        multihost_utils.broadcast_one_to_all(OWN, is_source=RANK == SIZE - 1), everybody[SIZE - 1]
    )


def test_sync_global_devices() -> None:
    for name in ("here", "there"):
        multihost_utils.sync_global_devices(name)


def test_sync_global_devices_of_different_places() -> None:
    with pytest.raises(AssertionError, match="sync_global_devices name mismatch"):
        multihost_utils.sync_global_devices(f"place {RANK}")
    multihost_utils.sync_global_devices("the same place")


def test_assert_equal() -> None:
    multihost_utils.assert_equal({"a": np.arange(3), "b": 7})
    with pytest.raises(AssertionError, match="ranks differ"):
        multihost_utils.assert_equal(np.arange(3) + RANK, fail_message="ranks differ")
    multihost_utils.assert_equal(jnp.arange(3))


def test_host_local_arrays() -> None:
    everybody = values((SIZE, 4, 3))
    own = everybody[RANK]
    mesh = mesh_of(SIZE)
    rows, same = multihost_utils.host_local_array_to_global_array((own, everybody[0]), mesh, (P("i"), P()))
    check([rows, same], [everybody.reshape(-1, 3), everybody[0]])
    total = jax.jit(lambda rows, same: rows.sum(axis=0) + same.sum(axis=0))(rows, same)
    check(total, everybody.sum(axis=(0, 1)) + everybody[0].sum(axis=0), rtol=1e-5, atol=1e-5)
    back = multihost_utils.global_array_to_host_local_array((2 * rows, total), mesh, (P("i"), P()))
    np.testing.assert_array_equal(back[0], 2 * own)
    assert back[1].is_fully_addressable
    columns = multihost_utils.host_local_array_to_global_array(own, mesh, P(None, "i"))
    check(columns, np.concatenate(list(everybody), axis=1))
