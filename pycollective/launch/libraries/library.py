"""What every MPI library answers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pycollective.launch.job import Job
from pycollective.launch.libraries import standard_abi

NETWORK_SETTINGS = ("UCX_TLS", "UCX_NET", "FI_PROVIDER", "FI_TCP_IFACE")
"""Settings of the network libraries under most MPI libraries: UCX and libfabric."""

_GPU_TRANSPORTS = {"cuda": ("cuda_copy", "cuda_ipc"), "rocm": ("rocm_copy", "rocm_ipc")}
"""The transports of UCX that the memory of GPUs needs. The platform's name stands for all of them."""


def lacks_for_gpus(platform: str, environ: Mapping[str, str]) -> str:
    """What a setting of the network library leaves out that the memory of GPUs needs, for messages; "" for nothing.

    Example:
        >>> lacks_for_gpus("cuda", {"UCX_TLS": "rc,sm,cuda_copy"})
        'UCX_TLS lacks cuda_ipc'
        >>> lacks_for_gpus("rocm", {"UCX_TLS": "^rocm,tcp"})
        'UCX_TLS lacks rocm_copy, rocm_ipc'
        >>> lacks_for_gpus("cuda", {"UCX_TLS": "rc,sm,cuda"}), lacks_for_gpus("cuda", {}), lacks_for_gpus("cpu", {})
        ('', '', '')
    """
    setting = environ.get("UCX_TLS", "all")
    named = {name.strip().lstrip("\\") for name in setting.removeprefix("^").split(",")}
    is_left_out = setting.startswith("^")
    meanings = {platform} if is_left_out else {platform, "all"}
    missing = [name for name in _GPU_TRANSPORTS.get(platform, ()) if named.isdisjoint({name, *meanings}) != is_left_out]
    return f"UCX_TLS lacks {', '.join(missing)}" if missing else ""


class Ulfm(NamedTuple):
    """How ranks live on when one has failed: User-Level Failure Mitigation, of MPI 5.0.

    Attributes:
        major: the first major version of the library that has it.
        options: the options of its mpiexec that switch it on.
        attribute: the attribute of MPI_COMM_WORLD that says whether it is on; mpi4py does not name it.
    """

    major: int
    options: tuple[str, ...]
    attribute: int


@dataclass(frozen=True)
class Library(ABC):
    """An MPI library that was found, or an mpiexec of one.

    A new library is a subclass in a file of its own, and an entry in ``find_mpi.LIBRARIES``.

    Attributes:
        version: its version number.
        path: its file.
        abi: the version of MPI's standard ABI by which it was loaded (:mod:`standard_abi`); "" by its own interface.
        family: the library's name, which its later versions keep.
        patterns: how the library and its mpiexec name themselves; the group is the version.
        mpiexec_names: the names that its mpiexec may have.
        pmi: the process management interface by which its ranks find each other under ``srun --mpi=...``.
        remote_shell_variables: the variables that name a program which its mpiexec calls instead of ssh.
        takes_unequal_hosts: whether its mpiexec takes another number of ranks for each host.
        lost_host: a regular expression of what its mpiexec prints on its standard error when a host has gone away, if
            it may end with status 0 then; else "".
        job_failure: regular expressions of what such an mpiexec prints before it ends the ranks of a job; it may wait
            for ever then.
        keepalive_variables: the variables by which its mpiexec notices within a minute that it cannot reach a host any
            more.
        ulfm: how the other ranks can live on when one has died; None: they cannot.
        setting_prefixes: how the names of variables begin by which a user chooses how its messages travel.
        device_pattern: a regular expression of what the library says about its device for messages; the group is the
            device. "" where it says nothing.
        shared_file_prefixes: how the names of its files in /dev/shm begin, which stay there when its ranks are killed.
    """

    version: str
    path: str
    abi: str = ""
    family: ClassVar[str]
    patterns: ClassVar[tuple[str, ...]]
    mpiexec_names: ClassVar[tuple[str, ...]]
    pmi: ClassVar[str]
    remote_shell_variables: ClassVar[tuple[str, ...]] = ()
    takes_unequal_hosts: ClassVar[bool] = True
    lost_host: ClassVar[str] = ""
    job_failure: ClassVar[tuple[str, ...]] = ()
    keepalive_variables: ClassVar[Mapping[str, str]] = {}
    ulfm: ClassVar[Ulfm | None] = None
    setting_prefixes: ClassVar[tuple[str, ...]] = NETWORK_SETTINGS
    device_pattern: ClassVar[str] = ""
    shared_file_prefixes: ClassVar[tuple[str, ...]] = ()

    @property
    def can_lose_ranks(self) -> bool:
        """Whether its mpiexec can let the other ranks live on when one has died.

        Not by the standard ABI: its attributes have numbers of their own, and none for :class:`Ulfm`.
        """
        return self.ulfm is not None and self.major >= self.ulfm.major and not self.abi

    @property
    def name(self) -> str:
        return f"{self.family} {self.version}"

    @property
    def description(self) -> str:
        """Its name, and how it was loaded."""
        return f"{self.name} {standard_abi.describe(self.abi)}".rstrip()

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])

    @classmethod
    def version_in(cls, text: str) -> str | None:
        """The version, if ``text`` is what this library or its mpiexec says about itself."""
        found = (re.search(pattern, text) for pattern in cls.patterns)
        return next((match[1] for match in found if match), None)

    @classmethod
    def device_in(cls, text: str) -> str:
        """The device that the library names in ``text``, what it says about itself; "" if it names none."""
        found = re.search(cls.device_pattern, text) if cls.device_pattern else None
        return found[1].strip() if found else ""

    @classmethod
    def variables_to_start(cls, environ: Mapping[str, str]) -> Mapping[str, str]:
        """The variables that a rank needs while this library starts in it, if it is this library."""
        return {}

    @classmethod
    def session_folder(cls, launcher: int) -> str:
        """The name of a directory that its mpiexec leaves among temporary files when it is killed; "" if it has none.

        Args:
            launcher: the process number of the mpiexec.
        """
        return ""

    def can_start(self, library: Library) -> bool:
        """Whether this mpiexec can start programs of ``library``."""
        return type(self) is type(library)

    def command_line(self, job: Job) -> list[str]:
        """The command line that starts ``job`` by this mpiexec.

        Raises:
            ValueError: this mpiexec cannot start such a job.
        """
        return [self.path, "-n", str(job.ranks), *self.options(job), *job.command]

    @abstractmethod
    def options(self, job: Job) -> list[str]:
        """The options of this mpiexec for ``job``. They switch binding off: ``rank_wrapper`` binds the ranks."""
