"""What every launcher answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from pycollective.launch.job import Job
from pycollective.launch.libraries.library import Library


class Place(NamedTuple):
    """A rank's place among the ranks of its host.

    Attributes:
        rank: the rank's number on its host, from 0.
        size: the number of ranks on its host.
    """

    rank: int
    size: int


class Launcher:
    """A launcher starts ranks. Each of them finds in its environment variables what the launcher says about it.

    A new launcher is a subclass in a file of its own, and an entry in ``started_by.LAUNCHERS``.

    Attributes:
        name: the launcher in a message.
        size_variable: the variable that holds the number of ranks.
        rank_variable: the variable that holds the number of a rank.
        rank_variables: the variables that differ between any two ranks, of one job or of two jobs.
        place_variables: the variables that hold a rank's number on its host and the number of ranks there, if any.
        starts_launchers: whether its tasks may be shells, or parts of another launcher, instead of ranks.
        remedy: what to do when MPI sees one rank where the launcher has started several.
    """

    name: ClassVar[str]
    size_variable: ClassVar[str]
    rank_variable: ClassVar[str]
    rank_variables: ClassVar[tuple[str, ...]]
    place_variables: ClassVar[tuple[str, str] | None] = None
    starts_launchers: ClassVar[bool] = False
    remedy: ClassVar[str]

    @classmethod
    def size(cls, environ: Mapping[str, str]) -> int | None:
        """The number of ranks that this launcher has started for this program; None if it has started none."""
        return _number(environ, cls.size_variable)

    @classmethod
    def place(cls, environ: Mapping[str, str]) -> Place | None:
        """This rank's place on its host; None where this launcher does not say it."""
        if cls.place_variables is None:
            return None
        rank, size = (_number(environ, name) for name in cls.place_variables)
        return None if rank is None or size is None else Place(rank, size)

    @classmethod
    def names_lost_ranks(cls, hosts: int) -> bool:
        """Whether it says which rank has died, and never another one, in a job on so many hosts."""
        return True

    @classmethod
    def gives_gpus(cls, environ: Mapping[str, str]) -> bool:
        """Whether this launcher shows each rank only the GPUs that belong to it."""
        return False


class BatchLauncher(Launcher):
    """The launcher of a batch system. It starts ranks of any MPI library, on the hosts of an allocation.

    Attributes:
        option: its name after ``pycollective run --mpi``.
    """

    option: ClassVar[str]

    @classmethod
    @abstractmethod
    def command_line(cls, job: Job, library: Library, environ: Mapping[str, str]) -> list[str]:
        """The command line that starts ``job``, a program of ``library``.

        Raises:
            ValueError: this launcher cannot start such a job.
        """

    @classmethod
    @abstractmethod
    def can_start(cls, library: Library, environ: Mapping[str, str]) -> bool:
        """Whether this launcher can start programs of ``library`` here. ``run`` asks where no mpiexec is found."""

    @classmethod
    @abstractmethod
    def must_start(cls, library: Library, environ: Mapping[str, str]) -> bool:
        """Whether an mpiexec would not give the ranks what they were allocated, so that only this launcher may start.

        Raises:
            ValueError: this launcher must start them, but it cannot start programs of ``library``.
        """


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None
