"""The peer that JAX brings: ``jax.distributed`` with gloo."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pycollective.bench.contenders import Program, looped, ready
from pycollective.bench.workloads import AXIS, Workload

_BROADCASTS = ("broadcast",)  # XLA's CPU collectives have none


def join(address: str, rank: int, size: int, devices: int) -> JaxGloo:
    """Makes this process one of a JAX cluster. Comes before the first use of JAX's devices."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # which would keep SIGTERM from ending this process
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(address, size, rank)
    return JaxGloo()


class JaxGloo:
    """The same named-axis function under :func:`jax.shard_map`, over the devices of all processes."""

    name = "jax gloo"

    def __init__(self) -> None:
        in_order = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        self._mesh = Mesh(np.array(in_order), AXIS)
        self._sharding = NamedSharding(self._mesh, PartitionSpec(AXIS))
        self._one = jax.make_array_from_process_local_data(
            self._sharding, np.zeros(jax.local_device_count(), np.float32)
        )
        self._meet = jax.jit(self._mapped(lambda x: lax.psum(x, AXIS)))

    def _mapped(self, function: Any) -> Any:
        spec = PartitionSpec(AXIS)
        return jax.shard_map(function, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def barrier(self) -> None:
        """Waits for the other processes."""
        self._meet(self._one).block_until_ready()

    def program(self, work: Workload) -> Program | None:
        if work.mode == "eager" or work.op in _BROADCASTS:
            return None
        function = looped(work.function(), work)

        def local(*blocks: Any) -> Any:
            return tuple(y[None] for y in function(*(x[0] for x in blocks)))

        compiled = jax.jit(self._mapped(local), donate_argnums=work.donate_argnums)

        def put(rows: list[list[Any]]) -> list[jax.Array]:
            return [
                jax.make_array_from_process_local_data(self._sharding, np.stack(leaves))
                for leaves in zip(*rows, strict=True)
            ]

        def get(ys: Any) -> list[list[Any]]:
            shards = [sorted(y.addressable_shards, key=lambda shard: shard.device.id) for y in ys]
            return [[np.asarray(shard.data)[0] for shard in row] for row in zip(*shards, strict=True)]

        return Program(
            put,
            ready(compiled),
            get,
            work.donated,
            participants=len(self._mesh.local_devices),
        )
