"""The native transport: loads the C++ library, binds it to the MPI that mpi4py loaded, registers its handlers.

Nothing here knows JAX's tracing or the meaning of a collective. The names of operations, reductions and element types
come from the library, where each stands once (``native/base/operations.h``, ``native/mpi/mpi.h``).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from pycollective.build_id import of_library
from pycollective.config import config
from pycollective.environment import NATIVE_LIBRARY
from pycollective.errors import FROM_A_CLONE, message
from pycollective.transport import board, native_library, runtime
from pycollective.transport.mpi import MPI, host_of
from pycollective.transport.native_library import BUILD, int32s, int64s, library, load, table

XLA_MARK_COUNT = 4
"""The number of integers by which the library tells a program of :func:`xla_learns` (native/xla/xla_mpi.cc)."""


class _Binding(ctypes.Structure):
    """``Binding`` of native/mpi/mpi.h."""

    _fields_ = [
        ("handle_bytes", ctypes.c_int64),
        ("in_place", ctypes.c_int64),
        ("errors_return", ctypes.c_int64),
        ("world", ctypes.c_int64),
        ("proc_null", ctypes.c_int64),
        ("any_tag", ctypes.c_int64),
        ("largest_tag", ctypes.c_int64),
        ("status_source", ctypes.c_int64),
        ("status_tag", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int64)),
        ("ops", ctypes.POINTER(ctypes.c_int64)),
    ]


def _bind(library: ctypes.CDLL) -> None:
    """Gives the library the addresses and handles of the MPI that mpi4py has loaded."""
    # Symbols are looked up through mpi4py's own extension: that searches just the libraries it was
    # linked to, so it finds the right MPI even when another one is loaded too.
    mpi = ctypes.CDLL(MPI.__file__)
    addresses = _addresses(
        mpi,
        table(library.pycollective_function_name),
        "an MPI library with {} (MPI 3.0)",
        MPI.Get_library_version().splitlines()[0],
        f"Install a newer MPI, for example by {FROM_A_CLONE}.",
    )
    binding = _Binding(
        MPI._sizeof(MPI.Comm),
        int(MPI.IN_PLACE),
        _handle(MPI.ERRORS_RETURN),
        _handle(MPI.COMM_WORLD),
        MPI.PROC_NULL,
        MPI.ANY_TAG,
        cast("int", MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)),
        _place_in_status(MPI.Status.Set_source),
        _place_in_status(MPI.Status.Set_tag),
        int64s([_handle(getattr(MPI, name)) for name in table(library.pycollective_type_name)]),
        int64s([_handle(getattr(MPI, name)) for name in table(library.pycollective_mpi_op_name)]),
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


def _place_in_status(set_field: Callable[[MPI.Status, int], None]) -> int:
    """Where an ``MPI_Status`` has a field of type int, in bytes from its begin: MPI's standard fixes no order."""
    status, unusual = MPI.Status(), 0x3A5C96
    set_field(status, unusual)
    content = ctypes.string_at(MPI._addressof(status), MPI._sizeof(MPI.Status))
    return content.index(unusual.to_bytes(ctypes.sizeof(ctypes.c_int), sys.byteorder))


def _handle(obj: Any) -> int:
    """An MPI handle as a signed 64-bit integer."""
    return ctypes.c_int64(MPI._handleof(obj)).value


_direct = False
_ahead = False


def start(ranks: int = 1) -> None:
    """Loads, binds and registers the library. MPI must be initialised. Does nothing the second time.

    Args:
        ranks: number of ranks on this host, which share its memory.
    """
    if native_library.has_started():
        return
    bound = load(NATIVE_LIBRARY)
    _bind(bound)
    bound.pycollective_set_check(config.check.when, int(config.check.nan))
    if config.malloc:
        bound.pycollective_tune_malloc(ranks)
    native_library.set_library(bound)
    register(bound, [*host_targets(), *async_targets(), *guard_targets()], "cpu", bound.pycollective_instantiate)
    register(bound, [_RESULTS_TARGET], "cpu")


def register(library: ctypes.CDLL, targets: Sequence[str], platform: str, instantiate: Any = None) -> None:
    """Makes the functions of ``library`` XLA's handlers for one of its platforms.

    Args:
        library: the library.
        targets: the names of the handlers.
        platform: the platform.
        instantiate: the function by which a program holds the communicator of each of its calls
            (native/xla/programs.cc); None: it holds none.
    """
    for target in targets:
        stages = {"execute": jax.ffi.pycapsule(getattr(library, f"pycollective_{target}"))}
        if instantiate is not None:
            stages["instantiate"] = jax.ffi.pycapsule(instantiate)
        jax.ffi.register_ffi_target(f"pycollective_{target}", stages, platform=platform)


@functools.cache
def build_id() -> str:
    """The build ID of the library: 64 hexadecimal digits, or "" if its linker has not written one."""
    return of_library(NATIVE_LIBRARY.read_bytes())


@functools.cache
def host_targets() -> tuple[str, ...]:
    """The handlers for CPU devices: the names of the operations."""
    return table(library().pycollective_operation_name)


@functools.cache
def async_targets() -> tuple[str, ...]:
    """The handlers for CPU devices whose calls run while the program computes."""
    return tuple(f"async_{name}" for name in host_targets())


@functools.cache
def device_targets() -> tuple[str, ...]:
    """The handlers for accelerators."""
    more = table(library().pycollective_device_operation_name)
    return tuple(f"device_{name}" for name in (*host_targets(), *more))


@functools.cache
def guard_targets() -> tuple[str, ...]:
    """The handlers around an operation that another library carries out."""
    return table(library().pycollective_guard_name)


_RESULTS_TARGET = "async_results"
"""The handler that hands on the results of a call that ran while the program computed, for CPU devices."""


def all_targets() -> tuple[str, ...]:
    """All handlers."""
    return (*host_targets(), *async_targets(), _RESULTS_TARGET, *guard_targets(), *device_targets())


@functools.cache
def op_names() -> tuple[str, ...]:
    """The reductions, by their numbers."""
    return table(library().pycollective_op_name)


def op_number(name: str) -> int:
    """The number of a reduction, the attribute ``op`` of handlers.

    Raises:
        RuntimeError: the library does not have it.
    """
    if name not in op_names():
        raise RuntimeError(message("transport", f"a reduction of {', '.join(op_names())}", repr(name), BUILD))
    return op_names().index(name)


_KEY_DTYPES = 1 << 16
"""The numbers of keys begin here (native/mpi/dtypes.h)."""


@functools.cache
def dtype_number(name: str) -> int:
    """The number of a dtype, as handlers know it. Each implementation of JAX's keys has one: "key<fry>", say."""
    if name.startswith("key<"):
        return _KEY_DTYPES + zlib.crc32(name.encode()) % _KEY_DTYPES
    number: int = library().pycollective_dtype_number(name.encode())
    return number


_BUFFERS = 6
"""How many buffers a device has: three pieces are under way, each with an operand and a result (``Device::Slot``)."""
_MOST_ELEMENT_BYTES = 16
"""Of complex128."""


def start_accelerators(mpi: MPI.Intracomm, kind: str, ordinals: Sequence[int]) -> None:
    """Makes the buffers of this rank's accelerators and registers their handlers. Their runtime is bound.

    All ranks of ``mpi`` must make this call.

    Args:
        mpi: the ranks.
        kind: one of ``runtime.KINDS``.
        ordinals: the runtime's numbers of the devices.
    """
    known = runtime.KINDS[kind]
    reserve_buffers(mpi, ordinals)
    register(library(), device_targets(), known.platform, library().pycollective_instantiate_by_plugin)


def bind_runtime(found: ctypes.CDLL, *, hip: bool, direct: bool) -> None:
    """Gives the library the functions of a runtime.

    Raises:
        ImportError: the runtime lacks one of them.
    """
    addresses = _addresses(
        found,
        table(lambda index: library().pycollective_runtime_name(index, int(hip))),
        "a runtime with {}",
        found._name,
        "Install a newer one.",
    )
    library().pycollective_bind_runtime(addresses, int(direct), ctypes.c_int64(config.stage_bytes))
    global _direct
    _direct = direct


def bind_ahead(*libraries: ctypes.CDLL | None) -> str | None:
    """Gives the library the functions for dispatch ahead.

    Args:
        libraries: the runtime and the driver, where the functions are looked up; None: there is no driver.

    Returns:
        The name of a function that is missing; None if all were found.
    """
    addresses: list[int | None] = []
    for name in table(library().pycollective_ahead_name):
        function = next((getattr(found, name) for found in libraries if hasattr(found, name)), None)
        if function is None:
            return name
        addresses.append(ctypes.cast(function, ctypes.c_void_p).value)
    library().pycollective_bind_ahead((ctypes.c_void_p * len(addresses))(*addresses))
    return None


def fault_in_ahead(ordinal: int, memory: int, nbytes: int) -> str | None:
    """Why dispatch ahead does not work on a device (``Device::TryAhead`` in native/devices/device.h); None if it does.

    Args:
        ordinal: the runtime's number of the device.
        memory: an address in its memory.
        nbytes: the size of the memory there, whose content is lost.
    """
    failed = library().pycollective_try_ahead(ordinal, ctypes.c_int64(memory), ctypes.c_int64(nbytes))
    return failed.decode() if failed else None


def set_ahead(ahead: bool) -> None:
    """Lets collectives on accelerators be dispatched ahead, or not: the same on all ranks."""
    library().pycollective_set_ahead(ahead)
    global _ahead
    _ahead = ahead


def is_ahead() -> bool:
    """Whether collectives on accelerators are dispatched ahead."""
    return _ahead


def reserve_buffers(mpi: MPI.Intracomm, ordinals: Sequence[int]) -> None:
    """Makes the page-locked buffers of devices, before programs run (``Device::Reserve`` in native/devices/device.h).

    All ranks of ``mpi`` must make this call.

    Raises:
        RuntimeError: the runtime has no memory for them.
    """
    least = _MOST_ELEMENT_BYTES * MPI.COMM_WORLD.size  # a piece of blocks has at least an element of each
    of_piece = -(-max(config.stage_bytes, least) // mmap.PAGESIZE) * mmap.PAGESIZE
    of_device = _BUFFERS * of_piece
    if config.shared_memory != "off":
        with host_of(mpi) as neighbours:
            board.open_arrays(neighbours, of_device * len(ordinals))
    for ordinal in ordinals:
        failed = library().pycollective_reserve_buffers(ordinal, of_piece)
        if failed:
            wanted = f"page-locked buffers of {of_device} B for device {ordinal}"
            remedy = "Set a smaller PYCOLLECTIVE_STAGE_BYTES on all ranks, or raise ulimit -l."
            raise RuntimeError(message("init", wanted, failed.decode(), remedy))


def forget_started() -> None:
    """Waits until no call that a failed program has started on an accelerator reads or writes its arrays."""
    if native_library.has_started():
        library().pycollective_forget_started()


def is_direct() -> bool:
    """Whether MPI is handed the memory of this rank's accelerators."""
    return _direct


class Whole(NamedTuple):
    """A communicator that is no part of another one.

    Attributes:
        name: its name in error messages.
        fingerprint: the fingerprint that a program must carry to use it.
        identity: a number that its ranks have for it and for no other communicator.
        world_ranks: the place of each of its ranks in MPI_COMM_WORLD.
        devices: ids of this rank's devices; each rank has as many.
        main: a duplicate of the communicator, for the collectives and messages of a rank's one device, or its first.
        auxiliary: another duplicate, for everything else.
    """

    name: str
    fingerprint: int
    identity: int
    world_ranks: Sequence[int]
    devices: Sequence[int]
    main: MPI.Intracomm
    auxiliary: MPI.Intracomm


def add_communicator(whole: Whole) -> int:
    """Makes a communicator known to the handlers. All its ranks must make this call.

    Returns:
        The number by which compiled programs name it.
    """
    number = library().pycollective_communicator_add(
        whole.name.encode(),
        ctypes.c_int64(whole.fingerprint),
        whole.main.rank,
        whole.main.size,
        len(whole.devices),
        int64s(whole.devices),
        ctypes.c_int64(_handle(whole.main)),
        ctypes.c_int64(_handle(whole.auxiliary)),
        ctypes.c_int64(whole.identity),
        int32s(whole.world_ranks),
    )
    error = library().pycollective_board_join(ctypes.c_int64(number))
    if error:
        remedy = "Look for another call on its ranks."
        raise RuntimeError(message("Communicator", "MPI to tell its ranks a number", error.decode(), remedy))
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
        int32s(part.members) if part.members else None,
        -1 if part.mesh_devices is None else len(own),
        int64s([device for device, _, _ in own]),
        int32s([team for _, team, _ in own]),
        int32s([member for _, _, member in own]),
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


def is_held(number: int) -> bool:
    """Whether a program or a call of this process holds a communicator, or a part of it."""
    return bool(library().pycollective_communicator_is_held(ctypes.c_int64(number)))


def message_header(data: bytes) -> str:
    """What a message of a program is, from the bytes of MPI's message.

    native/calls/messages.h has its form.

    Example:
        >>> message_header(b"the data of a message without a header")
        ''
    """
    return library().pycollective_message_header_text(data, ctypes.c_int64(len(data))).decode()


def abandon_messages() -> list[str]:
    """Ends the messages that no program has waited for, so that MPI can end. Returns what they are."""
    return library().pycollective_abandon_messages().decode().splitlines()


def spans_hosts(number: int) -> bool:
    """Whether a communicator or part has ranks on several hosts; the same on all its ranks."""
    return bool(library().pycollective_spans_hosts(ctypes.c_int64(number)))


def compares_in_sections(number: int) -> bool:
    """Whether the ranks of a communicator or part compare a section once in each run: they post no calls on a board."""
    return bool(library().pycollective_compares_in_sections(ctypes.c_int64(number)))


def comparisons() -> int:
    """How many comparisons this process has made of calls that ranks do not post on a board."""
    return int(library().pycollective_comparisons())


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


def ffi_lowering(target: str, in_place: tuple[bool, ...] = ()) -> Any:
    """JAX's lowering rule for a handler whose first operand and first result are tokens.

    Args:
        target: one of :func:`all_targets`.
        in_place: for each array among the operands, whether the result of the same number takes its buffer (XLA
            copies where it may not).

    Raises:
        RuntimeError: the library has no such handler.
    """
    if target not in all_targets():
        known = f"one with {', '.join(host_targets())}"
        raise RuntimeError(message(target, f"a compiled library with a handler for {target}", known, BUILD))
    aliases = {i: i for i, takes in enumerate(in_place, start=1) if takes}  # 0 is the token
    rule = jax.ffi.ffi_lowering(f"pycollective_{target}", has_side_effect=True, operand_output_aliases=aliases)

    def lowering(ctx: Any, *operands: Any, **attributes: int | tuple[int, ...]) -> Any:
        as_int64 = {
            name: np.int64(value) if isinstance(value, int) else np.array(value, np.int64)
            for name, value in attributes.items()
        }
        return rule(ctx, *operands, **as_int64)

    return lowering


def _in_place_lowering(target: str, number: int, **options: Any) -> Any:
    """The rule for a handler without tokens whose results, so many arrays, lie in its operands' buffers."""
    aliases = {i: i for i in range(number)}
    return jax.ffi.ffi_lowering(f"pycollective_{target}", operand_output_aliases=aliases, **options)


@functools.cache
def results_lowering(number: int) -> Any:
    """The rule for the handler that hands on the results of a call that ran while the program computed."""
    return _in_place_lowering(_RESULTS_TARGET, number)


def done_lowering(number: int) -> Any:
    """The rule for ``device_allreduce_done`` of so many arrays."""
    rule = _in_place_lowering("device_allreduce_done", number, has_side_effect=True)
    one_device = {"devices": 1, "replicated": 0, "site": 0, "order": 0, "section": 0}
    as_int64 = {name: np.int64(value) for name, value in one_device.items()}
    return lambda ctx, *operands, comm: rule(ctx, *operands, comm=np.array(comm, np.int64), **as_int64)
