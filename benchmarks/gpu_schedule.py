"""Shows the order in which XLA would run a training step on a GPU. It compiles the step on a machine without one.

    pip install 'jax[cuda12]'
    python benchmarks/gpu_schedule.py --layers 6

It prints the scheduled program as letters: m is a product, f other work, C a copy of a whole matrix, A a sum between
ranks, S and D are the start and the end of such a sum. Products between S and D are computed while the sum is under way
(``pycollective/named_axes/overlap.py``). The GPU is an H100, from a description of it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver to ask
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies

import pycollective as pc
from pycollective.bench.workloads import AXIS, step
from pycollective.named_axes import overlap
from pycollective.ranks import accelerators
from pycollective.transport import native

# This is XLA's GpuTargetConfigProto. The keys of the rates are XLA's numbers for element types.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  scalar_unit_description { rate_infos { key: 11 value { clock_rate_ghz: 1.98 units_per_core: 128 ops_per_clock: 1 } } }
  matrix_unit_description { rate_infos { key: 11 value { clock_rate_ghz: 1.83 units_per_core: 4 ops_per_clock: 256 } } }
  device_vendor: "NVIDIA Corporation" name: "NVIDIA H100 80GB HBM3" model_str: "sm_9.0a"
  platform_version: "Compute Capability 9.0a" device_address_bits: 64 pcie_bandwidth: 34359738368
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
  device_interconnect_info { active_links: 18 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

_CALLS = {
    "pycollective_device_allreduce_start": "S",
    "pycollective_device_allreduce_done": "D",
    "pycollective_device_allreduce": "A",
}


def train(*params: jax.Array) -> tuple[jax.Array, ...]:
    return step(params, lambda grads: lax.pmean(grads, AXIS))


def letters(hlo: str, width: int) -> str:
    entry = hlo[hlo.index("\nENTRY") :]
    found = []
    for line in entry[: entry.index("\n}")].splitlines():
        if (match := re.match(r"\s*(?:ROOT )?%(\S+) = (.*?) ([a-z\-]+)\(", line)) is None:
            continue
        name, shape, operation = match.groups()
        target = re.search(r'custom_call_target="([^"]+)"', line)
        if target is not None and target[1] in _CALLS:
            found.append(_CALLS[target[1]])
        elif "dot" in name or "gemm" in name or (target is not None and "cublas" in target[1]):
            found.append("m")
        elif operation == "fusion":
            found.append("f")
        elif operation.startswith("copy") and str(width) in shape:
            found.append("C")
    return "".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--width", type=int, default=2048, help="of the float32 weights; from 512 on each has a bucket of its own"
    )
    options = parser.parse_args()
    pc.init()
    accelerators.kind_of = lambda _: "cuda"
    native.register(native.library(), native.device_targets(), "CUDA")
    topology = topologies.get_topology_desc("h100", "cuda", target_config=_H100, topology="1x1x1")
    mesh = jax.sharding.Mesh(np.array(topology.devices), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    w = jax.ShapeDtypeStruct((options.width, options.width), jnp.float32)
    overlapped = overlap.Overlap.__call__
    for name, arrange in (("as written", lambda _, jaxpr: jaxpr), ("overlap.py", overlapped)):
        overlap.Overlap.__call__ = arrange
        program = pc.jit(train, axis_name=AXIS)._program
        compiled = jax.jit(program, in_shardings=sharding).trace(*[w] * options.layers)
        text = compiled.lower(lowering_platforms=("cuda",)).compile().as_text()
        sys.stdout.write(f"{name:12} {letters(text, options.width)}\n")


if __name__ == "__main__":
    main()
