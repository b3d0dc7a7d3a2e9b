"""What every batch system answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class BatchSystem:
    """A batch system gives a job its hosts, its allocation. Launchers find these hosts and reach them without ssh.

    The answers of this class are those where nothing more is known: ``run`` leaves the hosts to the mpiexec.

    Attributes:
        job_variable: a variable that is set inside an allocation.
        how_to_get_more: what a user does to start more ranks.
        overlap_variables: the variables by which a job starts although one that has lost a host has not quite ended.
    """

    job_variable: ClassVar[str]
    how_to_get_more: ClassVar[str] = "ask for more"
    overlap_variables: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def capacity(cls, environ: Mapping[str, str]) -> list[int]:
        """How many ranks each host of the allocation can take; empty where that is unknown."""
        return []

    @classmethod
    def tasks(cls, environ: Mapping[str, str]) -> list[int]:
        """How many tasks the user has asked for on each host of the allocation; empty where that is unknown."""
        return []

    @classmethod
    def host_names(cls, environ: Mapping[str, str]) -> list[str]:
        """The names of the hosts, in the order of :meth:`capacity`."""
        return []

    @classmethod
    def launcher_variables(cls, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables that the launcher needs in addition to ``environ``."""
        return {}

    @classmethod
    def check(cls, environ: Mapping[str, str], *, names_hosts: bool) -> None:
        """Refuses an allocation on which ranks cannot be started.

        Args:
            environ: the variables of this process.
            names_hosts: whether the user has named hosts.

        Raises:
            ValueError: ranks cannot be started on this allocation.
        """
