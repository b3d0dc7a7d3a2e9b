"""The peer that JAX brings: ``jax.distributed`` with gloo, in this process. Imported before any device is used."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pycollective.bench.contenders import Program, looped
from pycollective.bench.rendezvous import free_port
from pycollective.bench.works import AXIS, Work
from pycollective.mpi import MPI

_BROADCASTS = ("broadcast",)  # XLA's CPU collectives have none


def start(comm: MPI.Intracomm) -> None:
    """Joins the ranks to one JAX cluster. Comes before the first use of JAX's devices."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(free_port(comm), comm.size, comm.rank)


class JaxGloo:
    """The same named-axis function under :func:`jax.shard_map`, over the devices of all processes."""

    name = "jax gloo"

    def __init__(self, devices: int) -> None:
        by_process = [jax.local_devices(process)[:devices] for process in range(jax.process_count())]
        self._mesh = Mesh(np.array(by_process).flatten(), AXIS)
        self._sharding = NamedSharding(self._mesh, PartitionSpec(AXIS))

    def program(self, work: Work) -> Program | None:
        if work.mode == "eager" or work.op in _BROADCASTS:
            return None
        function = looped(work.function(), work)

        def local(*blocks: Any) -> Any:
            return tuple(y[None] for y in function(*(x[0] for x in blocks)))

        spec = PartitionSpec(AXIS)
        compiled = jax.jit(
            jax.shard_map(local, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False),
            donate_argnums=work.donate_argnums,
        )

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
            lambda xs: jax.block_until_ready(compiled(*xs)),
            get,
            work.donated,
            participants=len(self._mesh.local_devices),
        )
