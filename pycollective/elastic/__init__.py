"""Training that goes on without the ranks that fail, where MPI can; else a new start of the job does it."""

from pycollective.elastic.loop import run
from pycollective.elastic.state import State

__all__ = ["State", "run"]
