"""Accelerators of plain memory: the handlers for GPUs, without a GPU.

``PYCOLLECTIVE_TEST_STANDIN=staged`` (or ``direct``) makes the suites under mpirun take every CPU device for such an
accelerator: lowering, handlers, streams, events, page-locked buffers and MPI are those of a GPU; the runtime library is
``cudart.cc``, and ``xla.cc`` makes XLA's CPU runtime call the handlers as its GPU runtime does.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from jax.ffi import include_dir

_DELAY_US = 30
"""How long each copy takes."""

_HERE = Path(__file__).parent
_NATIVE = _HERE.parents[1] / "native"


def compiler() -> str:
    return os.environ.get("CXX") or (sysconfig.get_config_var("CXX") or "g++").split()[0]


def compile_cpp(sources: list[Path], out: Path, *flags: str) -> Path:
    """Compiles C++ as the package does; into a file of its own first, since several ranks may do so at once."""
    descriptor, name = tempfile.mkstemp(dir=out.parent)
    os.close(descriptor)
    made = Path(name)
    include = ["-isystem", include_dir(), "-I", str(_NATIVE), "-I", str(_HERE)]
    command = [compiler(), "-std=c++17", "-O1", "-g", "-fPIC", "-pthread", "-Wall", "-Wextra", *include, *flags]
    subprocess.run([*command, *map(str, sources), "-ldl", "-o", str(made)], check=True, timeout=300)
    made.chmod(0o755)
    made.replace(out)
    return out


@functools.cache
def library(folder: Path) -> ctypes.CDLL:
    """The stand-in, compiled into ``folder``; or into ``PYCOLLECTIVE_TEST_STANDIN_FOLDER``, where it stays."""
    sources = [_HERE / "cudart.cc", _HERE / "xla.cc"]
    if keep := os.environ.get("PYCOLLECTIVE_TEST_STANDIN_FOLDER"):
        out = Path(keep) / "standin.so"
        with (Path(keep) / "standin.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one of the ranks compiles
            if not out.exists():
                compile_cpp(sources, out, "-shared")
        return ctypes.CDLL(str(out))
    out = folder / f"standin-{os.getpid()}.so"
    compile_cpp(sources, out, "-shared")
    loaded = ctypes.CDLL(str(out))
    out.unlink()
    return loaded


def install(mode: str) -> None:
    """Makes every CPU device of this process such an accelerator. Before anything else imports the package's modules.

    Args:
        mode: "staged", or "direct" for an MPI that reads and writes their memory.
    """
    if mode not in ("staged", "direct"):
        raise ValueError(f"PYCOLLECTIVE_TEST_STANDIN: expected staged or direct, got {mode!r}")
    lowering = importlib.import_module("pycollective.lowering")
    assert "pycollective.primitives" not in sys.modules, "the lowerings are registered already"
    lowering.HOSTS, lowering.ACCELERATORS = (), ("cpu",)
    native = importlib.import_module("pycollective.transport.native")
    accelerators = importlib.import_module("pycollective.accelerators")
    standin = library(Path(tempfile.gettempdir()))
    standin.standin_use.restype = ctypes.c_bool
    native.start()
    assert standin.standin_use(native.library()._name.encode())
    standin.standin_set_delay_us(ctypes.c_int64(_DELAY_US))
    native.bind_runtime(standin, hip=False, direct=mode == "direct")
    native.register(standin, native.DEVICE_TARGETS, "cpu")
    accelerators.lane_id = lambda device: accelerators.LANES + device.id
