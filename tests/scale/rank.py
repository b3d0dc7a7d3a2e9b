"""A rank without JAX: it starts MPI, the compiled library and the monitor as ``init`` does, and calls handlers.

    pycollective run ... tests/scale/rank.py LIBRARY FOLDER count
    pycollective run ... tests/scale/rank.py LIBRARY FOLDER calls WARNING LIMIT RANK

LIBRARY is what ``calls.cc`` became. Each rank writes a file into FOLDER: what it has counted, or that it
makes calls, one after another. A call that lasts WARNING seconds is reported, and one that lasts LIMIT seconds ends the
job; 0: never. RANK makes no more calls after the first ones; -1: all ranks make them.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np


def _replace_jax() -> None:
    """For ``pycollective.transport.native``, which registers handlers with ``jax.ffi``; :class:`Rank` calls them."""
    jax, ffi = ModuleType("jax"), ModuleType("jax.ffi")
    vars(ffi).update(pycapsule=lambda function: function, register_ffi_target=lambda *_, **__: None)
    vars(jax).update(ffi=ffi)
    sys.modules.update({"jax": jax, "jax.ffi": ffi})


_replace_jax()

from pycollective.config import config  # noqa: E402
from pycollective.faults import monitor, rank_exit, rank_start  # noqa: E402
from pycollective.ranks.out_of_band import OutOfBand  # noqa: E402
from pycollective.transport import board, native, watch  # noqa: E402
from pycollective.transport.mpi import MPI, host_of  # noqa: E402
from pycollective.transport.native_library import library, table  # noqa: E402
from tests.scale.jobs import CALLS, LARGE, MEDIUM, SMALL  # noqa: E402

_SITE = 77


class CountingComm(MPI.Intracomm):
    """A communicator that counts the messages of :class:`OutOfBand`."""

    sent = 0

    def isend(self, obj: Any, dest: int, tag: int = 0) -> MPI.Request:
        type(self).sent += 1
        return super().isend(obj, dest, tag)


class Rank:
    """This process as a rank of COMM_WORLD, with one communicator of all ranks.

    Args:
        calls: the library of ``calls.cc``.
    """

    def __init__(self, calls: Path) -> None:
        self._calls = ctypes.CDLL(str(calls))
        self._calls.scale_allreduce.restype = ctypes.c_char_p
        self._calls.scale_calls.restype = ctypes.c_int64
        self.mpi = MPI.COMM_WORLD
        self._descriptors_of_mpi = len(os.listdir("/proc/self/fd"))
        rank_exit.end_all_on_error()
        rank_start.wait_for_all(self.mpi, config.timeout)
        addresses = native._addresses

        def counted(*arguments: Any) -> Any:
            found = addresses(*arguments)
            self._calls.scale_count(found, MPI._sizeof(MPI.Comm))
            return found

        with host_of(self.mpi) as neighbours:
            native._addresses = counted
            native.start(neighbours.size)
            native._addresses = addresses
            board.tell_hosts(self.mpi, neighbours)
            board.open_board(neighbours)
            monitor.start(self.mpi, config.timeout)
            self.is_first_of_host = neighbours.rank == 0
        watch.add_site(_SITE, "step.py:7 (step)")
        main, auxiliary = self.mpi.Dup(), self.mpi.Dup()
        everyone = range(self.mpi.size)
        self._fingerprint = 11
        whole = native.Whole("world", self._fingerprint, 13, everyone, [0], main, auxiliary)
        self._number = native.add_communicator(whole)
        self.out_of_band = OutOfBand(CountingComm(self.mpi.Dup()), 5)
        rank_exit.register_exit_handler(lambda: None, config.timeout)
        rank_exit.wait_for_all_at_exit(self.mpi)

    def allreduce(self, x: np.ndarray[Any, Any], section: int = 0, run: int = 0) -> np.ndarray[Any, Any]:
        """The sum over all ranks, by the handler. ``section``: an attribute of its program; ``run``: its number."""
        y = np.empty_like(x)
        comm = (ctypes.c_int64 * 2)(self._number, self._fingerprint)
        handler = ctypes.cast(library().pycollective_allreduce, ctypes.c_void_p)
        error = self._calls.scale_allreduce(
            handler,
            comm,
            x.ctypes.data_as(ctypes.c_void_p),
            y.ctypes.data_as(ctypes.c_void_p),
            *map(ctypes.c_int64, (x.size, _SITE, section, run)),
        )
        if error is not None:
            raise RuntimeError(error.decode())
        return y

    def check_sum(self, count: int, section: int = 0, run: int = 0) -> None:
        """An allreduce of ``count`` numbers whose result is known."""
        own = np.arange(count, dtype=np.float32) % 5 + self.mpi.rank
        size = self.mpi.size
        want = size * (np.arange(count, dtype=np.float32) % 5) + size * (size - 1) // 2
        np.testing.assert_array_equal(self.allreduce(own, section, run), want)

    def snapshot(self) -> dict[str, float]:
        """What this process, and its host, have counted so far."""
        names = table(library().pycollective_function_name)
        counted = {name: self._calls.scale_calls(i) for i, name in enumerate(names)}
        return {
            **counted,
            "messages": sum(counted[f"MPI_{name}"] for name in ("Send", "Isend", "Sendrecv")),
            "collectives": sum(
                counted[f"MPI_{name}"] for name in ("Allreduce", "Allgather", "Bcast", "Reduce_scatter_block", "Reduce")
            ),
            "out_of_band": CountingComm.sent,
            "comparisons": native.comparisons(),
            "link_bytes": sum(_statistic(name) for name in ("tx_bytes", "rx_bytes")),
            "descriptors": len(os.listdir("/proc/self/fd")) - self._descriptors_of_mpi,
            "board_bytes": _board_bytes(),
        }


def _statistic(name: str) -> int:
    return int(Path(f"/sys/class/net/eth0/statistics/{name}").read_text())


def _board_bytes() -> int:
    """The memory of the ranks of this host that they have touched: pages of the file that they share."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "pycollective-board" in line:
            return os.stat(f"/proc/self/map_files/{line.split()[0]}").st_blocks * 512
    return 0


def count(rank: Rank) -> dict[str, dict[str, float]]:
    """What each phase adds to :meth:`Rank.snapshot`, less what the barriers around it add."""
    section = 21 << 1

    def repeat(call: Callable[[], object]) -> Callable[[], None]:
        return lambda: [None for _ in range(CALLS) if call()] and None

    def out_of_band() -> None:
        def steps() -> Any:
            told = yield from rank.out_of_band.tell((yield from rank.out_of_band.reduce(rank.mpi.rank, max)))
            assert told == rank.mpi.size - 1

        def wait(condition: Callable[[], bool]) -> None:
            while not condition():
                time.sleep(0.001)

        rank.out_of_band.complete("meeting", steps, wait)

    phases: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "first comparison": lambda: rank.check_sum(SMALL),
        "comparisons": repeat(lambda: rank.check_sum(SMALL)),
        "first run of a section": repeat(lambda: rank.check_sum(MEDIUM, section, 1)),
        "later run of it": repeat(lambda: rank.check_sum(MEDIUM, section, 2)),
        "first large sum": lambda: rank.check_sum(LARGE),
        "large sum": lambda: rank.check_sum(LARGE),
        "first meeting": out_of_band,
        "meetings": repeat(out_of_band),
    }
    found: dict[str, dict[str, float]] = {}
    for name, phase in phases.items():
        rank.mpi.Barrier()
        before = rank.snapshot()
        rank.mpi.Barrier()
        phase()
        rank.mpi.Barrier()
        after = rank.snapshot()
        found[name] = {key: after[key] - before[key] for key in after}
    found["in all"] = rank.snapshot()
    return found


def make_calls(rank: Rank, folder: Path, idle: int) -> None:
    """Makes calls until the job ends; rank number ``idle`` makes a few."""
    for _ in range(CALLS // 4):
        rank.check_sum(SMALL)
    (folder / f"{rank.mpi.rank}.pid").write_text(str(os.getpid()))
    while rank.mpi.rank != idle:
        rank.check_sum(SMALL)
    time.sleep(3600)


def main() -> None:
    folder, what = Path(sys.argv[2]), sys.argv[3]
    rank = Rank(Path(sys.argv[1]))
    if what == "count":
        counted = {"is_first_of_host": rank.is_first_of_host, **count(rank)}
        (folder / f"{rank.mpi.rank}.json").write_text(json.dumps(counted))
    else:
        watch.set_monitor_timeout(float(sys.argv[4]), float(sys.argv[5]))
        make_calls(rank, folder, int(sys.argv[6]))


if __name__ == "__main__":
    main()
