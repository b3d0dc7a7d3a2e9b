"""JAX's own collectives between processes by gloo, in a JAX cluster without MPI."""

from __future__ import annotations

import jax

from pycollective.bench.implementations import GlobalArrays


def join(address: str, rank: int, size: int, devices: int) -> GlobalArrays:
    """Joins this process to a JAX cluster. This must come before the first use of JAX's devices."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it keeps SIGTERM from ending this process
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(address, size, rank)
    return GlobalArrays("jax gloo")
