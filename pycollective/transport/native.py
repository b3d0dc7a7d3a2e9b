"""The native transport: loads the C++ library, binds it to the MPI that mpi4py loaded, registers its handlers.

Nothing here knows JAX's tracing or the meaning of a collective: it turns a call into a target name,
attributes and aliases, and hands communicators to the library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from pycollective.config import config
from pycollective.errors import FROM_A_CLONE, message
from pycollective.transport import runtime
from pycollective.transport.mpi import MPI

OPS = {"sum": 0, "prod": 1, "min": 2, "max": 3, "sum_bfloat16": 4}
"""The reductions, numbered as ``Op`` in native/mpi.h."""

# In the order of ``Type`` in native/mpi.h.
_TYPES = (
    MPI.INT8_T,
    MPI.INT16_T,
    MPI.INT32_T,
    MPI.INT64_T,
    MPI.UINT8_T,
    MPI.UINT16_T,
    MPI.UINT32_T,
    MPI.UINT64_T,
    MPI.FLOAT,
    MPI.DOUBLE,
    MPI.C_FLOAT_COMPLEX,
    MPI.C_DOUBLE_COMPLEX,
)
_MPI_OPS = (MPI.SUM, MPI.PROD, MPI.MIN, MPI.MAX)

TARGETS = (
    "allreduce",
    "allgather",
    "alltoall",
    "reduce_scatter",
    "bcast",
    "reduce",
    "gather",
    "scatter",
    "scan",
    "exscan",
    "ppermute",
    "sendrecv",
    "send",
    "recv",
    "barrier",
)
DEVICE_TARGETS = tuple(f"device_{name}" for name in (*TARGETS, "allreduce_start", "allreduce_done"))
"""For accelerators."""


class _Binding(ctypes.Structure):
    """``Binding`` of native/mpi.h."""

    _fields_ = [
        ("handle_bytes", ctypes.c_int64),
        ("in_place", ctypes.c_int64),
        ("errors_return", ctypes.c_int64),
        ("proc_null", ctypes.c_int64),
        ("any_tag", ctypes.c_int64),
        ("largest_tag", ctypes.c_int64),
        ("types", ctypes.c_int64 * len(_TYPES)),
        ("ops", ctypes.c_int64 * len(_MPI_OPS)),
    ]


class Waiting(ctypes.Structure):
    """The call that has waited inside MPI for longest; ``pycollective_Waiting`` of native/binding.cc."""

    _fields_ = [
        ("operation", ctypes.c_char_p),
        ("communicator", ctypes.c_char_p),
        ("nbytes", ctypes.c_int64),
        ("waited_ns", ctypes.c_int64),
    ]


def _load() -> ctypes.CDLL:
    path = Path(__file__).parent.parent / "_native.so"
    if not path.exists():
        raise ImportError(
            message(
                "transport",
                f"the compiled library {path}",
                "no such file",
                "Install the package with pip (it needs a C++17 compiler), not by copying its files.",
            )
        )
    return ctypes.CDLL(str(path))


def _bind(library: ctypes.CDLL) -> None:
    """Gives the library the addresses and handles of the MPI that mpi4py has loaded."""
    library.pycollective_function_name.restype = ctypes.c_char_p
    library.pycollective_function_name.argtypes = [ctypes.c_int64]
    library.pycollective_bind.restype = ctypes.c_char_p
    library.pycollective_runtime_name.restype = ctypes.c_char_p
    library.pycollective_communicator_add.restype = ctypes.c_int64
    library.pycollective_part_add.restype = ctypes.c_int64
    library.pycollective_communicator_free.restype = ctypes.c_char_p
    library.pycollective_longest_wait.restype = ctypes.c_bool
    library.pycollective_tune_malloc.restype = ctypes.c_bool

    # Symbols are looked up through mpi4py's own extension: that searches just the libraries it was
    # linked to, so it finds the right MPI even when another one is loaded too.
    mpi = ctypes.CDLL(MPI.__file__)
    addresses = _addresses(
        mpi,
        library.pycollective_function_name,
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
        _int64s([_handle(type_) for type_ in _TYPES]),
        _int64s([_handle(op) for op in _MPI_OPS]),
    )
    error = library.pycollective_bind(ctypes.byref(binding), addresses)
    if error:
        raise ImportError(
            message("transport", "a usable MPI library", error.decode(), "Check that mpi4py itself works with it.")
        )


def _addresses(
    found: ctypes.CDLL, name_of: Callable[[int], bytes | None], expected: str, got: str, remedy: str
) -> ctypes.Array[ctypes.c_void_p]:
    """The addresses of functions of a library, by their names in order; an ImportError for one that it lacks."""
    addresses: list[int | None] = []
    while name := name_of(len(addresses)):
        try:
            function = getattr(found, name.decode())
        except AttributeError:
            raise ImportError(message("transport", expected.format(name.decode()), got, remedy)) from None
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
    """Loads, binds and registers. MPI must be initialised. Does nothing the second time.

    Args:
        ranks: on this host, which share its memory.
    """
    global _library
    if _library is not None:
        return
    library = _load()
    _bind(library)
    library.pycollective_set_check(config.check)
    library.pycollective_set_all_lanes(int(config.all_lanes))
    if config.malloc:
        library.pycollective_tune_malloc(ranks)
    register(library, TARGETS, "cpu")
    _library = library


def register(library: ctypes.CDLL, targets: Sequence[str], platform: str) -> None:
    """Makes the functions of ``library`` XLA's handlers for one of its platforms."""
    for target in targets:
        capsule = jax.ffi.pycapsule(getattr(library, f"pycollective_{target}"))
        jax.ffi.register_ffi_target(f"pycollective_{target}", capsule, platform=platform)


def start_accelerators(kind: str, *, direct: bool) -> None:
    """Binds the runtime of this rank's accelerators and registers their handlers. JAX's devices must have started.

    Args:
        kind: one of ``runtime.KINDS``.
        direct: whether MPI reads and writes their memory; the same on all ranks.
    """
    known = runtime.KINDS[kind]
    bind_runtime(runtime.load(known), hip=known.hip, direct=direct)
    register(library(), DEVICE_TARGETS, known.platform)


def bind_runtime(found: ctypes.CDLL, *, hip: bool, direct: bool) -> None:
    """Gives the library the functions of a runtime.

    Raises:
        ImportError: the runtime lacks one of them.
    """
    addresses = _addresses(
        found,
        lambda index: library().pycollective_runtime_name(index, int(hip)),
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
    name: str, fingerprint: int, devices: Sequence[int], calls: MPI.Intracomm, rest: MPI.Intracomm
) -> int:
    """Makes a communicator known to the handlers.

    Args:
        name: how error messages call it.
        fingerprint: what programs that name it must carry.
        devices: their ids, on this rank; as many on each.
        calls: a duplicate for the collectives and messages of a rank's one device, or its first.
        rest: another, for all else.

    Returns:
        Its number, by which compiled programs name it.
    """
    number = library().pycollective_communicator_add(
        name.encode(),
        ctypes.c_int64(fingerprint),
        calls.rank,
        calls.size,
        len(devices),
        _int64s(devices),
        ctypes.c_int64(_handle(calls)),
        ctypes.c_int64(_handle(rest)),
    )
    return int(number)


def add_part(
    name: str,
    fingerprint: int,
    whole: int,
    members: Sequence[int],
    rank: int,
    size: int,
    seats: Sequence[tuple[int, int, int]] | None,
    team_size: int,
) -> int:
    """Makes a part of a communicator known to the handlers. It goes with the whole.

    Args:
        name: how error messages call it.
        fingerprint: what programs that name it must carry.
        whole: number of the communicator.
        members: ranks of it, in the order of the part; empty for all.
        rank: this one's place among them.
        size: how many they are.
        seats: the devices of a mesh on this rank, in its order: id, team, number in the team; None for those of the
            whole.
        team_size: members of each team.

    Returns:
        Its number, by which compiled programs name it.
    """
    own = seats or ()
    number = library().pycollective_part_add(
        name.encode(),
        ctypes.c_int64(fingerprint),
        ctypes.c_int64(whole),
        rank,
        size,
        _int32s(members) if members else None,
        -1 if seats is None else len(own),
        _int64s([device for device, _, _ in own]),
        _int32s([team for _, team, _ in own]),
        _int32s([member for _, _, member in own]),
        team_size,
    )
    return int(number)


def free_communicator(number: int) -> None:
    """Gives back what the handlers have made of a communicator and its parts; programs that name them end in an error.

    All its ranks must make this call, and no call may be under way.
    """
    error = library().pycollective_communicator_free(ctypes.c_int64(number))
    if error:
        raise RuntimeError(
            message("Communicator.free", "MPI to free its channels", error.decode(), "Flush programs on all ranks.")
        )


def longest_wait() -> Waiting | None:
    """The call that has waited inside MPI for longest, or None when no call is under way."""
    waiting = Waiting()
    return waiting if library().pycollective_longest_wait(ctypes.byref(waiting)) else None


def ffi_lowering(target: str, in_place: tuple[bool, ...] = ()) -> Any:
    """JAX's lowering rule for a handler whose first operand and first result are tokens.

    Args:
        target: one of ``TARGETS`` or ``DEVICE_TARGETS``.
        in_place: for each array among the operands, whether the result of the same number takes its buffer (XLA
            copies where it may not).
    """
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
