"""XLA's compiler for GPUs on a machine without one: it compiles for an H100 from a description.

Programs that use it run under ``scripts/cuda-compiler``, which brings JAX's plugin for CUDA. :func:`start` comes first.
:func:`compiled` makes the program that the first call of a function would make on these GPUs. No program runs.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

import pycollective as pc
from pycollective.jax_support.program_text import Program
from pycollective.ranks import accelerators, setup
from pycollective.transport import native
from tests.compiled_for_gpu.thunks import Thunk, read_thunks

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

OPTIONS: dict[str, Any] = {
    "xla_gpu_autotune_level": 0,  # it would run kernels
    "xla_gpu_graph_min_graph_size": 1,  # each kernel that may stand in a command buffer does: the programs are small
}


@dataclass(frozen=True)
class Compiled:
    """A program as a GPU would run it.

    Attributes:
        text: XLA's text, whose instructions stand in the order in which they run.
        thunks: what XLA enqueues, in this order; the members of a command buffer lie in it.
        code: the code of the kernels (PTX), where XLA writes it (JAX 0.10).
        donated: the bytes of results that lie in buffers of donated arguments.
    """

    text: str
    thunks: list[Thunk]
    code: str
    donated: int

    @functools.cached_property
    def program(self) -> Program:
        """The text, read."""
        return Program.read(self.text)


def start(devices: int) -> None:
    """Initialises the package as on ranks with so many GPUs each; all ranks must make this call, before any other."""
    pc.init(devices=devices)
    accelerators.kind_of = lambda _: "cuda"
    accelerators.lane_id = lambda device: accelerators.LANES + device.id  # a description has no `local_hardware_id`
    native.register(native.library(), native.device_targets(), "CUDA")
    described = topologies.get_topology_desc("h100", "cuda", target_config=_H100, topology=f"1x1x{devices}").devices
    setup._devices_now = lambda _: tuple(described)


def on_one_gpu() -> dict[str, Any]:
    """The option of :func:`pycollective.jit` for a program on the first GPU of this rank."""
    return {"in_shardings": jax.sharding.SingleDeviceSharding(setup.devices_of_this_rank()[0])}


def compiled(function: Any, *args: Any, **options: Any) -> Compiled:
    """Compiles the program of the first call of a function. All ranks must make this call: they compare the program.

    Args:
        function: what :func:`pycollective.jit`, ``pmap`` or ``shard_map`` returns.
        args: its arguments; the shapes suffice.
        options: of XLA, besides :data:`OPTIONS`.
    """
    function._prepare_first_call(args, {})
    lowered = function._top_level.trace(*args).lower(lowering_platforms=("cuda",))
    with tempfile.TemporaryDirectory(prefix="pycollective-xla-") as folder:
        executable = lowered.compile(compiler_options={"xla_dump_to": folder, **OPTIONS, **options})
        return Compiled(
            executable.as_text(),
            read_thunks(Path(folder)),
            "".join(file.read_text() for file in sorted(Path(folder).glob("*.ptx"))),
            executable.memory_analysis().alias_size_in_bytes,
        )
