"""Communicators: ranks, hosts and local devices, and the world that :func:`init` makes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax

from pycollective import accelerators, launchers, lifecycle, processes, turns
from pycollective.config import config
from pycollective.control import Control
from pycollective.devices import local_devices
from pycollective.errors import message
from pycollective.members import Key, Members, Part, Perm, Routes, Seat, fingerprint, own_group, routes
from pycollective.mpi import MPI, host_of
from pycollective.threads import shared_cores
from pycollective.transport import native, runtime
from pycollective.watchdog import Watchdog

TRANSPORTS = ("native",)

_FOR_OTHER_MODULES = frozenset(
    ("check_live", "comm", "control", "groups", "key", "key_of", "local_axes", "part", "reversed", "routes")
)
"""What a communicator has that is not for users; completion does not show it."""


class Communicator:
    """A group of ranks that call collectives together.

    Its traffic goes over private duplicates of :attr:`mpi`, so nothing the program sends on :attr:`mpi` itself can mix
    with it: two that are made with it, and others where programs on several devices need them. There is one object per
    MPI communicator, so communicators are equal when their MPI handles are; they are hashable and may be static
    arguments of :func:`jax.jit`.

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

    Raises:
        TypeError: ``mpi`` is not an mpi4py intracommunicator.
        RuntimeError: the package has not started, and ``mpi`` does not have all ranks.

    Example:
        >>> import pycollective as pc
        >>> comm = pc.world()
        >>> 0 <= comm.rank < comm.size and comm.local_size <= comm.size
        True
    """

    __slots__ = (
        "_calls",
        "_freed",
        "_key",
        "_keys",
        "_name",
        "_owned",
        "_parts",
        "_rest",
        "_world_ranks",
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
    control: Control  # what its ranks tell each other outside programs
    _name: str
    _world_ranks: tuple[int, ...]  # of its ranks, in order
    _key: Key
    _calls: MPI.Intracomm  # for collectives, and messages under the program's own tags
    _rest: MPI.Intracomm  # for the making of other channels, ppermute, messages between devices, and `control`
    _parts: dict[Any, Part]
    _keys: dict[Any, Key]  # of its parts and of groups of devices
    _owned: bool  # free() frees mpi too
    _freed: bool

    def __new__(cls, mpi: MPI.Intracomm) -> Communicator:
        if not isinstance(mpi, MPI.Intracomm) or mpi == MPI.COMM_NULL:
            raise TypeError(
                message("Communicator", "an mpi4py intracommunicator", repr(mpi), "Pass mpi4py.MPI.COMM_WORLD, say.")
            )
        if not _state.started and MPI.Comm.Compare(mpi, MPI.COMM_WORLD) not in (MPI.IDENT, MPI.CONGRUENT):
            raise RuntimeError(
                message(
                    "Communicator",
                    "a package that has started, which all ranks do together",
                    f"a communicator of {mpi.size} ranks before that",
                    "Call pycollective.init() on all ranks first, or pycollective.init(comm) for these alone.",
                    rank=MPI.COMM_WORLD.rank,
                    size=MPI.COMM_WORLD.size,
                )
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

        lanes = tuple(map(accelerators.lane_id, _state.devices))
        world_ranks = tuple(MPI.Group.Translate_ranks(mpi.Get_group(), None, MPI.COMM_WORLD.Get_group()))
        calls, rest = _duplicate(mpi), _duplicate(mpi)
        mark = fingerprint(world_ranks, mpi.rank, lanes)
        set_(self, "_calls", calls)
        set_(self, "_rest", rest)
        set_(self, "control", Control(rest, 2 * len(lanes) ** 2))  # a tag that native/communicators.cc leaves free
        set_(self, "_world_ranks", world_ranks)
        set_(self, "_key", (native.add_communicator(name, mark, lanes, calls, rest), mark))
        set_(self, "_name", name)
        set_(self, "_parts", {})
        set_(self, "_keys", {})
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

    def __dir__(self) -> list[str]:
        shown = [name for name in super().__dir__() if not name.startswith("_") or name.startswith("__")]
        return [name for name in shown if name not in _FOR_OTHER_MODULES]

    def __repr__(self) -> str:
        freed = ", freed" if self._freed else ""
        return f"Communicator({self._name}, rank {self.rank} of {self.size}{freed})"

    @property
    def name(self) -> str:
        """How error messages call it."""
        return self._name

    @property
    def key(self) -> Key:
        """By which compiled programs name it.

        Raises:
            ValueError: it was freed.
        """
        self.check_live("Communicator")
        return self._key

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

    def groups(self, groups: Sequence[Sequence[int]]) -> Members:
        """This rank's group, ranks in the group's order; each rank is in exactly one."""
        return self.part(own_group(groups, self.rank))

    def reversed(self) -> Members:
        """The same ranks in the opposite order."""
        return self.part(tuple(range(self.size))[::-1])

    def part(self, members: tuple[int, ...], devices: tuple[jax.Device, ...] | None = None) -> Members:
        """Some of the ranks, this one among them: the same object each time. No rank speaks with others for it.

        Args:
            members: ranks, in the order of the part.
            devices: of this rank, which pair with those of other ranks by their place herein; default those of
                :func:`init`, by their index. Of as many on each rank.
        """
        if devices is None and members == tuple(range(self.size)):
            return self
        if (members, devices) not in self._parts:
            seats = devices and tuple((accelerators.lane_id(device), i, 0) for i, device in enumerate(devices))
            lanes = len(devices or _state.devices)
            self._parts[members, devices] = Part(self, members, devices, seats, lanes)
        return self._parts[members, devices]

    def key_of(self, members: tuple[int, ...], seats: tuple[Seat, ...] | None, team_size: int) -> Key:
        """How programs name a part, or a group of devices: the same each time.

        Args:
            members: ranks, in the order of the part.
            seats: of the devices of a mesh; None for those of :func:`init`, each for itself.
            team_size: how many of them work together.
        """
        if (members, seats, team_size) not in self._keys:
            rank = members.index(self.rank)
            lanes = tuple(map(accelerators.lane_id, _state.devices)) if seats is None else seats
            world_ranks = tuple(self._world_ranks[member] for member in members)
            mark = fingerprint(world_ranks, rank, lanes, team_size)
            all_in_order = members == tuple(range(self.size))
            shown = [*map(str, members[:4]), *(["..."] if len(members) > 4 else [])]
            name = self._name if all_in_order else f"{self._name}[{', '.join(shown)}]"
            given = () if all_in_order else members
            number = native.add_part(name, mark, self._key[0], given, rank, len(members), seats, team_size)
            self._keys[members, seats, team_size] = (number, mark)
        return self._keys[members, seats, team_size]

    def routes(self, perm: Perm) -> Routes:
        """For each lane of this rank where it sends and from where it receives; see ``members.routes``."""
        return routes(self.rank, len(_state.devices), perm)

    def free(self) -> None:
        """Gives the communicator's MPI resources back. All its ranks must make this call.

        Programs that name it end in an error from now on. Waits for those already dispatched. The MPI communicator
        goes too if :meth:`split` made it.
        """
        if self._freed:
            return
        turns.flush()
        native.free_communicator(self._key[0])
        object.__setattr__(self, "_freed", True)
        self.mpi.Delete_attr(_keyval())
        self._calls.Free()
        self._rest.Free()
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
    timeout: float | None = None  # in seconds
    transport = TRANSPORTS[0]
    devices: tuple[jax.Device, ...] = ()
    keyval: int | None = None  # of the attribute that leads from an MPI communicator to its Communicator
    world: Communicator | None = None


_state = _State()


def _keyval() -> int:
    if _state.keyval is None:
        _state.keyval = MPI.Comm.Create_keyval(nopython=False)
    return _state.keyval


def timeout() -> float | None:
    """Seconds that a rank may wait for others, from :func:`init` or ``PYCOLLECTIVE_TIMEOUT``; None for no limit."""
    return _state.timeout if _state.started else config.timeout


def devices_of_this_rank() -> tuple[jax.Device, ...]:
    """The devices of :func:`init`, each with a lane in every communicator."""
    return _state.devices


def start(
    mpi: MPI.Intracomm, devices: Sequence[jax.Device] | int | None, limit: float | None, transport: str | None
) -> None:
    """Everything of :func:`init` but the communicator; the first call decides. All ranks of ``mpi`` must make it."""
    processes.refuse_child("init")
    if transport is not None and transport not in TRANSPORTS:
        raise ValueError(
            message("init", f"transport to be one of {list(TRANSPORTS)}", repr(transport), "Leave it out.")
        )
    if limit is not None and not limit > 0:
        raise ValueError(message("init", "timeout to be a positive number of seconds", limit, "Leave it out for none."))
    if _state.started:
        chosen = None if devices is None else local_devices(devices)
        for name, first, later in (
            ("devices", _state.devices, chosen),
            ("timeout", _state.timeout, limit),
            ("transport", _state.transport, transport),
        ):
            if later is not None and later != first:
                expected = f"the {name} of the first call, {first}"
                raise ValueError(
                    message("init", expected, later, "Call init once, before anything else uses the package.")
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
    if not config.allow_singleton:
        launchers.check_world(os.environ, MPI.COMM_WORLD.size, MPI.Get_library_version())
    processes.mark_rank(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    lifecycle.end_all_on_error()  # from here on ranks wait for each other
    with host_of(mpi) as neighbours:
        native.start(neighbours.size)  # before JAX's backend and its threads: it tunes malloc
        accelerators.take_own(neighbours)
        with shared_cores(neighbours):
            _state.devices = local_devices(devices)
    kind = accelerators.check(mpi, _state.devices, may_share=config.allow_shared_gpu)
    if kind in runtime.KINDS:
        takes = config.gpu_direct
        if takes is None:
            takes = bool(runtime.takes_device_memory(runtime.KINDS[kind]))
        native.start_accelerators(kind, direct=mpi.allreduce(takes, op=MPI.LAND))
    _state.timeout = limit if limit is not None else config.timeout
    lifecycle.end_in_order(turns.flush, _state.timeout)
    if _state.timeout is not None:
        Watchdog(_state.timeout, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size).start()
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


def world_if_known() -> Communicator | None:
    """The communicator of :func:`init`, where it was called."""
    return _state.world


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
