"""The start of a rank: it waits until all ranks call ``init``. If some do not, one rank names them and ends all."""

from __future__ import annotations

import time

from pycollective.faults import rank_exit
from pycollective.transport.mpi import MPI

__all__ = ["wait_for_all"]

_TAG = 4713
"""The tag of the messages of a roll call. The job ends after a roll call, so these disturb no other messages."""


def wait_for_all(ranks: MPI.Intracomm, limit_s: float | None) -> None:
    """Waits until every rank has made this call. Prints a notice if that takes long; ends all ranks after ``limit_s``.

    Rank 0 ends all ranks. If rank 0 has not made the call itself, rank 1 ends them a moment later, and so on.

    Args:
        ranks: the ranks, which must all make this call.
        limit_s: the seconds; None for no limit.
    """
    have_come = ranks.Ibarrier().Test
    remedy = "look for a rank that does not call init: it may have raised, or ended, before that."
    notice = f"{rank_exit.describe_rank()} has started and waits for the other ranks to start. If they do not, {remedy}"
    late_s = rank_exit.GRACE_S * min(ranks.rank, 2)

    def is_over() -> bool:
        _answer(ranks)
        return have_come()

    notice_s = rank_exit.NOTICE_S if ranks.rank == 0 else None  # one rank is enough
    for waited in rank_exit.poll_until(is_over, 0.05, notice_s, notice):
        if limit_s is not None and waited > limit_s + late_s:
            absent = ", ".join(map(str, _absent(ranks)))
            rank_exit.end_all_after_timeout(
                "init",
                f"the other ranks to start within {limit_s:g} s",
                f"no start of rank {absent or 'some'} after {waited:.1f} s",
                remedy.capitalize(),
            )


def _answer(ranks: MPI.Intracomm) -> None:
    """Answers the roll call of another rank, if there is one."""
    question = ranks.improbe(MPI.ANY_SOURCE, _TAG)
    if question is not None:
        source = question.recv()
        ranks.isend(ranks.rank, source, _TAG + 1)


def _absent(ranks: MPI.Intracomm) -> list[int]:
    """The ranks that do not answer a roll call."""
    answers = {rank: ranks.irecv(source=rank, tag=_TAG + 1) for rank in range(ranks.size) if rank != ranks.rank}
    questions = [ranks.isend(ranks.rank, rank, _TAG) for rank in answers]
    deadline = time.monotonic() + rank_exit.GRACE_S / 2
    while answers and time.monotonic() < deadline:
        answers = {rank: answer for rank, answer in answers.items() if not answer.test()[0]}
        MPI.Request.Testall(questions)
        time.sleep(0.01)
    return sorted(answers)
