"""The native transport: loads the C++ library, binds it to the MPI that mpi4py loaded, registers its handlers.

Nothing here knows JAX's tracing or the meaning of a collective. The names of operations, reductions and element types
come from the library, where each stands once (``native/operations.h``, ``native/mpi.h``).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from pycollective.config import config
from pycollective.environment import NATIVE_LIBRARY
from pycollective.errors import FROM_A_CLONE, message
from pycollective.transport import runtime
from pycollective.transport.mpi import MPI

_BUILD = "Build the library again: install the package with pip, or run python setup.py build_ext --inplace in a clone."


XLA_MARK_COUNT = 4
"""The number of integers by which the library tells a program of :func:`xla_learns` (native/xla_mpi.cc)."""


class _Binding(ctypes.Structure):
    """``Binding`` of native/mpi.h."""

    _fields_ = [
        ("handle_bytes", ctypes.c_int64),
        ("in_place", ctypes.c_int64),
        ("errors_return", ctypes.c_int64),
        ("proc_null", ctypes.c_int64),
        ("any_tag", ctypes.c_int64),
        ("largest_tag", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int64)),
        ("ops", ctypes.POINTER(ctypes.c_int64)),
    ]


class Waiting(ctypes.Structure):
    """The call that has waited inside MPI for longest; ``pycollective_Waiting`` of native/binding.cc."""

    _fields_ = [
        ("operation", ctypes.c_char_p),
        ("communicator", ctypes.c_char_p),
        ("nbytes", ctypes.c_int64),
        ("waited_ns", ctypes.c_int64),
    ]


_RESULTS = {
    "function_name": ctypes.c_char_p,
    "type_name": ctypes.c_char_p,
    "mpi_op_name": ctypes.c_char_p,
    "op_name": ctypes.c_char_p,
    "operation_name": ctypes.c_char_p,
    "device_operation_name": ctypes.c_char_p,
    "guard_name": ctypes.c_char_p,
    "runtime_name": ctypes.c_char_p,
    "bind": ctypes.c_char_p,
    "bind_runtime": None,
    "communicator_add": ctypes.c_int64,
    "part_add": ctypes.c_int64,
    "communicator_free": ctypes.c_char_p,
    "longest_wait": ctypes.c_bool,
    "this_process": ctypes.c_int64,
    "set_check": None,
    "set_all_lanes": None,
    "set_max_count": None,
    "tune_malloc": ctypes.c_bool,
    "xla_is_open": ctypes.c_bool,
    "xla_start": None,
    "xla_learn": None,
}
"""The functions of native/binding.cc and xla_mpi.cc without their prefix, and the types of their results."""


def load(path: Path) -> ctypes.CDLL:
    """Loads the compiled library, without binding it to MPI.

    Raises:
        ImportError: there is none, or it was built from other sources than this file.
    """
    if not path.exists():
        raise ImportError(
            message(
                "transport",
                f"the compiled library {path}",
                "no such file",
                "Install the package with pip (it needs a C++17 compiler), not by copying its files.",
            )
        )
    library = ctypes.CDLL(str(path))
    for name, result in _RESULTS.items():
        if not hasattr(library, f"pycollective_{name}"):
            wanted = f"a compiled library of this version, with the function pycollective_{name}"
            raise ImportError(message("transport", wanted, f"{path} without it", _BUILD))
        getattr(library, f"pycollective_{name}").restype = result
    return library


def _names(name_at: Callable[[ctypes.c_int64], bytes | None]) -> tuple[str, ...]:
    """The names of a table of the library, which ends with null."""
    names: list[str] = []
    while name := name_at(ctypes.c_int64(len(names))):
        names.append(name.decode())
    return tuple(names)


def _bind(library: ctypes.CDLL) -> None:
    """Gives the library the addresses and handles of the MPI that mpi4py has loaded."""
    # Symbols are looked up through mpi4py's own extension: that searches just the libraries it was
    # linked to, so it finds the right MPI even when another one is loaded too.
    mpi = ctypes.CDLL(MPI.__file__)
    addresses = _addresses(
        mpi,
        _names(library.pycollective_function_name),
        "an MPI library with {} (MPI 3.0)",
        MPI.Get_library_version().splitlines()[0],
        f"Install a newer MPI, for example by {FROM_A_CLONE}.",
    )
    binding = _Binding(
        MPI._sizeof(MPI.Comm),
        int(MPI.IN_PLACE),
        _handle(MPI.ERRORS_RETURN),
        MPI.PROC_NULL,
        MPI.ANY_TAG,
        cast("int", MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)),
        _int64s([_handle(getattr(MPI, name)) for name in _names(library.pycollective_type_name)]),
        _int64s([_handle(getattr(MPI, name)) for name in _names(library.pycollective_mpi_op_name)]),
    )
    error = library.pycollective_bind(ctypes.byref(binding), addresses)
    if error:
        raise ImportError(
            message("transport", "a usable MPI library", error.decode(), "Check that mpi4py itself works with it.")
        )


def _addresses(
    found: ctypes.CDLL, names: Iterable[str], expected: str, got: str, remedy: str
) -> ctypes.Array[ctypes.c_void_p]:
    """The addresses of functions of a library; raises ImportError for one that it lacks."""
    addresses: list[int | None] = []
    for name in names:
        try:
            function = getattr(found, name)
        except AttributeError:
            raise ImportError(message("transport", expected.format(name), got, remedy)) from None
        addresses.append(ctypes.cast(function, ctypes.c_void_p).value)
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _handle(obj: Any) -> int:
    """An MPI handle as a signed 64-bit integer."""
    return ctypes.c_int64(MPI._handleof(obj)).value


def _int64s(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _int32s(values: Sequence[int]) -> Any:
    return (ctypes.c_int32 * len(values))(*values)


_library: ctypes.CDLL | None = None
_direct = False


def start(ranks: int = 1) -> None:
    """Loads, binds and registers the library. MPI must be initialised. Does nothing the second time.

    Args:
        ranks: number of ranks on this host, which share its memory.
    """
    global _library
    if _library is not None:
        return
    library = load(NATIVE_LIBRARY)
    _bind(library)
    library.pycollective_set_check(config.check)
    library.pycollective_set_all_lanes(int(config.all_lanes))
    if config.malloc:
        library.pycollective_tune_malloc(ranks)
    register(library, [*_names(library.pycollective_operation_name), *_names(library.pycollective_guard_name)], "cpu")
    _library = library


def register(library: ctypes.CDLL, targets: Sequence[str], platform: str) -> None:
    """Makes the functions of ``library`` XLA's handlers for one of its platforms."""
    for target in targets:
        capsule = jax.ffi.pycapsule(getattr(library, f"pycollective_{target}"))
        jax.ffi.register_ffi_target(f"pycollective_{target}", capsule, platform=platform)


@functools.cache
def host_targets() -> tuple[str, ...]:
    """The handlers for CPU devices: the names of the operations."""
    return _names(library().pycollective_operation_name)


@functools.cache
def device_targets() -> tuple[str, ...]:
    """The handlers for accelerators."""
    more = _names(library().pycollective_device_operation_name)
    return tuple(f"device_{name}" for name in (*host_targets(), *more))


@functools.cache
def guard_targets() -> tuple[str, ...]:
    """The handlers around an operation that another library carries out."""
    return _names(library().pycollective_guard_name)


@functools.cache
def op_names() -> tuple[str, ...]:
    """The reductions, by their numbers."""
    return _names(library().pycollective_op_name)


def op_number(name: str) -> int:
    """The number of a reduction, the attribute ``op`` of handlers.

    Raises:
        RuntimeError: the library does not have it.
    """
    if name not in op_names():
        raise RuntimeError(message("transport", f"a reduction of {', '.join(op_names())}", repr(name), _BUILD))
    return op_names().index(name)


def start_accelerators(kind: str, *, direct: bool) -> None:
    """Binds the runtime of this rank's accelerators and registers their handlers. JAX's devices must have started.

    Args:
        kind: one of ``runtime.KINDS``.
        direct: whether MPI reads and writes their memory; the same on all ranks.
    """
    known = runtime.KINDS[kind]
    bind_runtime(runtime.load(known), hip=known.hip, direct=direct)
    register(library(), device_targets(), known.platform)


def bind_runtime(found: ctypes.CDLL, *, hip: bool, direct: bool) -> None:
    """Gives the library the functions of a runtime.

    Raises:
        ImportError: the runtime lacks one of them.
    """
    addresses = _addresses(
        found,
        _names(lambda index: library().pycollective_runtime_name(index, int(hip))),
        "a runtime with {}",
        found._name,
        "Install a newer one.",
    )
    library().pycollective_bind_runtime(addresses, int(direct), ctypes.c_int64(config.stage_bytes))
    global _direct
    _direct = direct


def is_direct() -> bool:
    """Whether MPI is handed the memory of this rank's accelerators."""
    return _direct


def library() -> ctypes.CDLL:
    """The bound library.

    Raises:
        RuntimeError: :func:`start` was not called.
    """
    if _library is None:
        raise RuntimeError(message("transport", "a started transport", "none", "Call pycollective.init() first."))
    return _library


def add_communicator(
    name: str, fingerprint: int, devices: Sequence[int], main: MPI.Intracomm, auxiliary: MPI.Intracomm
) -> int:
    """Makes a communicator known to the handlers.

    Args:
        name: its name in error messages.
        fingerprint: the fingerprint that a program must carry to use it.
        devices: ids of this rank's devices; each rank has as many.
        main: a duplicate of the communicator, for the collectives and messages of a rank's one device, or its first.
        auxiliary: another duplicate, for everything else.

    Returns:
        The number by which compiled programs name it.
    """
    number = library().pycollective_communicator_add(
        name.encode(),
        ctypes.c_int64(fingerprint),
        main.rank,
        main.size,
        len(devices),
        _int64s(devices),
        ctypes.c_int64(_handle(main)),
        ctypes.c_int64(_handle(auxiliary)),
    )
    return int(number)


class Part(NamedTuple):
    """A part of a communicator, which is freed with the whole.

    Attributes:
        name: its name in error messages.
        fingerprint: the fingerprint that a program must carry to use it.
        whole: number of the communicator.
        members: ranks of the communicator, in the order of the part; empty for all.
        rank: this rank's place among them.
        size: number of the members.
        mesh_devices: the devices of a mesh on this rank, in its order: id, team, number in the team; None for the
            devices of the whole.
        team_size: number of devices in each team.
    """

    name: str
    fingerprint: int
    whole: int
    members: Sequence[int]
    rank: int
    size: int
    mesh_devices: Sequence[tuple[int, int, int]] | None
    team_size: int


def add_part(part: Part) -> int:
    """Makes a part of a communicator known to the handlers.

    Returns:
        The number by which compiled programs name it.
    """
    own = part.mesh_devices or ()
    number = library().pycollective_part_add(
        part.name.encode(),
        ctypes.c_int64(part.fingerprint),
        ctypes.c_int64(part.whole),
        part.rank,
        part.size,
        _int32s(part.members) if part.members else None,
        -1 if part.mesh_devices is None else len(own),
        _int64s([device for device, _, _ in own]),
        _int32s([team for _, team, _ in own]),
        _int32s([member for _, _, member in own]),
        part.team_size,
    )
    return int(number)


def free_communicator(number: int) -> None:
    """Frees what the handlers have made for a communicator and its parts. Programs that name them then end in an error.

    All its ranks must make this call, and no other call may be under way.
    """
    error = library().pycollective_communicator_free(ctypes.c_int64(number))
    if error:
        raise RuntimeError(
            message("Communicator.free", "MPI to free its channels", error.decode(), "Flush programs on all ranks.")
        )


def xla_can_call() -> bool:
    """Whether XLA has opened the library, so that its own collectives go through it."""
    return bool(library().pycollective_xla_is_open())


def xla_start(rank: int, size: int) -> None:
    """Lets XLA make its CPU client: this process is ``rank`` of ``size``."""
    library().pycollective_xla_start(rank, size)


@contextmanager
def xla_learns(number: int, fingerprint: int, operand: Any) -> Iterator[None]:
    """Inside, XLA asks for the MPI communicator of one clique, in a program that gathers ``operand`` over the clique.

    Nothing is gathered: the program only lets XLA ask.

    Args:
        number: the communicator's or part's number in compiled programs.
        fingerprint: its fingerprint.
        operand: this process's operand, :data:`XLA_MARK_COUNT` integers of type uint32 that no other program gathers.
    """
    mark = (ctypes.c_uint32 * XLA_MARK_COUNT)(*operand)
    library().pycollective_xla_learn(ctypes.c_int64(number), ctypes.c_int64(fingerprint), mark)
    try:
        yield
    finally:
        library().pycollective_xla_learn(ctypes.c_int64(0), ctypes.c_int64(0), None)


def this_process() -> int:
    """The attribute ``process`` of a program that holds addresses of this process: a random number."""
    return int(library().pycollective_this_process())


def longest_wait() -> Waiting | None:
    """The call that has waited inside MPI for longest; None if no call is under way."""
    waiting = Waiting()
    return waiting if library().pycollective_longest_wait(ctypes.byref(waiting)) else None


def ffi_lowering(target: str, in_place: tuple[bool, ...] = ()) -> Any:
    """JAX's lowering rule for a handler whose first operand and first result are tokens.

    Args:
        target: one of :func:`host_targets`, :func:`device_targets` or :func:`guard_targets`.
        in_place: for each array among the operands, whether the result of the same number takes its buffer (XLA
            copies where it may not).

    Raises:
        RuntimeError: the library has no such handler.
    """
    if target not in (*host_targets(), *device_targets(), *guard_targets()):
        known = f"one with {', '.join(host_targets())}"
        raise RuntimeError(message(target, f"a compiled library with a handler for {target}", known, _BUILD))
    aliases = {i: i for i, takes in enumerate(in_place, start=1) if takes}  # 0 is the token
    rule = jax.ffi.ffi_lowering(f"pycollective_{target}", has_side_effect=True, operand_output_aliases=aliases)

    def lowering(ctx: Any, *operands: Any, **attributes: int | tuple[int, ...]) -> Any:
        as_int64 = {
            name: np.int64(value) if isinstance(value, int) else np.array(value, np.int64)
            for name, value in attributes.items()
        }
        return rule(ctx, *operands, **as_int64)

    return lowering


def done_lowering(number: int) -> Any:
    """The rule for ``device_allreduce_done`` of so many arrays: without tokens, results in the operands' buffers."""
    aliases = {i: i for i in range(number)}
    rule = jax.ffi.ffi_lowering(
        "pycollective_device_allreduce_done", has_side_effect=True, operand_output_aliases=aliases
    )
    return lambda ctx, *operands, comm: rule(ctx, *operands, comm=np.array(comm, np.int64), spread=np.int64(1))
