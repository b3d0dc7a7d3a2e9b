"""XLA's flags for tests: most of their programs run once, so they should compile fast rather than run fast.

``python -m tests.unoptimised`` prints the flags, for scripts.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",  # halves the time, since the emitters lower each fusion through MLIR
    "--xla_cpu_parallel_codegen_split_count=1",  # what compiles in parts costs more where all cores have work
    # XLA ends a process in which a device comes 40 s late to one of XLA's own collectives. On a busy machine the other
    # ranks may be so late; a test that hangs is ended by pytest, which shows all stacks.
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)


@functools.cache
def flags() -> str:
    """Returns the value for XLA_FLAGS. It leaves out flags that this XLA does not know, since XLA aborts at those."""
    flags = [*os.environ.get("XLA_FLAGS", "").split(), *_FLAGS]
    if not _accepted(flags):
        flags = [flag for flag in flags if flag not in _FLAGS or _accepted([flag])]
    return " ".join(flags)


def _accepted(flags: list[str]) -> bool:
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    start = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(start, env=environ, capture_output=True, timeout=60).returncode == 0


if __name__ == "__main__":
    sys.stdout.write(flags() + "\n")
