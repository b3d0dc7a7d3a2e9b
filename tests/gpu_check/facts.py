"""Prints what the ranks find on the machine: rank 0 prints a line of JSON.

``steps.py`` starts this program on several ranks. It fails if its sum does not run as a call on the device.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import pycollective as pc
from pycollective import build_id
from pycollective.environment import NATIVE_LIBRARY
from pycollective.transport import native, runtime
from tests.standin import compiler

# The modules that examples/train_digits.py imports.
TRAINING = ("optax", "sklearn", "matplotlib", "tqdm", "orbax.checkpoint")


def installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def number(library: str | None, function: str) -> str:
    """Returns a version of CUDA, such as 12.9, for which the function of the library gives 12090."""
    value = ctypes.c_int()
    if library is None or getattr(ctypes.CDLL(library), function)(ctypes.byref(value)) != 0:
        return "unknown"
    return f"{value.value // 1000}.{value.value % 1000 // 10}"


def mpi4jax_stages() -> str:
    """Returns why mpi4jax cannot be measured, or "" if it can."""
    if not installed("mpi4jax"):
        return "mpi4jax is not installed"
    try:
        import mpi4jax
    except (ImportError, OSError, RuntimeError) as error:
        return f"mpi4jax does not start: {error}"
    return "" if mpi4jax.has_cuda_support() else "mpi4jax is installed without CUDA"


def main() -> None:
    """Prints the facts, then checks one sum."""
    world = pc.init()
    devices = world.mpi.gather([device.device_kind for device in jax.local_devices()])
    if world.rank == 0:
        sys.stdout.write(f"facts: {json.dumps(facts(devices))}\n")
        sys.stdout.flush()
    x = jnp.arange(1000, dtype=jnp.float32) + world.rank
    total = jax.jit(lambda x: pc.psum(x, world))
    text = total.lower(x).as_text()
    if "pycollective_device_allreduce" not in text:
        sys.exit(f"facts: expected a program that calls pycollective_device_allreduce, got {text}")
    want = world.size * np.arange(1000) + sum(range(world.size))
    np.testing.assert_array_equal(total(x), want.astype(np.float32))


def facts(devices: list[list[str]] | None) -> dict[str, Any]:
    """Returns the facts that this rank finds.

    Args:
        devices: the kinds of the devices of each rank.
    """
    cudart, driver = runtime.loaded("libcudart.so"), runtime.loaded("libcuda.so")
    return {
        "devices": devices,
        "jax": f"{jax.__version__} (jaxlib {version_of('jaxlib')})",
        "python": platform.python_version(),
        "mpi": MPI.Get_library_version().splitlines()[0].strip(" \x00"),
        "pycollective": f"{pc.__version__}, build ID {build_id.of_library(NATIVE_LIBRARY.read_bytes())[:12] or 'none'}",
        "cores": len(os.sched_getaffinity(0)),
        "direct": native.is_direct(),
        "takes_device_memory": runtime.takes_device_memory(runtime.KINDS["cuda"]),
        "cudart": cudart,
        "cuda": number(cudart, "cudaRuntimeGetVersion"),
        "driver": number(driver, "cuDriverGetVersion"),
        "compiler": shutil.which(compiler()),
        "mpi4jax": mpi4jax_stages(),
        "training": [module for module in TRAINING if not installed(module)],
    }


if __name__ == "__main__":
    main()
