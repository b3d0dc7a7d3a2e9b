"""JAX's own collectives between processes, in programs of global arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pycollective.bench.implementations import Program, looped, ready
from pycollective.bench.workloads import AXIS, Workload

_EACH_DEVICE = PartitionSpec(("group", AXIS))  # an element of the first dimension for each
_UNSUPPORTED = ("broadcast",)  # XLA's CPU collectives have none


class GlobalArrays:
    """The workload's own function under :func:`jax.shard_map`, over the devices of all processes.

    Args:
        name: its name in the table: jax, and what carries XLA's collectives.
        groups: the devices, a row for each group that makes the collectives by itself; default all in one group.
    """

    def __init__(self, name: str, groups: Any = None) -> None:
        self.name = name
        if groups is None:
            groups = np.array([sorted(jax.devices(), key=lambda device: (device.process_index, device.id))])
        self._mesh = Mesh(groups, ("group", AXIS))
        self._sharding = NamedSharding(self._mesh, _EACH_DEVICE)
        self._one = jax.make_array_from_process_local_data(
            self._sharding, np.zeros(jax.local_device_count(), np.float32)
        )
        self._meet = jax.jit(self._mapped(lambda x: lax.psum(x, ("group", AXIS))))

    def _mapped(self, function: Any) -> Any:
        specs = {"in_specs": _EACH_DEVICE, "out_specs": _EACH_DEVICE}
        return jax.shard_map(function, mesh=self._mesh, **specs, check_vma=False)

    def barrier(self) -> None:
        """Waits for the other processes."""
        self._meet(self._one).block_until_ready()

    def program(self, workload: Workload) -> Program | None:
        if workload.mode == "eager" or workload.op in _UNSUPPORTED:
            return None
        function = looped(workload.function(), workload)

        def local(*blocks: Any) -> Any:
            return tuple(y[None] for y in function(*(x[0] for x in blocks)))

        compiled = jax.jit(self._mapped(local), donate_argnums=workload.donate_argnums)

        def put(xs: list[list[Any]]) -> list[jax.Array]:
            return [
                jax.make_array_from_process_local_data(self._sharding, np.stack(leaves))
                for leaves in zip(*xs, strict=True)
            ]

        def get(ys: Any) -> list[list[Any]]:
            shards = [sorted(y.addressable_shards, key=lambda shard: shard.device.id) for y in ys]
            return [[np.asarray(shard.data)[0] for shard in row] for row in zip(*shards, strict=True)]

        return Program(
            put,
            ready(compiled),
            get,
            workload.donated,
            participants=len(self._mesh.local_devices),
        )
