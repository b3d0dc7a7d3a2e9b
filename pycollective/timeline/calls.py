"""The calls of one rank in a trace, in the form in which the rank sends them to rank 0."""

from __future__ import annotations

import json
import socket
from typing import Any, NamedTuple

import numpy as np

from pycollective.timeline.clocks import Array, Reading
from pycollective.transport import watch
from pycollective.transport.mpi import MPI

_TIMES = ("created", "started", "completed")
_OF_ONE_CALL = {"id", "seq", *_TIMES}
"""The words of a record that differ between calls of one kind."""


class Part(NamedTuple):
    """The data of one rank that rank 0 receives.

    Attributes:
        rank: the rank in MPI_COMM_WORLD.
        host: the name of the host.
        kinds: one record for each kind of call, as the recorder writes it: operation, shape, line, group, ...
        kind: the kind of each call, an index of ``kinds``.
        seq: the number of each call among the calls of its channel.
        times: the times created, started and completed of each call, [calls, 3], in nanoseconds of this rank's clock.
        groups: the groups of ranks, by their ids.
        dropped: the number of calls that the trace did not keep.
        begin: the reading of the clock before the trace.
        end: the reading of the clock after the trace.
        span: the times when the trace began and ended, by this rank's clock.
    """

    rank: int
    host: str
    kinds: list[dict[str, Any]]
    kind: Array
    seq: Array
    times: Array
    groups: dict[str, dict[str, Any]]
    dropped: int
    begin: Reading
    end: Reading
    span: tuple[int, int]


def part_of_this_rank(records: bytes, dropped: int, begin: Reading, end: Reading, span: tuple[int, int]) -> Part:
    """Makes this rank's part.

    Args:
        records: the words of the records (``watch.stop_trace``).
        dropped: the number of calls that the trace did not keep.
        begin: the reading of the clock before the trace.
        end: the reading of the clock after the trace.
        span: the times when the trace began and ended, by this rank's clock.
    """
    words = watch.record_words()
    table = np.frombuffer(records, np.int64).reshape(-1, len(words))
    of_kind = np.where([word in _OF_ONE_CALL for word in words], 0, table)
    unique, kind = np.unique(of_kind, axis=0, return_inverse=True)
    kinds = [json.loads(watch.record_json(row.tobytes())) for row in unique]
    groups = {entry["pg_id"]: json.loads(watch.group_json(int(entry["pg_id"]))) for entry in kinds}
    return Part(
        rank=MPI.COMM_WORLD.rank,
        host=socket.gethostname(),
        kinds=kinds,
        kind=kind.reshape(-1),
        seq=table[:, words.index("seq")],
        times=table[:, [words.index(word) for word in _TIMES]],
        groups={name: group for name, group in groups.items() if group is not None},
        dropped=dropped,
        begin=begin,
        end=end,
        span=span,
    )
