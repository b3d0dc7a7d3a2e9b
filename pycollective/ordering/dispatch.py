"""The order between programs: a dispatch waits for the earlier programs that XLA does not order before the new one.

XLA's CPU client orders two kinds of pairs. A program on one device waits for the last program that the same thread
enqueued on that device (``PjRtCpuClient``, "last enqueue event"). A program on several devices waits for the last
program on several devices ("last collective launch event"). Other pairs have no order. So if the devices of a program
are not those of the last program, its dispatch waits here until the last program has run.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.extend.backend
import numpy as np

from pycollective.errors import message
from pycollective.jax_support import jax_dispatch
from pycollective.transport import native

CacheT = TypeVar("CacheT")
Devices = tuple[jax.Device, ...]
"""The devices that run a program, in the order of their ids."""

ONLY_DEVICE: Devices = ()
"""The value of :data:`Devices` on a rank that has one device only."""

DEVICES_OF_ARGUMENTS = "of the arguments"
"""A value in place of devices: the devices of the call's arguments."""

_NO_PROGRAM = ("none",)
"""A value in place of devices: no program is in flight."""

_MOST_IN_FLIGHT = 4
"""The largest number of programs on several devices that may be in flight.

XLA's CPU client may have only one thread for each device. The dispatch of the 33rd program on a device blocks one of
these threads until another program ends. If the other program needs all threads, since its devices meet in a
collective, both deadlock; so does ``jax.pmap`` with XLA's own collectives. The limit is far below 33, since the user
may dispatch programs without our collectives in between."""


class WithCompletion(NamedTuple):
    """The results of a program, and an empty array that is ready when the program has run.

    A program returns the array for one of two reasons. First, the region may compute no result, for example if the
    program only sends: JAX would drop an equation without effects and without used results. Second, the program may run
    on several devices: then :func:`limit_programs_in_flight` waits for the array. It is empty, so it needs no memory.

    Attributes:
        outs: the results of the function.
        completion: the array.
    """

    outs: Any
    completion: Any


class _State:
    """The programs that this process has dispatched.

    Attributes:
        last_devices: the devices of the last program; None if they are not known.
        thread: the Python thread that dispatches.
        waits_for_each: whether the thread waits for each of its programs, since it is not the main thread.
        limits: whether the results of the last program go to :func:`limit_programs_in_flight`.
        in_flight: completions of the last programs on several devices, the oldest first.
        without_results: completions of the programs without results, whose errors JAX would not raise; the oldest
            first.
    """

    last_devices: Devices | tuple[str] | None = ONLY_DEVICE
    thread: threading.Thread | None = None
    waits_for_each = False
    limits = False
    in_flight: ClassVar[deque[Any]] = deque()
    without_results: ClassVar[deque[Any]] = deque()


class _ThisThread(threading.local):
    """The running thread, if it has dispatched. This look-up is faster than ``threading.current_thread``."""

    itself: object = _NO_PROGRAM  # not None, which `_State.thread` is at first


_this_thread = _ThisThread()


def wait_for_earlier_programs(devices: Devices | None) -> bool:
    """Waits for the earlier programs that XLA does not order before the next program.

    Each dispatch of a program with our effect calls it first.

    Args:
        devices: the devices of the next program. None: they are not known, and it waits for all programs.

    Returns:
        Whether the results of the program must go to :func:`limit_programs_in_flight` even if they are no
        :class:`WithCompletion`.

    Raises:
        RuntimeError: another Python thread has dispatched programs with our effect, and has not ended.
        jax.errors.JaxRuntimeError: an earlier program without results has failed. The error is raised once.
    """
    if _this_thread.itself is not _State.thread:
        _admit_this_thread()
    if devices is None or devices != _State.last_devices:
        _wait_for_programs_on(_State.last_devices)
        _State.last_devices = devices
        _State.limits = _State.waits_for_each or devices is None or len(devices) > 1
    if _State.without_results:
        _raise_errors_without_results(wait=False)
    return _State.limits


def wait_for_all_programs() -> None:
    """Waits for all programs. The next program then need not wait."""
    wait_for_earlier_programs(None)
    _State.last_devices = _NO_PROGRAM


def _admit_this_thread() -> None:
    """Makes this thread the dispatching thread. Ranks need one order of programs, and two threads have no order."""
    this, last = threading.current_thread(), _State.thread
    if last is not None and last.is_alive():
        raise RuntimeError(
            message(
                "jit",
                f"programs with collectives from one Python thread, {last.name!r}, which has dispatched some",
                f"one from {this.name!r}",
                "Call them all from one thread; another thread may take over when the first has ended.",
            )
        )
    if last is threading.main_thread():
        # The main thread has not waited for its programs, and XLA orders the programs of one thread only.
        _wait_until_computed([client.live_arrays() for client in _clients])
    _State.thread = _this_thread.itself = this
    _State.waits_for_each = this is not threading.main_thread()
    _State.last_devices = _NO_PROGRAM  # a thread other than the main one has waited for each of its programs


def results_of(outs: Any) -> Any:
    """Returns the results of a program without the completion, if there is one."""
    return outs.outs if type(outs) is WithCompletion else outs


def limit_programs_in_flight(outs: Any) -> Any:
    """Waits while too many programs are in flight, and returns the results without their completion.

    Each dispatch of one of our programs calls it last. A later dispatch raises the error of a program without results.

    Args:
        outs: the results of the program, or a :class:`WithCompletion` of them.
    """
    if type(outs) is WithCompletion:
        if not jax.tree.leaves(outs.outs):
            _State.without_results.append(outs.completion)
        limit_completions_in_flight(outs.completion)
        return outs.outs
    if _State.limits:
        # All results of a program are ready at the same time, so it is enough to keep the smallest one. A large one
        # would keep its memory after the user has dropped it.
        limit_completions_in_flight(min(jax.tree.leaves(outs), key=lambda x: x.size, default=None))
    return outs


def limit_completions_in_flight(completion: Any) -> None:
    """Waits while too many programs are in flight.

    Each dispatch of a program with our effect calls it. A thread other than the main thread waits for each of its
    programs here, since after its end neither a later thread nor the exit handler can wait for them.

    Args:
        completion: an array that is ready when the program has run.
    """
    if _State.waits_for_each:
        _wait_until_computed(completion)
    elif _State.limits:
        _State.in_flight.append(completion)
        if len(_State.in_flight) > _MOST_IN_FLIGHT:
            _wait_until_computed(_State.in_flight.popleft())


def _raise_errors_without_results(*, wait: bool) -> None:
    """Raises the error of the first program without results that has failed.

    Args:
        wait: whether to wait for programs that have not run yet.
    """
    programs = _State.without_results
    while programs and (wait or programs[0].is_ready()):
        programs.popleft().block_until_ready()


def _wait_until_computed(arrays: Any) -> None:
    # JAX raises the error of a program when its results are used, so it need not be raised here, in the call of another
    # program.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.block_until_ready(
            [x for x in jax.tree.leaves(arrays) if not isinstance(x, jax.Array) or not x.is_deleted()]
        )


def by_id(devices: Iterable[jax.Device]) -> Devices:
    """The devices in the order of their ids."""
    return tuple(sorted(devices, key=lambda device: device.id))


def emptied_by_jax(cache: CacheT) -> CacheT:
    """Registers a cache of devices, so that ``jax.clear_caches`` and ``clear_backends`` empty it."""
    jax.extend.backend.register_backend_cache(cache, repr(cache))
    return cache


_clients: weakref.WeakSet[Any] = weakref.WeakSet()
"""XLA's clients in this process. Each has the devices of one kind: a rank with accelerators has CPU devices as well.

After ``jax.extend.backend.clear_backends`` JAX makes new clients. An old client lives as long as an object refers to
its devices, for example an array, or a compiled program, which still runs there. At its end it waits for its
programs."""


@emptied_by_jax
@functools.cache
def has_one_device() -> bool:
    """Whether this process has one device, those of JAX's earlier clients included."""
    _clients.update(jax.extend.backend.backends().values())
    return sum(len(client.local_devices()) for client in _clients) == 1


@emptied_by_jax
@functools.cache
def traces() -> object:
    """Returns an object that identifies JAX's current cache of traces: another one after JAX has emptied its caches."""
    return object()


def devices_of_program(devices: Iterable[jax.Device]) -> Devices:
    """Returns the devices that a program names; :data:`ONLY_DEVICE` if this process has one device."""
    return ONLY_DEVICE if has_one_device() else by_id(devices)


def devices_for(args: Sequence[Any], kwargs: dict[str, Any]) -> Devices:
    """Returns the devices on which :func:`jax.jit` runs a program with these arguments, if the program names none."""
    return ONLY_DEVICE if has_one_device() else committed_devices(args, kwargs) or default_devices()


def committed_devices(args: Sequence[Any], kwargs: dict[str, Any]) -> Devices | None:
    """The devices to which the arguments are committed; None if no argument is committed."""
    if not kwargs:
        for argument in args:
            try:
                if argument.committed:
                    return by_id(argument.devices())
            except AttributeError:  # the argument is no JAX array; it may be a tree of them
                break
        else:
            return None
    for leaf in jax.tree.leaves((args, kwargs)):
        if getattr(leaf, "committed", False):
            return by_id(leaf.devices())
    return None


def default_devices() -> Devices:
    """Returns the device on which :func:`jax.jit` runs a program without committed arguments."""
    default = jax.config.jax_default_device
    return (default,) if default is not None and isinstance(default, jax.Device) else _first_device()


@emptied_by_jax
@functools.cache
def _first_device() -> Devices:
    return tuple(jax.local_devices()[:1])


def flush() -> None:
    """Waits until all programs that this thread has dispatched have run. It raises the error of a program once."""
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        jax_dispatch.forget_tokens()
        raise
    _wait_for_programs_on(None)
    _raise_errors_without_results(wait=True)


def forget_failed_programs() -> None:
    """Waits until all programs that this thread has dispatched have ended, and forgets their errors."""
    while True:
        try:
            flush()
        except jax.errors.JaxRuntimeError:  # of one program; there may be others
            continue
        break
    native.forget_started()
    _State.last_devices = _NO_PROGRAM


def _wait_for_programs_on(devices: Any) -> None:
    """Waits until the programs on these devices have run; for None and :data:`ONLY_DEVICE`, those on all devices."""
    if devices is _NO_PROGRAM:
        return
    groups = [devices]
    if not devices:  # XLA has one order for programs on one device and another for programs on several: wait for both
        kinds = [tuple(client.local_devices()) for client in _clients]
        groups = list(dict.fromkeys(group for kind in kinds for group in (kind, *((device,) for device in kind))))
    for group in groups:
        _run_probe(group)
    if not devices:
        _State.in_flight.clear()


def _run_probe(devices: Devices) -> None:
    """Runs a small program on the devices and waits for it. XLA runs it after all earlier programs on these devices."""
    with jax.disable_jit(False):  # the user may have switched jit off
        program, x = _probe(devices)
        program(x).block_until_ready()


@emptied_by_jax
@functools.cache
def _probe(devices: Devices) -> tuple[Any, jax.Array]:
    """Returns a compiled program on these devices, compiled outside the user's meshes, and its argument."""

    def compiled() -> tuple[Any, jax.Array]:
        own = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), "d"), jax.sharding.PartitionSpec("d"))
        with jax.disable_jit(False):
            x = jax.device_put(np.zeros(len(devices), np.int32), own)
            return jax.jit(lambda x: x + 1).lower(x).compile(), x  # JAX would not dispatch an identity function

    try:
        no_mesh = jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))
    except ValueError:  # inside a trace; a new thread has neither the trace nor the mesh
        with ThreadPoolExecutor(1) as new_thread:
            return new_thread.submit(compiled).result()
    with no_mesh:
        return compiled()
