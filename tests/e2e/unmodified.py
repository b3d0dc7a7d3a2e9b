"""A program for many hosts as JAX's documentation writes them: it knows nothing of MPI, nor of this package.

Each process prints one line of JSON. Every number in it depends on what other processes hold.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS = 3  # of each device


def own(x: jax.Array) -> list[float]:
    """The elements on this process's devices."""
    return [float(element) for shard in x.addressable_shards for element in np.ravel(shard.data)]


def cut(x: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """A global array, of which each process makes the parts on its own devices."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def sharded_by_annotation(mesh: Mesh) -> dict[str, list[float]]:
    """What ``jax.jit`` computes from arrays that have shardings; XLA adds the collectives."""
    size = jax.device_count()
    along_all = NamedSharding(mesh, P(("data", "model")))
    here = jax.local_device_count() * ROWS
    rows = np.arange(here, dtype=np.float32) + jax.process_index() * here
    x = jax.make_array_from_process_local_data(along_all, rows, (size * ROWS,))
    square = np.arange((2 * size) ** 2, dtype=np.float32).reshape(2 * size, -1) % 7
    a, b = cut(square, mesh, P("data", "model")), cut(square, mesh, P("model", "data"))
    turned = jax.jit(lambda x: x.T, out_shardings=NamedSharding(mesh, P("data", "model")))
    return {
        "sum": own(jnp.sum(x)),
        "cumsum": own(jax.jit(jnp.cumsum, out_shardings=along_all)(x)),
        "product": own(jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("data", "model")))(a, b)),
        "turned": own(turned(a)),
        "whole": own(jax.device_put(x, NamedSharding(mesh, P()))),
        "largest": own(jax.jit(jnp.argmax)(jnp.sin(x))),
    }


def sharded_by_hand(mesh: Mesh) -> dict[str, list[float]]:
    """The collectives of ``jax.lax`` in ``jax.shard_map``."""
    size = jax.device_count()
    along_all = P(("data", "model"))
    x = cut(np.arange(size * size, dtype=np.float32).reshape(size, size) ** 2, mesh, along_all)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=along_all, out_specs=along_all)
    def collectives(x: jax.Array) -> dict[str, jax.Array]:
        everywhere = ("data", "model")
        around = [(i, (i + 1) % size) for i in range(size)]
        return {
            "psum of rows": lax.pcast(lax.psum(x, "data"), "data", to="varying"),
            "pmax of columns": lax.pcast(lax.pmax(x, "model"), "model", to="varying"),
            "psum_scatter": lax.psum_scatter(x, everywhere, scatter_dimension=1, tiled=True),
            "all_gather": lax.all_gather(x[:, :1], everywhere, axis=1, tiled=True),
            "all_to_all": lax.all_to_all(x, everywhere, 1, 0, tiled=True),
            "ppermute": lax.ppermute(x, everywhere, around),
            "axis_index": lax.axis_index(everywhere)[None],
        }

    return {name: own(part) for name, part in collectives(x).items()}


def exchanged_by_processes() -> dict[str, list[float]]:
    """The functions of ``multihost_utils``."""
    process = jax.process_index()
    multihost_utils.sync_global_devices("all are here")
    multihost_utils.assert_equal(np.arange(3), "the processes differ")
    first = multihost_utils.broadcast_one_to_all(np.array([process + 5.0, 1.0], np.float32))
    everybody = multihost_utils.process_allgather(np.array([process, process**2], np.int32))
    return {"from the first": np.ravel(first).tolist(), "of each": np.ravel(everybody).tolist()}


def trained(mesh: Mesh, steps: int = 20) -> dict[str, list[float]]:
    """The losses of a regression, whose rows lie along "data" and whose parameters lie along "model"."""
    rng = np.random.default_rng(0)  # every process draws the same numbers
    inputs = rng.normal(size=(8 * mesh.shape["data"], 4 * mesh.shape["model"])).astype(np.float32)
    x, y = cut(inputs, mesh, P("data", "model")), cut(inputs.sum(1), mesh, P("data"))
    weights = cut(np.zeros(inputs.shape[1], np.float32), mesh, P("model"))

    @jax.jit
    def step(weights: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda weights: jnp.mean((x @ weights - y) ** 2))(weights)
        return weights - 0.1 * grad, loss

    losses = []
    for _ in range(steps):
        weights, loss = step(weights, x, y)
        losses.append(loss)
    return {"losses": [float(loss) for loss in losses], "weights": own(weights)}


def main() -> None:
    jax.distributed.initialize()
    size = jax.device_count()
    model = 2 if size % 2 == 0 else 1
    mesh = jax.make_mesh((size // model, model), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    found = {"process": jax.process_index(), "processes": jax.process_count(), "devices": size}
    found |= sharded_by_annotation(mesh) | sharded_by_hand(mesh) | exchanged_by_processes() | trained(mesh)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
