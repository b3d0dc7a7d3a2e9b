"""The flight recorder: the last calls of this rank, and the calls in progress.

It is always on and adds some tens of nanoseconds to a call. The fields have the names of PyTorch's flight recorder.
When a job of several ranks fails, each rank writes its records to a file ``rank-R.json`` in the folder of
``PYCOLLECTIVE_RECORDS``; a rank that was killed cannot. Of more than 16 ranks a part writes. Such a file has more
fields: ``reason``, why the job ended, ``job``, a name of the job, and ``writers``, the ranks that were asked to write.
"""

from __future__ import annotations

import json
from typing import Any

from pycollective.transport import watch
from pycollective.transport.mpi import MPI

__all__ = ["dump"]


def dump() -> dict[str, Any]:
    """Returns the last calls of this rank, the oldest first.

    Returns:
        A dictionary for :func:`json.dumps`, with ``rank``, ``world_size``, ``host_name``, ``pid``, ``pg_config``
        (the groups of ranks, by their ids), ``entries``, and ``complete_from``: all calls with this ``record_id`` or a
        greater one are among the entries. Each entry has

        - ``record_id``, the number of the call in this process;
        - ``profiling_name``, such as ``"pycollective:allreduce"``, and ``description``, with shape, dtype, reduction,
          root;
        - ``pg_id`` and ``process_group``, the ranks that take part; ``collective_seq_id`` or ``p2p_seq_id``, the number
          of the call among the collectives or the messages of these ranks, the same on all of them;
        - ``input_sizes`` and ``input_dtypes`` of the operand, ``nbytes`` of the larger of operand and result;
        - ``frames``, the line of the program that made the call: ``name``, ``filename`` and ``line``;
        - ``state``: ``scheduled`` (it waits for other devices of this rank), ``started`` (it waits for other ranks),
          ``completed`` or ``failed``;
        - ``time_created_ns``, ``time_discovered_started_ns`` and ``time_discovered_completed_ns``, in nanoseconds since
          1970 by this host's clock, or None.

    Raises:
        RuntimeError: the package has not started.

    Order:
        No communication, and no wait for programs: it also returns calls in progress.

    Source:
        The fields of PyTorch's ``torch._C._distributed_c10d._dump_nccl_trace``.

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> y = pc.psum(jnp.ones((2, 3)), pc.world()).block_until_ready()
        >>> last = pc.recorder.dump()["entries"][-1]
        >>> last["profiling_name"], last["input_sizes"], last["state"]
        ('pycollective:allreduce', [[2, 3]], 'completed')
    """
    records: dict[str, Any] = json.loads(watch.recorder_json(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, ""))
    return records
