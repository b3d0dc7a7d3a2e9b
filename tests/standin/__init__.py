"""Stand-ins for GPUs: they run the package's handlers for GPUs on CPU devices, in plain memory.

``PYCOLLECTIVE_TEST_STANDIN=staged`` (or ``direct``) makes the suites under mpirun use every CPU device as a stand-in.
Lowering, handlers, streams, events, page-locked buffers and MPI work as on a GPU. ``cudart.cc`` replaces CUDA's
runtime, and ``xla.cc`` makes XLA's CPU runtime call the handlers as XLA's GPU runtime does. ``mpi.cc`` looks at the
memory that MPI gets.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jaxlib
from jax.ffi import include_dir

_DELAY_US = 20
"""The shortest time that a copy takes; the longest is twice that."""

_TYPES_OF_DATA = ("INT8_T", "INT16_T", "INT32_T", "UINT16_T", "UINT32_T", "FLOAT", "DOUBLE", "C_FLOAT_COMPLEX")
"""Ranks send headers and comparisons as bytes and as integers of 64 bits, which are no sign of data."""
_TRIAL_BYTES = 256

_HERE = Path(__file__).parent
_NATIVE = _HERE.parents[1] / "native"


def compiler() -> str:
    return os.environ.get("CXX") or (sysconfig.get_config_var("CXX") or "g++").split()[0]


def _command(flags: Sequence[str], by: str | None) -> list[str]:
    include = ["-isystem", include_dir(), "-I", str(_NATIVE), "-I", str(_HERE)]
    return [by or compiler(), "-std=c++17", "-O1", "-g1", "-fPIC", "-pthread", "-Wall", "-Wextra", *include, *flags]


def compile_objects(sources: Sequence[Path], objects: Path, *flags: str, by: str | None = None) -> list[Path]:
    """Compiles C++, a source on each core. Returns the object files, in the order of ``sources``.

    Args:
        sources: files of C++, no two of one name.
        objects: an existing directory for the object files. One that is there is compiled again only if its source or a
            header has changed since.
        flags: of the compiler, besides.
        by: the compiler; default that of Python.
    """
    # In a directory of this process, since several ranks may compile at the same time.
    with tempfile.TemporaryDirectory(dir=objects) as folder:

        def compiled(source: Path) -> Path:
            file = Path(folder) / f"{source.stem}.o"
            kept = objects / file.name
            if not kept.exists() or kept.stat().st_mtime <= _changed_at(source):
                subprocess.run([*_command(flags, by), "-c", str(source), "-o", str(file)], check=True, timeout=300)
                file.replace(kept)
            return kept

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(compiled, sources))


def compile_cpp(
    sources: list[Path], out: Path, *flags: str, objects: Path | None = None, by: str | None = None
) -> Path:
    """Compiles C++ into ``out``, a source on each core. Returns ``out``.

    Args:
        sources: files of C++; others, such as libraries, are linked as they are.
        out: the program or library.
        flags: of the compiler, besides.
        objects: an existing directory for what the sources become, which later calls with the same flags take from
            there, unless a source or a header has changed since; None: it is not kept.
        by: the compiler; default that of Python.
    """
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        own = [source for source in sources if source.suffix == ".cc"]
        parts = [source for source in sources if source.suffix != ".cc"]
        parts = [*compile_objects(own, objects or Path(folder), *flags, by=by), *parts]
        made = Path(folder) / out.name
        subprocess.run([*_command(flags, by), *map(str, parts), "-ldl", "-o", str(made)], check=True, timeout=300)
        made.replace(out)
    return out


def _changed_at(source: Path) -> float:
    """When a source, or a header that it may include, was changed last."""
    headers = (header for folder in (_NATIVE, _HERE, source.parent) for header in folder.rglob("*.h"))
    return max(path.stat().st_mtime for path in (source, *headers))


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the stand-in's library. It is compiled once for all runs with the same sources and the same JAX."""
    sources = [_HERE / "cudart.cc", _HERE / "mpi.cc", _HERE / "xla.cc"]
    made_from = hashlib.sha256(f"{compiler()} {include_dir()} {jaxlib.__version__}".encode())
    for path in (Path(__file__), *sources, *sorted(_HERE.glob("*.h")), *sorted(_NATIVE.rglob("*.h"))):
        made_from.update(path.read_bytes())
    out = _NATIVE.parent / "build" / f"standin-{made_from.hexdigest()[:16]}.so"
    if not out.exists():
        out.parent.mkdir(exist_ok=True)
        compile_cpp(sources, out, "-shared")
    return ctypes.CDLL(str(out))


def install(mode: str) -> None:
    """Makes every CPU device of this process a stand-in. It must run before the package's modules are imported.

    Args:
        mode: "staged", or "direct": MPI reads and writes the memory of the devices.
    """
    if mode not in ("staged", "direct"):
        raise ValueError(f"PYCOLLECTIVE_TEST_STANDIN: expected staged or direct, got {mode!r}")
    lowering = importlib.import_module("pycollective.primitives.lowering")
    assert "pycollective.primitives.define" not in sys.modules, "the lowerings are registered already"
    lowering.HOSTS, lowering.ACCELERATORS = (), ("cpu",)
    native = importlib.import_module("pycollective.transport.native")
    config = importlib.import_module("pycollective.config").config
    accelerators = importlib.import_module("pycollective.ranks.accelerators")
    standin = library()
    standin.standin_use.restype = ctypes.c_bool
    _watch_mpi(standin, native, direct=mode == "direct")
    standin.standin_malloc.restype = ctypes.c_int64
    native.start()
    assert standin.standin_use(native.library()._name.encode())
    standin.standin_set_delay_us(ctypes.c_int64(_DELAY_US))
    if mode == "direct":
        standin.standin_open_memory()
    native.bind_runtime(standin, hip=False, direct=mode == "direct")
    ordinals = range(int(os.environ.get("JAX_NUM_CPU_DEVICES", "1")))
    if config.gpu_dispatch == "ahead":
        assert native.bind_ahead(standin) is None
        memory = standin.standin_malloc(ctypes.c_size_t(_TRIAL_BYTES))
        assert not any(native.fault_in_ahead(ordinal, memory, _TRIAL_BYTES) for ordinal in ordinals)
        native.set_ahead(True)
    native.register(standin, native.device_targets(), "cpu", native.library().pycollective_instantiate_by_plugin)
    accelerators.lane_id = lambda device: accelerators.LANES + device.id
    check = accelerators.check

    def check_and_reserve(mpi: Any, own: Any, **options: Any) -> Any:
        kind = check(mpi, own, **options)  # init starts accelerators next, if there are any
        native.reserve_buffers(mpi, ordinals)
        return kind

    accelerators.check = check_and_reserve


def _watch_mpi(standin: ctypes.CDLL, native: Any, *, direct: bool) -> None:
    """Lets the stand-in look at the memory that MPI gets, from when ``native`` binds the library to MPI."""
    addresses = native._addresses

    def watched(found: Any, names: Iterable[str], *texts: str) -> Any:
        names = tuple(names)
        made = addresses(found, names, *texts)
        if names[0].startswith("MPI_"):
            mpi = native.MPI
            types = native.int64s([native._handle(getattr(mpi, name)) for name in _TYPES_OF_DATA])
            of_mpi = ctypes.c_int64(mpi._sizeof(mpi.Comm)), ctypes.c_int64(int(mpi.IN_PLACE))
            is_strict = native.config.bucket_bytes == 0
            standin.standin_watch_mpi(made, *of_mpi, direct, is_strict, types, ctypes.c_int64(len(types)))
        return made

    native._addresses = watched
