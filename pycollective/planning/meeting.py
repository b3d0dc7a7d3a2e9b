"""Ranks wait for each other before and after what is timed."""

from __future__ import annotations

import os

from pycollective.transport.mpi import MPI


def meet(ranks: MPI.Intracomm) -> None:
    """Waits until all ranks are here. All ranks must make this call.

    MPI's own barrier polls. Where ranks share a core, it takes that core from those that still do what is timed. This
    one gives the core away.

    Args:
        ranks: the ranks.
    """
    all_are_here = ranks.Ibarrier().Test
    while not all_are_here():
        os.sched_yield()
