"""Training that continues without failed ranks, where the MPI library supports that; elsewhere the job is restarted."""

from pycollective.elastic.loop import run
from pycollective.elastic.state import State

__all__ = ["State", "run"]
