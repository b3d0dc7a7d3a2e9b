"""The compiled library: the names that Python reads from it, and what happens where the two do not match."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import types
import unittest.mock
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from mpi4py import MPI

import pycollective as pc
from pycollective.environment import NATIVE_LIBRARY
from pycollective.launch import child_processes
from pycollective.primitives import define, dtypes, exchanges, messages, ragged, reductions, requests
from pycollective.transport import native, native_library, watch
from tests.standin import compile_cpp

X = jax.ShapeDtypeStruct((4, 2), jnp.float32)


@pytest.fixture(scope="module")
def world() -> pc.Communicator:
    return pc.init()


def primitives_of(module: types.ModuleType) -> set[str]:
    primitives = {value.primitive for value in vars(module).values() if isinstance(value, define.Collective)}
    primitives |= {value for value in vars(module).values() if isinstance(value, Primitive)}
    return {primitive.name for primitive in primitives}


def test_each_primitive_has_its_handlers(world: pc.Communicator) -> None:
    modules = (reductions, exchanges, ragged, messages, requests)
    assert set(native.host_targets()) == set().union(*map(primitives_of, modules))
    assert {f"device_{name}" for name in native.host_targets()} < set(native.device_targets())
    for target in (*native.host_targets(), *native.device_targets()):
        assert hasattr(native.library(), f"pycollective_{target}"), target


def test_reductions_have_numbers(world: pc.Communicator) -> None:
    numbers = [native.op_number(op) for op in (*dtypes.OPS, *dtypes.SUMS)]
    assert len(set(numbers)) == len({*dtypes.OPS, *dtypes.SUMS})


cube = define.Collective("cube")


@pytest.mark.parametrize(("platform", "target"), [("cpu", "cube"), ("cuda", "device_cube")])
def test_an_operation_that_the_library_lacks(platform: str, target: str, world: pc.Communicator) -> None:
    traced = jax.jit(lambda x: cube(x, comm=world)).trace(X)
    with pytest.raises(
        RuntimeError,
        match=rf"{target}: expected a compiled library with a handler for {target}, got one with .*allgather.*\. "
        "Build the library again",
    ):
        traced.lower(lowering_platforms=(platform,))


def test_a_reduction_that_the_library_lacks(world: pc.Communicator) -> None:
    traced = jax.jit(lambda x: reductions.allreduce_all([x], comm=world, op="median")).trace(X)
    with pytest.raises(
        RuntimeError, match=r"transport: expected a reduction of sum, prod.*, got 'median'\. Build the library again"
    ):
        traced.lower()


def exported() -> set[str]:
    """The functions of the library that are no handlers of XLA's, without their prefix."""
    command = ["nm", "-D", "--defined-only", str(NATIVE_LIBRARY)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    names = {line.split()[-1].removeprefix("pycollective_") for line in lines if " pycollective_" in line}
    handlers = (*native.host_targets(), *native.async_targets(), *native.device_targets(), *native.guard_targets())
    return names - {*handlers, "async_results", "functions", "instantiate", "instantiate_by_plugin"}


def test_the_table_has_every_function(world: pc.Communicator) -> None:
    """A function without its types returns an int, and takes a number of 64 bits for one of 32."""
    entries = [entry.split()[0] for entry in native_library.table(native.library().pycollective_functions)]
    assert len(set(entries)) == len(entries)
    assert set(entries) == exported()
    spans_hosts = native.library().pycollective_spans_hosts
    assert (spans_hosts.restype, spans_hosts.argtypes) == (ctypes.c_int32, [ctypes.c_int64])


def frame(file: str, line: int, name: str) -> dict[str, object]:
    return {"filename": file, "line": line, "name": name}


@pytest.mark.parametrize(
    ("site", "text", "frames"),
    [
        (101, "train.py:12 (step, transpose)", [frame("train.py", 12, "step, transpose")]),
        (102, "a:7 (b).py:3 (f (g: h))", [frame("a:7 (b).py", 3, "f (g: h)")]),
        (103, 'caf\udce9 "1".py:3 (<lambda>)', [frame('caf\\udce9 "1".py', 3, "<lambda>")]),
        (104, "é\n.py:1 (f)", [frame("é\n.py", 1, "f")]),
        (105, "train.py:x (step)", []),
        (106, "train.py:007 (step)", []),
        (107, "train.py:7 (step", []),
        (108, "", []),
    ],
)
def test_the_line_of_a_call_is_json(world: pc.Communicator, site: int, text: str, frames: list[object]) -> None:
    """Whatever the names of the file and of the function are."""
    watch.add_site(site, text)
    words = watch.record_words()
    record = np.zeros(len(words), np.int64)
    record[words.index("site")] = site
    assert json.loads(watch.record_json(record.tobytes()))["frames"] == frames


def test_the_types_of_arguments_are_checked(world: pc.Communicator) -> None:
    with pytest.raises(ctypes.ArgumentError, match="argument 2"):
        native.library().pycollective_wait_begin(0, "all")
    with pytest.raises(TypeError, match="at least 1 argument"):
        native.library().pycollective_monitor_forget()


def test_the_library_waits_for_its_reader_as_long_as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times = unittest.mock.Mock()
    monkeypatch.setattr(native_library._Library, "pycollective_set_read_times", set_times, raising=False)
    native.load(NATIVE_LIBRARY)
    set_times.assert_called_once_with(child_processes.READ_TIMEOUT_S, child_processes.FORWARDING_S)


def test_a_library_of_another_version() -> None:
    with pytest.raises(
        ImportError,
        match=r"transport: expected a compiled library of this version, with the function pycollective_\w+, got .* "
        r"without it\. Build the library again",
    ):
        native.load(Path(MPI.__file__))


def test_no_library(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"transport: expected the compiled library .*_native.so, got no such file"):
        native.load(tmp_path / "_native.so")


def test_the_library_needs_no_symbol_that_it_lacks() -> None:
    """XLA opens it lazily, and then an undefined symbol shows only where something calls it."""
    code = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)"
    subprocess.run([sys.executable, "-c", code, str(NATIVE_LIBRARY)], check=True, timeout=60)


# Says which functions of C++ a library has registered for the end of the process: destructors of its objects.
EXIT_FUNCTIONS = r"""
#include <dlfcn.h>
#include <cstdio>
#include <cstring>

extern "C" int __cxa_atexit(void (*function)(void*), void* object, void* handle) {
  static const auto next = reinterpret_cast<decltype(&__cxa_atexit)>(dlsym(RTLD_NEXT, "__cxa_atexit"));
  Dl_info of_library{}, of_function{};
  dladdr(handle, &of_library);
  dladdr(reinterpret_cast<void*>(function), &of_function);
  const char* const name = of_function.dli_sname == nullptr ? "?" : of_function.dli_sname;
  const bool is_of_iostream = std::strcmp(name, "_ZNSt8ios_base4InitD1Ev") == 0;
  if (of_library.dli_fname != nullptr && std::strstr(of_library.dli_fname, "_native.so") != nullptr) {
    std::printf("%s %s\n", is_of_iostream ? "iostream" : "OBJECT", name);
    std::fflush(stdout);
  }
  return next(function, object, handle);
}
"""

CALLS = """
import jax, jax.numpy as jnp
import pycollective as pc

world = pc.init()
x = jnp.ones(4)
calls = [pc.psum(x, world), pc.sendrecv(x, world, source=0, dest=0), jax.jit(lambda x: pc.psum(x, world))(x)]
jax.block_until_ready(calls)
"""


def test_nothing_of_the_library_is_destroyed_at_the_end(tmp_path: Path) -> None:
    """Threads that nobody waits for may make a call while the process ends."""
    source = tmp_path / "exit_functions.cc"
    source.write_text(EXIT_FUNCTIONS)
    preloaded = compile_cpp([source], tmp_path / "exit_functions.so", "-shared")
    env = {**os.environ, "LD_PRELOAD": str(preloaded)}
    env.pop("MPITRAMPOLINE_LIB", None)  # XLA would open the library itself, with its own view of the C library
    run = subprocess.run([sys.executable, "-c", CALLS], env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert any(line.startswith("iostream") for line in lines), (
        f"LOUD: nothing of the library was seen\n{run.stdout}{run.stderr}"
    )
    assert [line for line in lines if line.startswith("OBJECT")] == []
