"""Global arrays, made of a value that every rank knows, and compared with one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

Array = Any

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

COLLECTIVES = os.environ.get("PYCOLLECTIVE_TEST_COLLECTIVES", "mpi")
"""What carries XLA's collectives."""

by_mpi = pytest.mark.skipif(COLLECTIVES != "mpi", reason=f"LOUD: about MPI, not about {COLLECTIVES}")
needs_four = pytest.mark.skipif(SIZE < 4, reason="LOUD: needs four ranks")


def mesh_of(*sizes: int, order: Sequence[int] | None = None, names: str = "ij") -> Mesh:
    """A mesh of these sizes with axes "i", "j".

    Args:
        sizes: of the axes.
        order: the numbers of its devices; default the first ones.
        names: of the axes, a letter each.
    """
    devices = jax.devices()
    order = range(math.prod(sizes)) if order is None else order
    return Mesh(np.array([devices[number] for number in order]).reshape(sizes), tuple(names[: len(sizes)]))


def values(shape: Sequence[int], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Numbers that differ, of the whole range of an integer dtype; the same on every rank."""
    generator = np.random.default_rng([seed, *shape])
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return generator.integers(2, size=shape).astype(bool)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return generator.integers(limits.min, limits.max, size=shape, dtype=dtype, endpoint=True)
    if dtype.kind == "c":
        return (generator.normal(size=shape) + 1j * generator.normal(size=shape)).astype(dtype)
    return generator.normal(size=shape).astype(dtype)


def put(value: np.ndarray, mesh: Mesh, *spec: Any) -> jax.Array:
    """The value as a global array; this rank reads its own shards alone."""
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, P(*spec)), lambda index: value[index])


def check(got: Any, want: Any, *, rtol: float = 0, atol: float = 0, what: str = "") -> None:
    """Compares each shard that this rank has, of each array of a tree, with its part of the expected global value.

    Args:
        got: a tree of global arrays.
        want: the same tree of NumPy arrays or numbers.
        rtol: the relative tolerance.
        atol: the absolute tolerance.
        what: the name of the case.
    """
    paths, tree = jax.tree.flatten_with_path(got)
    wants = tree.flatten_up_to(want)
    for (path, array), expected in zip(paths, wants, strict=True):
        expected = np.asarray(expected)
        name = f"{what}{jax.tree_util.keystr(path)}"
        assert array.shape == expected.shape, name
        assert array.is_fully_addressable or len(array.sharding.device_set) > 1, name
        for shard in array.addressable_shards:
            value, part = np.asarray(shard.data), expected[shard.index]
            assert value.dtype == expected.dtype, name
            if value.dtype.kind == "V":  # bfloat16 and its like
                value, part = value.astype(np.float32), part.astype(np.float32)
            np.testing.assert_allclose(value, part, rtol=rtol, atol=atol, err_msg=f"{name} {shard.index}")


def over_blocks(reference: Callable[[np.ndarray], np.ndarray], blocks: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Applies a reference to each group of a mesh.

    Args:
        reference: from the blocks of a group, stacked in its order, to the results, stacked likewise.
        blocks: the blocks of all devices; the first dimensions are those of the mesh.
        axes: the dimensions along which a group lies, the slowest first.
    """
    rest = [axis for axis in (0, 1) if axis not in axes]
    order = [*rest, *axes]
    sizes = [blocks.shape[axis] for axis in order]
    groups = (math.prod(sizes[: len(rest)]), math.prod(sizes[len(rest) :]))
    grouped = np.moveaxis(blocks, order, [0, 1]).reshape(*groups, *blocks.shape[2:])
    results = np.stack([reference(group) for group in grouped])
    return np.moveaxis(results.reshape(*sizes, *results.shape[2:]), [0, 1], order)
