"""The order between programs: each dispatch of one that speaks with other ranks takes its turn.

XLA's CPU client makes a program on one device wait for the last one that the same thread enqueued there
(``PjRtCpuClient``, "last enqueue event"), and a program on several devices for the last one on several ("last
collective launch event"). It orders no other pair. So here a program on other devices than the last one waits for that.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

import jax
import jax.extend.backend
import numpy as np

from pycollective.errors import message

Devices = tuple[jax.Device, ...]
"""Those that run a program, in the order of their ids."""

ONLY_DEVICE: Devices = ()
"""Stands for the one device of a rank that has no other."""

DEVICES_OF_ARGUMENTS = "of the arguments"
"""Stands for the devices on which the arguments of a call lie."""

_NONE = ("none",)
"""In the place of devices: no program is under way."""

_MOST_AHEAD = 4
"""Programs on several devices that may wait to run. XLA's CPU client may have just one thread a device, and from the
33rd program on a device the dispatch itself keeps one of them until another program ends; if that one needs all
threads, to meet in a collective, both wait for ever (so do ``jax.pmap`` and XLA's own collectives). This leaves room
for what else the user dispatches between ours."""


class WithCompletion(NamedTuple):
    """What a program returns whose own results say nothing of its end.

    Either none of them is computed in the region: JAX drops equations without effects that nothing uses, and a region
    that only sends has no other result to hold it. Or it runs on several devices, for :func:`limit_programs_in_flight`.

    Attributes:
        outs: of the function.
        completion: an empty array, there when the program has run.
    """

    outs: Any
    completion: Any


class _State:
    """Whose turn it is: the devices of the last program, and the Python thread that dispatches."""

    devices: Devices | tuple[str] | None = ONLY_DEVICE
    thread: threading.Thread | None = None
    waits = False  # for each program, since the thread is not the main one
    keeps = False  # whether the results of the program go to `limit_programs_in_flight`
    ahead: ClassVar[deque[Any]] = deque()  # completions of programs on several devices


class _ThisThread(threading.local):
    """What a thread knows of itself, faster than ``threading.current_thread`` tells."""

    itself: object = _NONE  # once it has dispatched


_this_thread = _ThisThread()


def wait_for_earlier_programs(devices: Devices | None) -> bool:
    """Comes before the dispatch of each program with our effect: waits for those that XLA will not order before it.

    XLA orders programs of one thread on one device, and programs on several devices; it orders neither a program on
    one device behind one on another, nor either kind behind the other. None waits for all.

    Returns:
        Whether what the program returns must go to :func:`limit_programs_in_flight`, :class:`WithCompletion` or not.

    Raises:
        RuntimeError: another Python thread dispatches such programs, and has not ended.
    """
    if _this_thread.itself is not _State.thread:
        _admit_this_thread()
    if devices is None or devices != _State.devices:
        _wait(_State.devices)
        _State.devices = devices
        _State.keeps = _State.waits or devices is None or len(devices) > 1
    return _State.keeps


def wait_for_all_programs() -> None:
    """Waits for all programs; whatever comes next need not wait."""
    wait_for_earlier_programs(None)
    _State.devices = _NONE


def _admit_this_thread() -> None:
    """Ranks meet in the order in which they dispatch, and two threads of one have none."""
    this, last = threading.current_thread(), _State.thread
    if last is not None and last.is_alive():
        raise RuntimeError(
            message(
                "jit",
                f"programs with collectives from one Python thread, {last.name!r}, which has dispatched some",
                f"one from {this.name!r}",
                "Call them all from one thread; another may take over when that has ended.",
            )
        )
    if last is threading.main_thread():
        _finish(jax.live_arrays())  # it has not waited for its programs, and XLA orders those of one thread alone
    _State.thread = _this_thread.itself = this
    _State.waits = this is not threading.main_thread()
    _State.devices = _NONE  # any other thread has waited for each of its programs


def limit_programs_in_flight(outs: Any) -> Any:
    """Comes after the dispatch: what a program returned, without the completion that may be there.

    At most some programs on several devices wait to run. In another thread than the main one it waits for each program:
    whoever comes later, at the exit for instance, has no way to wait for what an ended thread has dispatched.
    """
    with_completion = type(outs) is WithCompletion
    if _State.keeps:
        # All of a program's results are there at once, and who drops the large ones wants their memory.
        completion = (
            outs.completion if with_completion else min(jax.tree.leaves(outs), key=lambda x: x.size, default=None)
        )
        if _State.waits:
            _finish(completion)
        else:
            _State.ahead.append(completion)
            if len(_State.ahead) > _MOST_AHEAD:
                _finish(_State.ahead.popleft())
    return outs.outs if with_completion else outs


def _finish(completion: Any) -> None:
    # An error of the program is raised where its results are used, not in a call that has nothing to do with it.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.block_until_ready(
            [x for x in jax.tree.leaves(completion) if not isinstance(x, jax.Array) or not x.is_deleted()]
        )


def by_id(devices: Iterable[jax.Device]) -> Devices:
    """The devices by their ids."""
    return tuple(sorted(devices, key=lambda device: device.id))


@functools.cache
def _kinds() -> tuple[Devices, ...]:
    """The devices of this process, those of each kind together: a rank with accelerators has CPU devices as well."""
    return tuple(tuple(client.local_devices()) for client in jax.extend.backend.backends().values())


@functools.cache
def local_devices() -> Devices:
    """The devices of this process; :data:`ONLY_DEVICE` for one."""
    devices = tuple(device for kind in _kinds() for device in kind)
    return devices if len(devices) > 1 else ONLY_DEVICE


def devices_for(args: Sequence[Any], kwargs: dict[str, Any]) -> Devices:
    """The devices on which :func:`jax.jit` runs a program with these arguments that names none itself."""
    return ONLY_DEVICE if local_devices() is ONLY_DEVICE else committed_devices(args, kwargs) or default_devices()


def committed_devices(args: Sequence[Any], kwargs: dict[str, Any]) -> Devices | None:
    """The devices to which the arguments are committed; None for none."""
    if not kwargs:
        for argument in args:
            try:
                if argument.committed:
                    return by_id(argument.devices())
            except AttributeError:  # not an array of JAX's: perhaps a tree of them
                break
        else:
            return None
    for leaf in jax.tree.leaves((args, kwargs)):
        if getattr(leaf, "committed", False):
            return by_id(leaf.devices())
    return None


def default_devices() -> Devices:
    """The device on which :func:`jax.jit` runs a program whose arguments name none."""
    default = jax.config.jax_default_device
    return (default,) if default is not None and isinstance(default, jax.Device) else _first_device()


@functools.cache
def _first_device() -> Devices:
    return tuple(jax.local_devices()[:1])


def flush() -> None:
    """Waits until all programs that this thread has dispatched have run."""
    jax.effects_barrier()
    _wait(None)


def _wait(devices: Any) -> None:
    """Until the programs on these devices have run; None: those on any."""
    if devices is _NONE:
        return
    if devices is None:  # those on several devices, and those on each
        groups = list(dict.fromkeys(group for kind in _kinds() for group in (kind, *((device,) for device in kind))))
    else:
        groups = [devices or _first_device()]
    for group in groups:
        _mark(group)


def _mark(devices: Devices) -> None:
    """Runs a small program on the devices, which XLA orders behind everything of its kind before it."""
    with jax.disable_jit(False):  # the user may have switched it off
        marker, x = _marker(devices)
        marker(x).block_until_ready()


@functools.cache
def _marker(devices: Devices) -> tuple[Any, jax.Array]:
    """A program on these devices, whatever mesh the user has set, and its argument."""

    def compiled() -> tuple[Any, jax.Array]:
        own = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), "d"), jax.sharding.PartitionSpec("d"))
        with jax.disable_jit(False):
            x = jax.device_put(np.zeros(len(devices), np.int32), own)
            return jax.jit(lambda x: x + 1).lower(x).compile(), x  # an identity function would not be dispatched at all

    try:
        no_mesh = jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))
    except ValueError:  # inside a trace; a thread of its own has neither that nor the mesh
        with ThreadPoolExecutor(1) as apart:
            return apart.submit(compiled).result()
    with no_mesh:
        return compiled()
