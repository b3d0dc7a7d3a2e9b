"""A peer without MPI, which runs in subprocesses of the ranks: :mod:`jax_gloo`, :mod:`torch_gloo`.

Each rank starts one subprocess for each of them. A rank sleeps while its subprocess works: a rank that waited in MPI
would poll, and take a core from the subprocess. A subprocess sleeps while its rank works. In one process the threads of
both would compete for the cores.
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

from pycollective.bench.measure import InProcess, Validation
from pycollective.bench.workloads import Workload
from pycollective.environment import variable
from pycollective.errors import message
from pycollective.ranks.xla_threads import shared_cores
from pycollective.transport.mpi import MPI, host_of


class InSubprocess:
    """Runs an implementation in a subprocess. All ranks must make each call.

    Attributes:
        name: the implementation's name.
        process: the subprocess.
    """

    def __init__(self, comm: MPI.Intracomm, devices: int, option: str) -> None:
        """Starts the subprocess and waits until it has met those of the other ranks.

        Args:
            comm: the ranks.
            devices: the number of local devices of each rank.
            option: the implementation, "jax-gloo" or "torch-gloo".

        Raises:
            ImportError: the implementation is not installed.
        """
        package = option.partition("-")[0]
        if find_spec(package) is None:
            raise ImportError(message("bench", f"{option} to be installed", "none", f"pip install {package}"))
        self.name = option.replace("-", " ")
        context = multiprocessing.get_context("spawn")
        self._link, other_end = context.Pipe()
        place = (free_port(comm), comm.rank, comm.size, devices)
        self.process = context.Process(target=_serve, args=(other_end, option, place), daemon=True)
        # The subprocess imports this package, but it is no rank, so MPI must not start in it.
        with variable("MPI4PY_RC_INITIALIZE", "0"), host_of(comm) as neighbours, shared_cores(neighbours):
            self.process.start()
        other_end.close()
        self._answer()

    def prepare(self, workload: Workload, warmup: int) -> Validation | None:
        return self._ask("prepare", workload, warmup)

    def time_calls(self, calls: int) -> list[float]:
        return self._ask("time_calls", calls)

    def _ask(self, *question: Any) -> Any:
        with suppress(ConnectionError):  # the subprocess has ended; _answer raises
            self._link.send(question)
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self._link.recv()
        except (EOFError, ConnectionError):
            expected = f"an answer of {self.name}'s process"
            raise RuntimeError(message("bench", expected, "its end", "What it wrote is above.")) from None


def free_port(comm: MPI.Intracomm) -> str:
    """``host:port`` on rank 0's host, the same on all ranks; on the loopback interface where there is one host."""
    one_host = len(set(comm.allgather(MPI.Get_processor_name()))) == 1
    with socket.socket() as free:
        host = "127.0.0.1" if one_host else socket.gethostbyname(socket.gethostname())
        free.bind((host, 0))
        address = f"{host}:{free.getsockname()[1]}"
    return str(comm.bcast(address))


def _serve(link: Connection, option: str, place: tuple[str, int, int, int]) -> None:
    """The main function of the subprocess: makes the calls that come through ``link``."""
    os.dup2(2, 1)  # gloo writes to standard output, which belongs to the table
    threading.Thread(target=_end_with_rank, daemon=True).start()
    address, rank, size, devices = place
    module = importlib.import_module(option.replace("-", "_"))
    with link, suppress(EOFError):  # EOFError: the rank has closed its end
        implementation = module.join(address, rank, size, devices)
        runner = InProcess(implementation, rank, size, implementation.barrier)
        link.send(None)  # tells the rank that this subprocess has met the others
        while True:
            method, *args = link.recv()
            link.send(getattr(runner, method)(*args))


def _end_with_rank() -> None:
    """Ends this process when its rank has ended, whatever this process waits for."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    wait([rank.sentinel])
    os._exit(1)
