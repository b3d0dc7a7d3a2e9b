"""The number of threads that XLA computes with: this rank's share of its host's cores.

XLA's CPU client starts a thread for each core that the process may use, or for each of its devices if they are more.
If the launcher did not bind ranks to cores, each rank starts a thread for each core of the host. These threads then
compete for the cores with each other, and with the threads that poll inside MPI.
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
"""The variable from which XLA's CPU client reads the number of its threads, once, when it starts. A value that the user
has set is left as it is."""


def share(own: frozenset[int], on_host: Sequence[frozenset[int]]) -> int:
    """The number of threads for a rank that may use the cores ``own``.

    Args:
        own: the cores.
        on_host: for each rank of the host the cores that it may use.

    Example:
        >>> share(frozenset({0, 1, 2, 3}), [frozenset({0, 1, 2, 3})] * 2)  # not bound
        2
        >>> share(frozenset({0, 1}), [frozenset({0, 1}), frozenset({2, 3})])  # bound
        2
    """
    return max(1, len(own) // sum(not own.isdisjoint(cores) for cores in on_host))


def devices_have_started() -> bool:
    """Whether JAX's devices, and with them XLA's threads, have started.

    JAX's public API shows it in one way only: then it refuses another number of devices.

    Example:
        >>> _ = jax.devices()
        >>> devices_have_started()
        True
    """
    name = "jax_num_cpu_devices"
    number = getattr(jax.config, name)
    try:
        jax.config.update(name, number + 2)  # a valid number, even if none is set (-1)
    except RuntimeError:
        return True
    jax.config.update(name, number)
    return False


_has_run = False
"""Whether :func:`shared_cores` was called before; it warns only once."""


@contextmanager
def shared_cores(neighbours: MPI.Intracomm, *, warns: bool = True) -> Iterator[None]:
    """Gives a CPU client that JAX starts inside this rank's share of cores. All ranks of its host must make this call.

    Args:
        neighbours: the ranks of the host, as ``mpi.host_of`` gives them.
        warns: whether to warn; the same on all of them.

    Warns:
        RuntimeWarning: JAX has started the client before, with a thread for each core, and ranks share cores. One rank
            of each host warns.
    """
    global _has_run
    own = frozenset(os.sched_getaffinity(0))
    late = not _has_run and devices_have_started()
    _has_run = True
    told = neighbours.allgather((own, late))
    first_late = late and [is_late for _, is_late in told].index(True) == neighbours.rank
    threads = share(own, [cores for cores, _ in told])
    if _VARIABLE in os.environ or threads == len(own):
        yield
        return
    if first_late and warns:
        expected = f"{_VARIABLE}={threads} or JAX's devices not in use yet, for {threads} thread(s) of XLA in each rank"
        got = f"devices with {len(own)}, on cores that several ranks share"
        remedy = "Call pycollective.init before JAX computes, or start with pycollective run, which binds the ranks."
        # The warning names the line of the caller of init: past the frames of contextlib and of this package.
        warnings.warn(message("init", expected, got, remedy), RuntimeWarning, stacklevel=6)
    with variable(_VARIABLE, str(threads)):
        yield
