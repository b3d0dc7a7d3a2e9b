"""How many threads XLA computes with: this rank's share of its host's cores.

XLA's CPU client starts a thread for each core that the process may use, or for each of its devices if those are more.
Ranks that their launcher did not bind all see all cores of the host: their threads together are many times as many, and
compete for the cores with each other and with those that poll inside MPI.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax

from pycollective.environment import variable
from pycollective.errors import message
from pycollective.transport.mpi import MPI

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


def devices_have_started() -> bool:
    """Whether JAX has its devices already, and with them XLA's threads.

    JAX tells it in public by one complaint only: about another number of devices when it is too late for that.

    Example:
        >>> _ = jax.devices()
        >>> devices_have_started()
        True
    """
    name = "jax_num_cpu_devices"
    number = getattr(jax.config, name)
    try:
        jax.config.update(name, number + 2)  # a valid one, also where none is set (-1)
    except RuntimeError:
        return True
    jax.config.update(name, number)
    return False


_shared = False
"""Whether this module has had its say about the threads of this process."""


@contextmanager
def shared_cores(neighbours: MPI.Intracomm) -> Iterator[None]:
    """A CPU client that JAX starts herein takes this rank's share. All ranks of its host must make this call.

    Args:
        neighbours: those ranks, as ``mpi.host_of`` gives them.

    Warns:
        RuntimeWarning: JAX has started it before, with a thread for each core that several ranks share; on one of a
            host's ranks.
    """
    global _shared
    own = frozenset(os.sched_getaffinity(0))
    late = not _shared and devices_have_started()
    _shared = True
    told = neighbours.allgather((own, late))
    first_late = late and [is_late for _, is_late in told].index(True) == neighbours.rank
    threads = share(own, [cores for cores, _ in told])
    if _VARIABLE in os.environ or threads == len(own):
        yield
        return
    if first_late:
        expected = f"{_VARIABLE}={threads} or JAX's devices not in use yet, for {threads} thread(s) of XLA in each rank"
        got = f"devices with {len(own)}, on cores that several ranks share"
        remedy = "Call pycollective.init before JAX computes, or start with pycollective run, which binds the ranks."
        # Of the caller of init, past contextlib's own and ours.
        warnings.warn(message("init", expected, got, remedy), RuntimeWarning, stacklevel=5)
    with variable(_VARIABLE, str(threads)):
        yield
