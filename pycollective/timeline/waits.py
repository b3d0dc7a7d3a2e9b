"""The time that a rank waits in a collective: from its own arrival to the last arrival of the ranks that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WAIT_FOR_ALL = frozenset(["allreduce", "allgather", "alltoall", "ragged_alltoall", "reduce_scatter", "barrier"])
"""The synchronizing collectives: no rank leaves one before all ranks have entered it."""


def awaited(operation: str, place: int, root: int, size: int) -> Sequence[int]:
    """Returns the ranks that must enter a call before a rank can end it; none for operations without this property.

    Args:
        operation: the name of the operation (native/base/operations.h).
        place: the rank in the group.
        root: the root of the operation; -1 if it has none.
        size: the number of ranks in the group.

    Example:
        >>> awaited("allreduce", 1, -1, 3), awaited("bcast", 1, 0, 3), awaited("bcast", 0, 0, 3)
        (range(0, 3), [0], [])
    """
    if operation in WAIT_FOR_ALL or (operation in ("reduce", "gather") and place == root):
        return range(size)
    if operation in ("bcast", "scatter") and place != root:
        return [root]
    return []


def wait_of(
    operation: str, rank: int, root: int, ranks: Sequence[int], spans: Mapping[int, tuple[int, int]]
) -> tuple[int, int]:
    """Returns the time that a rank waited in a call, and the last rank to arrive of the ranks that it needs.

    Args:
        operation: the name of the operation.
        rank: the rank that waits, one of ``spans``.
        root: the root, as an index of ``ranks``; -1 if there is none.
        ranks: the ranks of the group, in its order.
        spans: for each rank the times when it entered and left the call. Ranks whose call is not in the trace are
            missing.

    Returns:
        The time, in the unit of ``spans``, and the last rank; (0, rank) if it did not wait.

    Example:
        >>> wait_of("allreduce", 0, -1, [0, 1], {0: (10, 35), 1: (30, 36)})
        (20, 1)
        >>> wait_of("allreduce", 1, -1, [0, 1], {0: (10, 35), 1: (30, 36)})
        (0, 1)
    """
    came, left = spans[rank]
    others = [ranks[place] for place in awaited(operation, ranks.index(rank), root, len(ranks))]
    last = max((other for other in others if other in spans), key=lambda other: spans[other][0], default=rank)
    waited = min(spans[last][0], left) - came
    return (waited, last) if waited > 0 else (0, rank)
