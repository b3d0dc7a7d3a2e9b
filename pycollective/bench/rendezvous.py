"""Where peers that do not speak MPI meet."""

from __future__ import annotations

import socket

from pycollective.mpi import MPI


def free_port(comm: MPI.Intracomm) -> str:
    """``host:port`` on rank 0's host, the same on all ranks. Bound to the loopback interface on one host."""
    one_host = len(set(comm.allgather(MPI.Get_processor_name()))) == 1
    with socket.socket() as free:
        host = "127.0.0.1" if one_host else socket.gethostbyname(socket.gethostname())
        free.bind((host, 0))
        address = f"{host}:{free.getsockname()[1]}"
    return str(comm.bcast(address))
