"""The ranks for which a rank waits in a collective, and how long: from its own arrival to the last of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WAIT_FOR_ALL = frozenset(["allreduce", "allgather", "alltoall", "reduce_scatter", "barrier"])
"""The synchronizing collectives: no rank leaves one before all ranks have entered it."""


def awaited(operation: str, place: int, root: int, size: int) -> Sequence[int]:
    """The ranks without which a rank cannot end its call; none for other operations than the collectives here.

    Args:
        operation: its name (native/base/operations.h).
        place: a rank of the group.
        root: the root of the operation; -1: it has none.
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
    """The time that a rank waited in a call, and the last rank to arrive of those that it waited for.

    Args:
        operation: its name.
        rank: the rank that waits, one of ``spans``.
        root: the root, as a place among ``ranks``; -1: none.
        ranks: the ranks of the group, by their places.
        spans: when each rank came to the call, and when it left; ranks whose call is not in the trace are missing.

    Returns:
        The time, in the unit of ``spans``, and the rank; (0, rank) if it waited for nobody.

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
