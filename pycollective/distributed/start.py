"""What ``pycollective.distributed.initialize`` does; its import starts MPI."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import jax

from pycollective.config import config
from pycollective.distributed import coordinator
from pycollective.distributed.cliques import Cliques, learn_from_each_compilation
from pycollective.environment import XLA_MPI, without_proxies
from pycollective.errors import fail
from pycollective.faults import rank_exit
from pycollective.ranks import setup
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.world import init
from pycollective.ranks.xla_threads import devices_have_started
from pycollective.transport import native
from pycollective.transport.mpi import MPI, host_of

_WHERE = "distributed.initialize"
_OPTION = "jax_cpu_collectives_implementation"
_COLLECTIVES = ("mpi", "gloo")
_PROGRESS_INTERVAL_S = 0.01


def initialize(
    comm: MPI.Intracomm | None = None,
    *,
    collectives: str | None = None,
    devices: Sequence[jax.Device] | int | None = None,
    timeout: float | None = None,
    **options: Any,
) -> Communicator:
    """:func:`pycollective.distributed.initialize`."""
    kind = _chosen(collectives)
    _check_that_nothing_has_started()
    mpi = MPI.COMM_WORLD if comm is None else comm
    setup.start_mpi(mpi, timeout)
    if kind == "mpi":
        _check_that_xla_calls_us()
        native.xla_start(mpi.rank, mpi.size)
    jax.config.update(_OPTION, kind)
    limit = config.timeout if timeout is None else timeout
    if limit is not None:
        options.setdefault("initialization_timeout", max(1, round(limit)))
    _connect(mpi, options)
    world = init(mpi, devices=devices, timeout=timeout)
    if kind == "mpi":  # on GPUs too: a program may run on the processes' CPU devices
        if jax.default_backend() == "cpu":
            _check_that_each_rank_has_one_device(world)
        learn_from_each_compilation(Cliques(Communicator._make(mpi.Dup(), "global arrays", owned=True)))
    return world


def _connect(mpi: MPI.Intracomm, options: dict[str, Any]) -> None:
    """Lets JAX's processes meet in a service on rank 0. All ranks of ``mpi`` must make this call."""
    with host_of(mpi) as neighbours:
        one_host = mpi.allreduce(neighbours.size == mpi.size, op=MPI.LAND)
        leads_host = neighbours.rank == 0
    if not one_host:
        progress = _MpiProgress(mpi)
        progress.start()
        rank_exit.call_at_end(progress.stop)
    rank_exit.call_at_end(jax.distributed.shutdown)
    with ExitStack() as held:
        if not mpi.allreduce("coordinator_address" in options, op=MPI.LAND):
            address = held.enter_context(coordinator.chosen(mpi, one_host=one_host, leads_host=leads_host))
            options = {"coordinator_address": address, "coordinator_bind_address": address, **options}
        held.enter_context(without_proxies())
        jax.distributed.initialize(
            **options,
            num_processes=mpi.size,
            process_id=mpi.rank,
            cluster_detection_method="deactivate",
        )


class _MpiProgress(threading.Thread):
    """A thread that calls MPI now and then, until :meth:`stop`.

    A call of MPI may return before its last message has left for another host; MPI then sends it in a later call. JAX's
    processes also wait for each other through JAX's own service, where MPI gets no calls. A rank that waits there for a
    rank that waits for its message would wait for ever.

    Args:
        mpi: any communicator of this process.
    """

    def __init__(self, mpi: MPI.Intracomm) -> None:
        super().__init__(name="pycollective-progress", daemon=True)
        self._mpi = mpi
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(_PROGRESS_INTERVAL_S):
            self._mpi.Iprobe()

    def stop(self) -> None:
        """Ends the thread. It must come before MPI ends."""
        self._done.set()
        self.join()


def _chosen(collectives: str | None) -> str:
    kind = collectives or os.environ.get(_OPTION.upper()) or _COLLECTIVES[0]
    if kind not in _COLLECTIVES:
        fail(ValueError, _WHERE, None, f"collectives to be one of {_COLLECTIVES}", repr(kind), "Leave it out.")
    return kind


def _check_that_nothing_has_started() -> None:
    started = {
        "jax.distributed.initialize()": jax.distributed.is_initialized(),
        "pycollective.init()": setup.has_started(),
        "a use of JAX's devices": devices_have_started(),
    }
    first = next((what for what, has in started.items() if has), None)
    if first is not None:
        remedy = "Call it once, before JAX's devices are in use. It does what the other two do."
        fail(RuntimeError, _WHERE, None, "a process in which JAX has not started", first, remedy)


def _check_that_xla_calls_us() -> None:
    if native.xla_can_call():
        return
    other = os.environ.get(XLA_MPI)
    if other is not None and other != str(native.NATIVE_LIBRARY):
        got, remedy = f"{XLA_MPI}={other}", f"Unset {XLA_MPI}"
    else:
        got, remedy = "jax imported before pycollective", "Move 'import pycollective' before 'import jax'"
    expected = "XLA to call MPI through this package"
    fail(RuntimeError, _WHERE, None, expected, got, f'{remedy}, or choose collectives="gloo".')


def _check_that_each_rank_has_one_device(world: Communicator) -> None:
    own = jax.local_device_count()
    if own > 1:
        expected = "one CPU device for each rank, since XLA's MPI collectives tell processes apart, not devices"
        remedy = 'Start more ranks with a device each (JAX_NUM_CPU_DEVICES=1), or choose collectives="gloo".'
        fail(RuntimeError, _WHERE, world, expected, own, remedy)
