"""The roofline: the least time in which this hardware can move the bytes of a workload, from its measured speed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pycollective.bench.workloads import Workload
from pycollective.transport.mpi import MPI

PING_BYTES, STREAM_BYTES = 8, 4 << 20
_REPEATS = 30


@dataclass(frozen=True)
class Roofline:
    """What limits a collective here: the latency and the bandwidth of the link.

    Attributes:
        alpha_s: the seconds that the smallest message takes, one way.
        transfer_s: from a number of bytes to the seconds they take, from or to each host; on one host, each rank.
        hosts: the number of hosts; with one host, memory is the link.
        ranks: the number of ranks.
        name: the name of the link, for the table.
    """

    alpha_s: float
    transfer_s: Callable[[float], float]
    hosts: int
    ranks: int
    name: str

    def least_s(self, workload: Workload, devices: int) -> float:
        """The seconds that ``workload`` takes at least on ``devices`` local devices of each rank.

        They are the latency of a tree of messages and the time of the bytes on the link. Between hosts the devices of
        one host may work together: the link then carries one array for all of them.
        """
        n = self.hosts if self.hosts > 1 else self.ranks * devices
        traffic = workload.traffic(n)
        operation = workload.operation
        if self.hosts > 1 and operation is not None and not operation.devices_share_the_link:
            traffic *= self.ranks * devices // self.hosts
        steps = math.ceil(math.log2(max(n, 2)))
        return (steps * self.alpha_s if n > 1 else 0.0) + self.transfer_s(traffic)


def measure_roofline(comm: MPI.Intracomm, hosts: int, partner: int, gbps: float | None) -> Roofline:
    """Measures the link. All ranks of ``comm`` must make this call.

    Args:
        comm: the ranks.
        hosts: the number of their hosts.
        partner: a rank on another host than rank 0; with one host, any other rank.
        gbps: the rate of the network in Gbit/s; None to measure it between rank 0 and ``partner``.
    """
    alpha = one_way_s(comm, partner, PING_BYTES)
    if hosts == 1 and gbps is None:
        return Roofline(alpha, lambda nbytes: _copy_s(comm, int(nbytes)), 1, comm.size, "memory copies, measured")
    if gbps is None:
        beta = (one_way_s(comm, partner, STREAM_BYTES) - alpha) / STREAM_BYTES
        name = f"network, measured: {alpha * 1e6:.1f} us, {8e-9 / beta:.2f} Gbit/s"
    else:
        beta = 8e-9 / gbps
        name = f"network of {gbps:g} Gbit/s, {alpha * 1e6:.1f} us measured"
    return Roofline(alpha, lambda nbytes: beta * nbytes, hosts, comm.size, name)


def one_way_s(comm: MPI.Intracomm, partner: int, nbytes: int) -> float:
    """Half of the median round trip of a message between rank 0 and ``partner``. All ranks must make this call."""
    if comm.size == 1:
        return 0.0
    buffer = np.zeros(nbytes, np.uint8)
    times = []
    for _ in range(_REPEATS + 3):
        comm.Barrier()
        started = time.perf_counter()
        if comm.rank == 0:
            comm.Send(buffer, partner)
            comm.Recv(buffer, partner)
        elif comm.rank == partner:
            comm.Recv(buffer, 0)
            comm.Send(buffer, 0)
        times.append(time.perf_counter() - started)
    return float(comm.bcast(statistics.median(times[3:]) / 2))


def _copy_s(comm: MPI.Intracomm, nbytes: int) -> float:
    """The median time of a copy within memory on the slowest rank, while all ranks copy."""
    source = np.ones(max(nbytes, 1), np.uint8)
    target = np.zeros_like(source)
    times = []
    for _ in range(7):
        comm.Barrier()
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return float(comm.allreduce(statistics.median(times[2:]), op=MPI.MAX))
