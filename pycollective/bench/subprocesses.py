"""Peers that do not speak MPI, in processes of their own beside the ranks.

Each rank starts one process of each peer. While it works, its rank sleeps, and while the others work, it does: in one
process their threads would keep each other from the cores. A rank that waits in MPI polls, so it would keep the peers'
threads from theirs.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import threading
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from typing import Any

from pycollective.bench.measure import InProcess, Prepared
from pycollective.bench.workloads import Workload
from pycollective.environment import variable
from pycollective.errors import message
from pycollective.ranks.xla_threads import shared_cores
from pycollective.transport.mpi import MPI, host_of


class OwnProcess:
    """Runs a peer in a process of its own. All ranks must make each call.

    Attributes:
        name: of the peer.
        process: where it runs.
    """

    def __init__(self, comm: MPI.Intracomm, peer: str, devices: int) -> None:
        """Starts it and waits until it has met those of the other ranks.

        Args:
            comm: the ranks.
            peer: "jax-gloo" or "torch-gloo".
            devices: local devices of each rank.

        Raises:
            ImportError: it is not installed.
        """
        package = peer.partition("-")[0]
        if find_spec(package) is None:
            raise ImportError(message("bench", f"{peer} to be installed", "none", f"pip install {package}"))
        self.name = peer.replace("-", " ")
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        place = (free_port(comm), comm.rank, comm.size, devices)
        self.process = context.Process(target=_serve, args=(theirs, peer, place), daemon=True)
        # The process imports this package, but its MPI must not start: it is no rank.
        with variable("MPI4PY_RC_INITIALIZE", "0"), host_of(comm) as neighbours, shared_cores(neighbours):
            self.process.start()
        theirs.close()
        self._answer()  # it has joined the others

    def prepare(self, work: Workload, warmup: int) -> Prepared | None:
        return self._ask("prepare", work, warmup)

    def turn(self, calls: int) -> list[float]:
        return self._ask("turn", calls)

    def _ask(self, *question: Any) -> Any:
        with suppress(ConnectionError):  # its process has ended, as the answer will say
            self._link.send(question)
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self._link.recv()
        except (EOFError, ConnectionError):
            expected = f"an answer of {self.name}'s process"
            raise RuntimeError(message("bench", expected, "its end", "What it wrote is above.")) from None


def free_port(comm: MPI.Intracomm) -> str:
    """``host:port`` on rank 0's host, the same on all ranks. Bound to the loopback interface on one host."""
    one_host = len(set(comm.allgather(MPI.Get_processor_name()))) == 1
    with socket.socket() as free:
        host = "127.0.0.1" if one_host else socket.gethostbyname(socket.gethostname())
        free.bind((host, 0))
        address = f"{host}:{free.getsockname()[1]}"
    return str(comm.bcast(address))


def _serve(link: Connection, peer: str, place: tuple[str, int, int, int]) -> None:
    """The process of a peer: runs what comes through ``link``."""
    os.dup2(2, 1)  # gloo talks; standard output is the table's
    threading.Thread(target=_end_with_rank, daemon=True).start()
    address, rank, size, devices = place
    module = importlib.import_module(f"pycollective.bench.{peer.replace('-', '_')}")
    with link, suppress(EOFError):  # closed when this one fails; EOFError: the rank has closed its end
        contender = module.join(address, rank, size, devices)
        runner = InProcess(contender, rank, size, contender.barrier)
        link.send(None)
        while True:
            method, *args = link.recv()
            link.send(getattr(runner, method)(*args))


def _end_with_rank() -> None:
    """Ends this process when its rank has ended, whatever the peer waits for."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    wait([rank.sentinel])
    os._exit(1)
