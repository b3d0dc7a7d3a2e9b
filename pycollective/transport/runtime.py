"""The runtime library of an accelerator, CUDA's or HIP's: found among those that JAX has loaded, and asked.

The C++ library is compiled without either; it gets the addresses of the functions that it calls (``native/runtime.h``).
HIP has the same functions under other names. That way is untested: no such device was at hand.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

from pycollective.errors import message
from pycollective.transport.mpi import MPI


class Kind(NamedTuple):
    """A kind of accelerator.

    Attributes:
        platform: as XLA registers handlers for it.
        library: how the file of its runtime begins.
        hip: whether functions have HIP's names.
        queries: by which an MPI library says whether it reads and writes the memory of such devices.
        driver: the library whose functions ``get_device`` and, the first that it has, ``get_uuid`` identify a device.
    """

    platform: str
    library: str
    hip: bool
    queries: tuple[str, ...]
    driver: str
    get_device: str
    get_uuid: tuple[str, ...]


KINDS = {
    "cuda": Kind(
        platform="CUDA",
        library="libcudart.so",
        hip=False,
        queries=("MPIX_Query_cuda_support",),
        driver="libcuda.so.1",
        get_device="cuDeviceGet",
        get_uuid=("cuDeviceGetUuid_v2", "cuDeviceGetUuid"),  # the newer one tells parts of one GPU apart
    ),
    "rocm": Kind(
        platform="ROCM",
        library="libamdhip64.so",
        hip=True,
        queries=("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
        driver="libamdhip64.so",
        get_device="hipDeviceGet",
        get_uuid=("hipDeviceGetUuid",),
    ),
}
"""By the name of JAX's platform."""


def loaded(prefix: str, maps: Path = Path("/proc/self/maps")) -> str | None:
    """The file of a shared library of this process whose name begins with ``prefix``; None if there is none.

    Example:
        >>> loaded("libmpi") is not None or loaded("libmpich") is not None
        True
        >>> loaded("libnothing.so") is None
        True
    """
    files = (line.split(maxsplit=5)[5].strip() for line in maps.read_text().splitlines() if line.count("/"))
    return next((file for file in files if Path(file).name.startswith(prefix)), None)


def load(kind: Kind) -> ctypes.CDLL:
    """The runtime that JAX has loaded; else the one that the system finds, for XLA may have its own inside.

    Raises:
        ImportError: there is none.
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


def takes_device_memory(kind: Kind) -> bool | None:
    """Whether this MPI reads and writes the memory of such devices; None where it does not say."""
    # Through mpi4py's own extension: it knows the right library.
    mpi = ctypes.CDLL(MPI.__file__)
    answers = [bool(query()) for name in kind.queries if (query := getattr(mpi, name, None)) is not None]
    return any(answers) if answers else None


def identity(kind: Kind, ordinal: int) -> str | None:
    """What tells a device apart from all others of its host, parts of one GPU too; None where that cannot be known.

    Args:
        kind: of accelerator.
        ordinal: its number in this process, as the runtime counts.
    """
    uuid = (ctypes.c_ubyte * 16)()
    handle = ctypes.c_int()
    try:
        driver = ctypes.CDLL(kind.driver)
    except OSError:
        return None
    get_device = getattr(driver, kind.get_device, None)
    get_uuid = next((getattr(driver, name) for name in kind.get_uuid if hasattr(driver, name)), None)
    if get_device is None or get_uuid is None:
        return None
    if get_device(ctypes.byref(handle), ordinal) != 0 or get_uuid(uuid, handle) != 0:
        return None
    return bytes(uuid).hex()
