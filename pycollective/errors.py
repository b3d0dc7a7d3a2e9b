"""The form of every message: what was expected, what came, on which rank, and what to do."""

from __future__ import annotations

from typing import Any

FROM_A_CLONE = "pip install '.[mpich]' in a clone of the repository"
"""How to get an MPI library together with this package, which is on no package index."""


def message(
    where: str, expected: Any, got: Any, remedy: str, *, rank: int | None = None, size: int | None = None
) -> str:
    """Formats ``pycollective.<where>: expected <expected>, got <got> (rank r of n). <remedy>``.

    Example:
        >>> message("psum", "a Communicator", "3", "Pass pycollective.world().", rank=0, size=2)
        'pycollective.psum: expected a Communicator, got 3 (rank 0 of 2). Pass pycollective.world().'
    """
    place = f" (rank {rank} of {size})" if rank is not None else ""
    return f"pycollective.{where}: expected {expected}, got {got}{place}. {remedy}"
