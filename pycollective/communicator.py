"""Communicators: ranks, hosts and local devices, and the world that :func:`init` makes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax

from pycollective import accelerators, launchers, lifecycle, ordering, processes
from pycollective.config import config
from pycollective.errors import message
from pycollective.mpi import MPI, host_of
from pycollective.threads import shared_cores
from pycollective.transport import native, runtime
from pycollective.watchdog import Watchdog

TRANSPORTS = ("native",)


class Communicator:
    """A group of ranks that call collectives together.

    Its traffic goes over private duplicates of :attr:`mpi`, one pair per local device, so nothing the program
    sends on :attr:`mpi` itself can mix with it. There is one object per MPI communicator, so communicators are
    equal when their MPI handles are; they are hashable and may be static arguments of :func:`jax.jit`.

    Args:
        mpi: an intracommunicator of mpi4py. All its ranks must make this call.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks.
        local_rank: rank among those on this host.
        local_size: number of ranks on this host.
        host_index: of this host, hosts being numbered in the order of their lowest rank.
        host_count: number of hosts.
        mpi: the mpi4py communicator, free for the program's own traffic.
        control: a duplicate for what ranks tell each other outside programs.

    Raises:
        TypeError: ``mpi`` is not an mpi4py intracommunicator.

    Example:
        >>> import pycollective as pc
        >>> comm = pc.world()
        >>> 0 <= comm.rank < comm.size and comm.local_size <= comm.size
        True
    """

    __slots__ = (
        "_duplicates",
        "_freed",
        "_groups",
        "_name",
        "_number",
        "_owned",
        "control",
        "host_count",
        "host_index",
        "local_rank",
        "local_size",
        "mpi",
        "rank",
        "size",
    )

    mpi: MPI.Intracomm
    rank: int
    size: int
    local_rank: int
    local_size: int
    host_index: int
    host_count: int
    control: MPI.Intracomm  # for what ranks tell each other outside programs
    _name: str
    _number: int  # by which compiled programs name it
    _duplicates: tuple[MPI.Intracomm, ...]  # two for each local device: for collectives, for messages
    _groups: dict[tuple[tuple[int, ...], ...], Communicator]
    _owned: bool  # free() frees mpi too
    _freed: bool

    def __new__(cls, mpi: MPI.Intracomm) -> Communicator:
        if not isinstance(mpi, MPI.Intracomm) or mpi == MPI.COMM_NULL:
            raise TypeError(
                message("Communicator", "an mpi4py intracommunicator", repr(mpi), "Pass mpi4py.MPI.COMM_WORLD, say.")
            )
        start(mpi, None, None, None)
        known = mpi.Get_attr(_keyval())
        if isinstance(known, Communicator):
            return known
        return cls._make(mpi, mpi.Get_name() or "unnamed", owned=False)

    @classmethod
    def _make(cls, mpi: MPI.Comm, name: str, *, owned: bool) -> Communicator:
        """The collective part of the constructor. ``owned``: :meth:`free` frees ``mpi`` too."""
        assert isinstance(mpi, MPI.Intracomm)
        self = object.__new__(cls)
        set_ = object.__setattr__  # the class is frozen
        set_(self, "mpi", mpi)
        set_(self, "rank", mpi.rank)
        set_(self, "size", mpi.size)
        # Not by host name: containers may share one, and one host may have several.
        with host_of(mpi) as shared:
            hosts = mpi.allgather(shared.bcast(mpi.rank))
        local = [rank for rank in range(mpi.size) if hosts[rank] == hosts[mpi.rank]]
        leaders = sorted(set(hosts))
        set_(self, "local_rank", local.index(mpi.rank))
        set_(self, "local_size", len(local))
        set_(self, "host_index", leaders.index(hosts[mpi.rank]))
        set_(self, "host_count", len(leaders))

        devices = _state.devices
        set_(self, "control", mpi.Dup())
        duplicates = tuple(_duplicate(mpi) for _ in range(2 * len(devices)))
        lanes = [(accelerators.lane_id(d), duplicates[2 * i], duplicates[2 * i + 1]) for i, d in enumerate(devices)]
        set_(self, "_duplicates", duplicates)
        set_(self, "_number", native.add_communicator(name, lanes))
        set_(self, "_name", name)
        set_(self, "_groups", {})
        set_(self, "_owned", owned)
        set_(self, "_freed", False)
        mpi.Set_attr(_keyval(), self)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(message("Communicator", "no change", f"{name} = {value!r}", "Communicators are frozen."))

    def __delattr__(self, name: str) -> None:
        raise AttributeError(message("Communicator", "no change", f"del {name}", "Communicators are frozen."))

    def __copy__(self) -> Communicator:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            message("Communicator", "an object that other processes can use", repr(self), "Make one on each rank.")
        )

    def __repr__(self) -> str:
        freed = ", freed" if self._freed else ""
        return f"Communicator({self._name}, rank {self.rank} of {self.size}{freed})"

    @property
    def name(self) -> str:
        """How error messages call it."""
        return self._name

    @property
    def number(self) -> int:
        """By which compiled programs name it.

        Raises:
            ValueError: it was freed.
        """
        self.check_live("Communicator")
        return self._number

    @property
    def local_axes(self) -> tuple[tuple[str, int], ...]:
        """Empty: of several local devices each has its own lane, and none works with another."""
        return ()

    @property
    def comm(self) -> Communicator:
        """Itself: the ranks of a ``mesh.Group`` have the same name there."""
        return self

    def check_live(self, where: str) -> None:
        """Raises ValueError, speaking for ``where``, if the communicator was freed."""
        if self._freed:
            raise ValueError(
                message(
                    where,
                    "a live communicator",
                    f"{self._name}, which was freed",
                    "Keep it until its last use.",
                    rank=self.rank,
                    size=self.size,
                )
            )

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Cuts the communicator into one for each color. All its ranks must make this call.

        Args:
            color: ranks with the same one end up together; None: this rank in none.
            key: order of the ranks in the new communicator; ties in the order of the old.

        Returns:
            The new communicator, or None for ``color=None``.

        Source: MPI_Comm_split (MPI standard, 7.4.2).

        Example:
            >>> import pycollective as pc
            >>> even_or_odd = pc.world().split(color=pc.world().rank % 2)
            >>> even_or_odd.size <= pc.world().size
            True
        """
        self.check_live("Communicator.split")
        part = self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
        if color is None:
            return None
        return Communicator._make(part, f"{self._name}/{color}", owned=True)

    def split_by_host(self) -> Communicator:
        """The ranks on this rank's host, in the order of this communicator. All its ranks must make this call.

        Example:
            >>> import pycollective as pc
            >>> pc.world().split_by_host().size == pc.world().local_size
            True
        """
        self.check_live("Communicator.split_by_host")
        part = self.mpi.Split(self.host_index, self.rank)
        return Communicator._make(part, f"{self._name}/host{self.host_index}", owned=True)

    def groups(self, groups: tuple[tuple[int, ...], ...]) -> Communicator:
        """The communicator of this rank's group, ranks in the group's order; made once and kept.

        Args:
            groups: rank numbers; each rank in exactly one. All ranks must make this call with the same groups.
        """
        if groups not in self._groups:
            (color,) = (i for i, group in enumerate(groups) if self.rank in group)
            part = self.split(color, groups[color].index(self.rank))
            assert part is not None
            self._groups[groups] = part
        return self._groups[groups]

    def reversed(self) -> Communicator:
        """The same ranks in the opposite order; made once and kept. All ranks must make the first call."""
        return self.groups((tuple(range(self.size))[::-1],))

    def routes(self, perm: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each lane of this rank where it sends and from where it receives: ``rank * lanes + lane``, -1 for none.

        Args:
            perm: (source, destination) ranks; each lane exchanges with the same lane there.
        """
        lanes = len(_state.devices)
        dest = dict(perm).get(self.rank)
        source = {dest: source for source, dest in perm}.get(self.rank)

        def on_each_lane(rank: int | None) -> tuple[int, ...]:
            return tuple(-1 if rank is None else rank * lanes + lane for lane in range(lanes))

        return on_each_lane(dest), on_each_lane(source)

    def free(self) -> None:
        """Gives the communicator's MPI resources back. All its ranks must make this call.

        Programs that name it end in an error from now on. Waits for those already dispatched. The MPI communicator
        goes too if :meth:`split` made it.
        """
        if self._freed:
            return
        ordering.flush()
        for part in self._groups.values():
            part.free()
        native.free_communicator(self._number)
        object.__setattr__(self, "_freed", True)
        self.mpi.Delete_attr(_keyval())
        for duplicate in (self.control, *self._duplicates):
            duplicate.Free()
        if self._owned:
            self.mpi.Free()
        if _state.world is self:
            _state.world = None


def _duplicate(mpi: MPI.Intracomm) -> MPI.Intracomm:
    duplicate = mpi.Dup()
    duplicate.Set_errhandler(MPI.ERRORS_RETURN)
    return duplicate


class _State:
    """What :func:`init` has set up in this process."""

    started = False
    devices: tuple[jax.Device, ...] = ()
    keyval: int | None = None  # of the attribute that leads from an MPI communicator to its Communicator
    world: Communicator | None = None


_state = _State()


def _keyval() -> int:
    if _state.keyval is None:
        _state.keyval = MPI.Comm.Create_keyval(nopython=False)
    return _state.keyval


def devices_of_this_rank() -> tuple[jax.Device, ...]:
    """The devices of :func:`init`, each with a lane in every communicator."""
    return _state.devices


def _check_launcher() -> None:
    launched = launchers.launched_size(os.environ)
    if launched is None or MPI.COMM_WORLD.size > 1 or config.allow_singleton:
        return
    launcher, size = launched
    raise RuntimeError(
        message(
            "init",
            f"a world of {size} ranks, as {launcher.name} started",
            f"one rank that sees no other ({MPI.Get_library_version().splitlines()[0].strip()})",
            f"{launcher.remedy} PYCOLLECTIVE_ALLOW_SINGLETON=1 accepts it.",
        )
    )


def _choose_devices(devices: Sequence[jax.Device] | int | None) -> tuple[jax.Device, ...]:
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


def start(
    mpi: MPI.Intracomm, devices: Sequence[jax.Device] | int | None, timeout: float | None, transport: str | None
) -> None:
    """Everything of :func:`init` but the communicator; the first call decides. All ranks of ``mpi`` must make it."""
    processes.refuse_child("init")
    if transport is not None and transport not in TRANSPORTS:
        raise ValueError(
            message("init", f"transport to be one of {list(TRANSPORTS)}", repr(transport), "Leave it out.")
        )
    if timeout is not None and not timeout > 0:
        raise ValueError(
            message("init", "timeout to be a positive number of seconds", timeout, "Leave it out for none.")
        )
    if _state.started:
        if devices is not None and _choose_devices(devices) != _state.devices:
            raise ValueError(
                message("init", f"the devices of the first call, {_state.devices}", devices, "Call init once, first.")
            )
        return
    if not MPI.Is_initialized():
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
    _check_launcher()
    processes.mark_rank(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    lifecycle.end_all_on_error()  # from here on ranks wait for each other
    native.start()  # before JAX's backend and its threads: it tunes malloc
    with host_of(mpi) as neighbours:
        accelerators.take_own(neighbours)
        with shared_cores(neighbours):
            _state.devices = _choose_devices(devices)
    kind = accelerators.check(mpi, _state.devices, may_share=config.allow_shared_gpu)
    if kind in runtime.KINDS:
        takes = config.gpu_direct
        if takes is None:
            takes = bool(runtime.takes_device_memory(runtime.KINDS[kind]))
        native.start_accelerators(kind, direct=mpi.allreduce(takes, op=MPI.LAND))
    limit = timeout if timeout is not None else config.timeout
    lifecycle.end_in_order(ordering.flush, limit)
    if limit is not None:
        Watchdog(limit, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size).start()
    _state.started = True


def init(
    comm: MPI.Intracomm | Communicator | None = None,
    *,
    devices: Sequence[jax.Device] | int | None = None,
    timeout: float | None = None,
    transport: str | None = None,
) -> Communicator:
    """Sets this process up and returns the world. All ranks must make this call; a second one changes nothing.

    The first use of the package calls it, so it is needed only for its options. It also installs the hook that
    ends all ranks when an exception escapes on one of them. Call it before the first use of JAX's devices: XLA then
    computes with this rank's share of the host's cores, also where the launcher did not bind ranks to cores (``NPROC``
    says another number of threads); later it has a thread for each core already.

    Args:
        comm: the world, an mpi4py communicator; default ``COMM_WORLD``.
        devices: the local devices that this rank drives, a sequence or a number; default all. Each rank must bring
            the same number.
        timeout: seconds that a rank may wait inside one MPI call, or at its end for the others, before it reports and
            ends all ranks; default ``PYCOLLECTIVE_TIMEOUT``, else no limit.
        transport: "native", the only one; default.

    Raises:
        RuntimeError: this process is a child of a rank; MPI is not at ``THREAD_MULTIPLE``; this process sees no other
            rank although its launcher started several; the ranks bring different numbers of devices.
        ValueError: a bad ``timeout``, ``devices`` or ``transport``, or not those of the first call.

    Example:
        >>> import pycollective as pc
        >>> pc.init() is pc.world()
        True
    """
    given = comm.mpi if isinstance(comm, Communicator) else comm
    mpi = MPI.COMM_WORLD if given is None else given
    if not isinstance(mpi, MPI.Intracomm):
        raise TypeError(message("init", "an mpi4py intracommunicator", repr(comm), "Pass mpi4py.MPI.COMM_WORLD, say."))
    start(mpi, devices, timeout, transport)
    if _state.world is not None:
        if given is not None and given != _state.world.mpi:
            raise ValueError(
                message("init", f"the world of the first call, {_state.world!r}", repr(comm), "Call init once, first.")
            )
        return _state.world
    counts = mpi.allgather(len(_state.devices))
    if len(set(counts)) > 1:
        by_count = {n: [rank for rank, count in enumerate(counts) if count == n] for n in sorted(set(counts))}
        raise RuntimeError(
            message(
                "init",
                "the same number of local devices on every rank",
                ", ".join(f"{n} on ranks {ranks}" for n, ranks in by_count.items()),
                "Pass devices=, or set JAX_NUM_CPU_DEVICES alike.",
                rank=mpi.rank,
                size=mpi.size,
            )
        )
    name = "world" if mpi == MPI.COMM_WORLD else mpi.Get_name() or "unnamed"
    known = mpi.Get_attr(_keyval())
    if not isinstance(known, Communicator):
        known = Communicator._make(mpi, name, owned=False)
    lifecycle.meet_at_exit(mpi)
    _state.world = known
    return known


def world() -> Communicator:
    """The communicator of :func:`init`, which is called if it was not.

    Example:
        >>> import pycollective as pc
        >>> pc.world().size >= 1
        True
    """
    if processes.is_forked():
        processes.refuse_child("world")
    return _state.world if _state.world is not None else init()
