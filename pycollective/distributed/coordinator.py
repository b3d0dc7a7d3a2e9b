"""Where JAX's coordination service listens: an address of rank 0 that every other host reaches, and a free port.

JAX wants both from the user, or takes the host's name and a port that it does not check. Names of hosts may mean
loopback, and an address may belong to a network that other hosts do not see. So the hosts try.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

from pycollective.errors import message
from pycollective.launch.addresses import LOOPBACK, addresses_of_this_host
from pycollective.transport.mpi import MPI

_TRY_S = 3.0
"""How long a host tries one address."""


@contextmanager
def chosen(mpi: MPI.Intracomm, *, one_host: bool, leads_host: bool) -> Iterator[str]:
    """``"address:port"`` for the service of rank 0. All ranks of ``mpi`` must make this call.

    While the context lasts, no other program gets the port, but the service may listen there.

    Args:
        mpi: the ranks.
        one_host: whether all of them are on one host.
        leads_host: whether this rank is the first one on its host.

    Raises:
        RuntimeError: on all ranks, if some host reaches no address of rank 0.
    """
    address = LOOPBACK if one_host else reached_by_all(mpi, leads_host=leads_host)
    with ExitStack() as held:
        port = None
        if mpi.rank == 0:
            reserved = held.enter_context(closing(_socket_for(address)))
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # the service sets it as well
            reserved.bind((address, 0))
            port = reserved.getsockname()[1]
        port = mpi.bcast(port)
        yield f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def reached_by_all(mpi: MPI.Intracomm, *, leads_host: bool) -> str:
    """An address of rank 0 that every other host reaches. All ranks of ``mpi`` must make this call."""
    tries = leads_host and mpi.rank != 0  # one rank of each other host
    nonce = mpi.bcast(secrets.token_bytes(16) if mpi.rank == 0 else None)
    with ExitStack() as open_:
        offered: list[tuple[str, int]] = []
        if mpi.rank == 0:
            for address in addresses_of_this_host():
                with suppress(OSError):  # the interface went down, or this kernel lacks its family
                    listener = open_.enter_context(closing(_socket_for(address)))
                    listener.bind((address, 0))
                    listener.listen(mpi.size)
                    open_.callback(listener.shutdown, socket.SHUT_RDWR)  # wakes the thread; to close it would not
                    offered.append((address, listener.getsockname()[1]))
                    threading.Thread(target=_greet, args=(listener, nonce), daemon=True).start()
        offered = mpi.bcast(offered)
        reached = [not tries or _answers(address, port, nonce) for address, port in offered]
        everybody = mpi.allgather((MPI.Get_processor_name(), reached))
    for number, (address, _) in enumerate(offered):
        if all(answers[number] for _, answers in everybody):
            return address
    without = sorted({name for name, answers in everybody if not any(answers)}) or ["some hosts, each another one"]
    raise RuntimeError(
        message(
            "distributed.initialize",
            f"an address of rank 0 that every host reaches, among {[address for address, _ in offered]}",
            f"none from {', '.join(without)}",
            "Look for a firewall between the hosts. JAX's coordination service needs TCP from each host to rank 0's.",
            rank=mpi.rank,
            size=mpi.size,
        )
    )


def _socket_for(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)


def _greet(listener: socket.socket, nonce: bytes) -> None:
    """Sends ``nonce`` to each process that connects, until the listener is closed."""
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(nonce)


def _answers(address: str, port: int, nonce: bytes) -> bool:
    """Whether rank 0 answers there. Another host may have the same address, in a network of its own."""
    with suppress(OSError), socket.create_connection((address, port), timeout=_TRY_S) as connection:
        connection.settimeout(_TRY_S)
        return connection.recv(len(nonce), socket.MSG_WAITALL) == nonce
    return False
