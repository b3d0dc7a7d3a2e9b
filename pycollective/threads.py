"""How many threads XLA computes with: this rank's share of its host's cores.

XLA's CPU client starts a thread for each core that the process may use, or for each of its devices if those are more.
Ranks that their launcher did not bind all see all cores of the host: their threads together are many times as many, and
compete for the cores with each other and with those that poll inside MPI.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pycollective.environment import variable
from pycollective.mpi import MPI

_VARIABLE = "NPROC"
"""Where XLA's CPU client looks for the number of its threads, once, when it starts. The user's own value stands."""


def share(own: frozenset[int], on_host: Sequence[frozenset[int]]) -> int:
    """The threads of a rank that may use the cores ``own``, where the ranks of its host may use ``on_host``.

    Example:
        >>> share(frozenset({0, 1, 2, 3}), [frozenset({0, 1, 2, 3})] * 2)  # not bound
        2
        >>> share(frozenset({0, 1}), [frozenset({0, 1}), frozenset({2, 3})])  # bound
        2
    """
    return max(1, len(own) // sum(not own.isdisjoint(cores) for cores in on_host))


@contextmanager
def shared_cores(comm: MPI.Intracomm) -> Iterator[None]:
    """A CPU client that JAX starts herein takes this rank's share. All ranks of ``comm`` must make this call."""
    own = frozenset(os.sched_getaffinity(0))
    neighbours = comm.Split_type(MPI.COMM_TYPE_SHARED)
    threads = share(own, neighbours.allgather(own))
    neighbours.Free()
    if _VARIABLE in os.environ or threads == len(own):
        yield
        return
    with variable(_VARIABLE, str(threads)):
        yield
