"""Sets a process up for collectives: MPI, the transport, the devices, and the hooks for errors and exit."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from pycollective.config import DEFAULT_TIMEOUT_S, MUST_AGREE, config
from pycollective.errors import message, name_ranks
from pycollective.faults import interrupts, monitor, rank_exit, rank_start
from pycollective.launch import child_processes, started_by
from pycollective.ordering import dispatch
from pycollective.ranks import accelerators
from pycollective.ranks.ranks_by_value import of_rank, ranks_in, together
from pycollective.ranks.xla_threads import shared_cores
from pycollective.transport import board, chosen, mpi_start, native, runtime, watch
from pycollective.transport.mpi import MPI, host_of


class _State:
    """What :func:`start` has set up in this process.

    Attributes:
        mpi_started: whether :func:`start_mpi` has.
        started: whether it has.
        timeout: the seconds that a rank may wait for others; None for no limit.
        devices: the platform and the id of each device that this rank drives.
    """

    mpi_started = False
    started = False
    timeout: float | None = None
    devices: tuple[tuple[str, int], ...] = ()


_state = _State()


def has_started() -> bool:
    """Whether :func:`start` has set this process up."""
    return _state.started


def timeout() -> float | None:
    """The seconds that a rank may wait for others, by :func:`init` or ``PYCOLLECTIVE_TIMEOUT``; None for no limit."""
    return _state.timeout if _state.started else config.timeout


def devices_of_this_rank() -> tuple[jax.Device, ...]:
    """The devices of :func:`init`; each has a lane in every communicator."""
    return _devices_now(_state.devices)


def local_devices(devices: Sequence[jax.Device] | int | None) -> tuple[jax.Device, ...]:
    """The devices that the argument ``devices`` of ``init`` means: a number of them, some of them, or None for all."""
    local = tuple(jax.local_devices())
    if devices is None:
        return local
    if isinstance(devices, int):
        if not 0 < devices <= len(local):
            raise ValueError(
                message("init", f"devices from 1 to {len(local)}", devices, "This process has no more local devices.")
            )
        return local[:devices]
    chosen = tuple(devices)
    if not chosen or any(not isinstance(device, jax.Device) for device in chosen):
        raise TypeError(
            message("init", "devices: a number or a sequence of jax.Device", repr(devices), "See jax.local_devices().")
        )
    return chosen


@dispatch.emptied_by_jax
@functools.cache
def _devices_now(names: tuple[tuple[str, int], ...]) -> tuple[jax.Device, ...]:
    """The devices of these platforms and ids that JAX has now: ``clear_backends`` lets it make new ones."""
    platforms = dict.fromkeys(platform for platform, _ in names)
    found = {_name(device): device for platform in platforms for device in jax.local_devices(backend=platform)}
    if any(name not in found for name in names):
        chosen, now = (", ".join(f"{platform}:{number}" for platform, number in of) for of in (names, found))
        expected, got = f"the devices {chosen}, which init has chosen", f"{now} after jax.extend.backend.clear_backends"
        remedy = "Give JAX as many devices as before (JAX_NUM_CPU_DEVICES), or start the ranks again."
        raise RuntimeError(message("init", expected, got, remedy, rank=MPI.COMM_WORLD.rank, size=MPI.COMM_WORLD.size))
    return tuple(found[name] for name in names)


def _name(device: jax.Device) -> tuple[str, int]:
    return str(device.platform), int(device.id)


def start_mpi(mpi: MPI.Intracomm, limit: float | None) -> None:
    """Starts what comes before JAX's devices: MPI, the hooks for errors, and the native library.

    All ranks of ``mpi`` must make this call; a second call changes nothing.

    Args:
        mpi: the ranks.
        limit: the seconds that a rank waits here for the others; default ``PYCOLLECTIVE_TIMEOUT``.
    """
    child_processes.refuse_child("init")
    if _state.mpi_started:
        return
    if not MPI.Is_initialized():
        with mpi_start.within(limit), mpi_start.watched():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            message(
                "init",
                "MPI at THREAD_MULTIPLE, since XLA calls from its own threads",
                f"thread level {MPI.Query_thread()}",
                "Leave mpi4py.rc.thread_level at 'multiple', and use an MPI built with threads.",
            )
        )
    if not config.allow_singleton:
        started_by.check_world(os.environ, MPI.COMM_WORLD.size, MPI.Get_library_version())
    child_processes.mark_rank(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    rank_exit.end_all_on_error()  # from here on ranks wait for each other
    limit = config.timeout if limit is None else limit
    rank_start.wait_for_all(mpi, DEFAULT_TIMEOUT_S if limit is None else limit)
    with host_of(mpi) as neighbours:
        _compare_settings(mpi)
        native.start(neighbours.size)  # it tunes malloc, so it comes before JAX's backend starts threads
        if config.shared_memory != "off":
            board.tell_hosts(mpi, neighbours)
            board.open_board(neighbours, may_read=config.shared_memory == "on")
        monitor.start(mpi, limit)
        if mpi.size > 1:
            interrupts.end_all_on_interrupt()
        accelerators.take_share(neighbours)
    _state.mpi_started = True


def start(
    mpi: MPI.Intracomm,
    devices: Sequence[jax.Device] | int | None,
    limit: float | None,
    transport: str | None,
    *,
    warns: bool = True,
) -> None:
    """Does the work of :func:`init` except for the communicator. All ranks of ``mpi`` must make this call.

    A later call changes nothing, and raises if its options are not those of the first. ``warns``: whether to warn of
    threads that have started before.
    """
    child_processes.refuse_child("init")
    if transport is not None and transport not in chosen.TRANSPORTS:
        raise ValueError(
            message("init", f"transport to be one of {list(chosen.TRANSPORTS)}", repr(transport), "Leave it out.")
        )
    if limit is not None and not limit > 0:
        raise ValueError(message("init", "timeout to be a positive number of seconds", limit, "Leave it out for none."))
    if _state.started:
        named = None if devices is None else local_devices(devices)
        for name, first, later in (
            ("devices", devices_of_this_rank(), named),
            ("timeout", _state.timeout, limit),
            ("transport", chosen.transport().name, transport),
        ):
            if later is not None and later != first:
                expected = f"the {name} of the first call, {first}"
                raise ValueError(
                    message("init", expected, later, "Call init once, before anything else uses the package.")
                )
        return
    start_mpi(mpi, limit)
    _state.timeout = limit if limit is not None else config.timeout
    monitor.set_limit(_state.timeout)
    with watch.waiting("init"):
        _choose_transport(mpi, transport)
        with host_of(mpi) as neighbours, shared_cores(neighbours, warns=warns):
            _state.devices = tuple(map(_name, local_devices(devices)))
        own = devices_of_this_rank()
        dispatch.has_one_device()  # from now on it knows JAX's clients
        chosen.transport().check(own)
        kind = accelerators.check(mpi, own, may_share=config.allow_shared_gpu)
        if kind in runtime.KINDS:
            if config.check.nan:
                remedy = "Leave nan out of PYCOLLECTIVE_CHECK, and use jax.config.update('jax_debug_nans', True)."
                raise ValueError(message("init", "CPU devices with PYCOLLECTIVE_CHECK=nan", kind, remedy))
            direct = accelerators.use_direct(mpi, kind, own[0], chosen=config.gpu_direct)
            known = runtime.KINDS[kind]
            found = runtime.load(known)
            native.bind_runtime(found, hip=known.hip, direct=direct)
            # A program may run on any device of the process, with init's devices or without.
            local = jax.local_devices(backend=own[0].platform)
            if config.gpu_dispatch == "ahead":
                accelerators.use_ahead(mpi, kind, local, (found, runtime.load_driver(known)), direct=direct)
            native.start_accelerators(mpi, kind, [int(device.local_hardware_id) for device in local])
    rank_exit.register_exit_handler(dispatch.flush, _state.timeout)
    _state.started = True


def _compare_settings(mpi: MPI.Intracomm) -> None:
    """Raises ValueError on all ranks if a setting that must be the same on all differs."""
    mine = [
        _Setting(mpi.rank, getattr(config, name), os.environ.get(variable) or "no value", None)
        for variable, name in MUST_AGREE.items()
    ]
    of_all = mpi.allreduce(mine, op=lambda lower, higher: list(map(_Setting.followed_by, lower, higher)))
    for variable, setting in zip(MUST_AGREE, of_all, strict=True):
        if setting.other is not None:
            rank, text = setting.other
            expected = f"the same {variable} on all ranks"
            got = f"{setting.text} on rank 0 and {text} on rank {rank}"
            remedy = f"Set {variable} alike on all hosts, or nowhere."
            raise ValueError(message("init", expected, got, remedy, rank=mpi.rank, size=mpi.size))


class _Setting(NamedTuple):
    """A setting of consecutive ranks.

    Attributes:
        rank: the lowest of the ranks.
        value: its value.
        text: the text of its variable.
        other: the lowest rank that has another value, and the text there.
    """

    rank: int
    value: Any
    text: str
    other: tuple[int, str] | None

    def followed_by(self, later: _Setting) -> _Setting:
        """That of these ranks and of those that follow them."""
        if self.other is not None:
            return self
        return self._replace(other=(later.rank, later.text) if later.value != self.value else later.other)


def _choose_transport(mpi: MPI.Intracomm, name: str | None) -> None:
    """Chooses the transport. Ranks with different transports would misread each other's data."""
    missing = None
    try:
        chosen.choose(name)
    except ImportError as error:
        missing = error
    names = mpi.allreduce(of_rank(mpi.rank, "none" if missing else chosen.transport().name), op=together)
    if missing:
        raise missing
    if len(names) > 1:
        expected = "the same transport on all ranks"
        got = ", ".join(f"{name} on {name_ranks(ranks_in(runs))}" for name, runs in names.items())
        remedy = "Give each rank the same argument, and install mpi4jax for each or for none."
        raise ValueError(message("init", expected, got, remedy, rank=mpi.rank, size=mpi.size))
