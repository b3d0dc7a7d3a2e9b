"""Ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def results_of(size: int, call: Callable[[int], T]) -> list[T]:
    """What ``call(rank)`` returns on each rank. Each rank runs in a thread."""
    results: dict[int, T] = {}

    def of_rank(rank: int) -> None:
        results[rank] = call(rank)

    threads = [threading.Thread(target=of_rank, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == size, "ranks wait for ever, or have raised"
    return [results[rank] for rank in range(size)]
