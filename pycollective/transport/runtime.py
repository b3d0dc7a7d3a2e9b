"""The runtime library of an accelerator, CUDA's or HIP's: where it is, and what it and its driver say of a device.

The C++ library is compiled without them; it gets the addresses of the functions that it calls
(``native/devices/runtime.h``). HIP has the same functions under other names. HIP is untested: no such device was at
hand.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

from pycollective.errors import message
from pycollective.transport.mpi import MPI


class Kind(NamedTuple):
    """A kind of accelerator.

    Attributes:
        platform: XLA's name of the platform, for the registration of handlers.
        library: the beginning of the file name of its runtime.
        hip: whether the functions have HIP's names.
        queries: the functions by which an MPI library says whether it reads and writes the memory of such devices.
        gpu_type: their number for MPICH's ``MPIX_GPU_query_support``, which says the same.
        driver: the library that identifies a device.
        get_device: the driver's function from a number to a handle.
        get_uuid: the driver's functions from a handle to 16 bytes that identify the device; the first that exists is
            used.
    """

    platform: str
    library: str
    hip: bool
    queries: tuple[str, ...]
    gpu_type: int
    driver: str
    get_device: str
    get_uuid: tuple[str, ...]


KINDS = {
    "cuda": Kind(
        platform="CUDA",
        library="libcudart.so",
        hip=False,
        queries=("MPIX_Query_cuda_support",),
        gpu_type=0,
        driver="libcuda.so.1",
        get_device="cuDeviceGet",
        get_uuid=("cuDeviceGetUuid_v2", "cuDeviceGetUuid"),  # the first one distinguishes the parts of one GPU
    ),
    "rocm": Kind(
        platform="ROCM",
        library="libamdhip64.so",
        hip=True,
        queries=("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
        gpu_type=2,
        driver="libamdhip64.so",
        get_device="hipDeviceGet",
        get_uuid=("hipDeviceGetUuid",),
    ),
}
"""The kinds by JAX's names of their platforms."""


def loaded(prefix: str, maps: Path = Path("/proc/self/maps")) -> str | None:
    """The file of a loaded shared library whose name begins with ``prefix``; None if there is none.

    Example:
        >>> loaded("libmpi") is not None or loaded("libmpich") is not None
        True
        >>> loaded("libnothing.so") is None
        True
    """
    files = (line.split(maxsplit=5)[5].strip() for line in maps.read_text().splitlines() if line.count("/"))
    return next((file for file in files if Path(file).name.startswith(prefix)), None)


def load(kind: Kind) -> ctypes.CDLL:
    """The runtime that JAX has loaded. If there is none, since XLA may contain its own, the one that the system finds.

    Raises:
        ImportError: the system finds none, either.
    """
    names = [loaded(kind.library), *(f"{kind.library}{suffix}" for suffix in ("", ".13", ".12", ".7", ".6"))]
    for name in filter(None, names):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ImportError(
        message(
            "transport",
            f"{kind.library} in this process, or where the system looks for libraries",
            "none",
            "Install jax with its CUDA libraries (pip install 'jax[cuda13]'), or add them to LD_LIBRARY_PATH.",
        )
    )


def load_driver(kind: Kind) -> ctypes.CDLL | None:
    """The driver of such devices; None if the system finds none."""
    try:
        return ctypes.CDLL(kind.driver)
    except OSError:
        return None


def make_current(kind: Kind, ordinal: int) -> None:
    """Makes a device current in this thread, as in each thread in which the C++ library calls MPI.

    Args:
        kind: the kind of the device.
        ordinal: the runtime's number of the device in this process.
    """
    getattr(load(kind), "hipSetDevice" if kind.hip else "cudaSetDevice")(ordinal)


def takes_device_memory(kind: Kind, mpi: Any = None) -> bool | None:
    """Whether the MPI library says that it reads and writes the memory of such devices; None if it does not say.

    Args:
        kind: the kind of the devices.
        mpi: the library; None for that of this process.
    """
    if mpi is None:  # a look-up through mpi4py's own extension finds the MPI library that mpi4py uses
        mpi = ctypes.CDLL(MPI.__file__)
    answers = [bool(query()) for name in kind.queries if (query := getattr(mpi, name, None)) is not None]
    if (query := getattr(mpi, "MPIX_GPU_query_support", None)) is not None:
        answer = ctypes.c_int(0)
        answers.append(query(kind.gpu_type, ctypes.byref(answer)) == 0 and bool(answer.value))
    return any(answers) if answers else None


def identity(kind: Kind, ordinal: int) -> str | None:
    """A string that no other device of the host has, nor another part of the same GPU; None if the driver gives none.

    Args:
        kind: the kind of the device.
        ordinal: the runtime's number of the device in this process.
    """
    uuid = (ctypes.c_ubyte * 16)()
    handle = ctypes.c_int()
    driver = load_driver(kind)
    get_device = getattr(driver, kind.get_device, None)
    get_uuid = next((getattr(driver, name) for name in kind.get_uuid if hasattr(driver, name)), None)
    if get_device is None or get_uuid is None:
        return None
    if get_device(ctypes.byref(handle), ordinal) != 0 or get_uuid(uuid, handle) != 0:
        return None
    return bytes(uuid).hex()
