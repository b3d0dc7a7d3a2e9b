"""The import of ``mpi4py.MPI``, which starts MPI: in a rank it is watched, and in a child of a rank it starts nothing.

MPI starts when all ranks start it, and waits for them without a word: a rank may have ended before. The native library
watches that wait (``native/monitor/start_watch.h``), since the import holds the interpreter's lock.
``import pycollective`` installs this, so it concerns each later import of ``mpi4py.MPI``, that of the program
for example. It needs neither MPI nor JAX.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from pycollective.config import DEFAULT_TIMEOUT_S, config
from pycollective.environment import NATIVE_LIBRARY
from pycollective.launch.child_processes import parent_rank, refuse_child
from pycollective.launch.started_by import is_rank, place_in_job, rank_variables
from pycollective.transport import native_library

__all__ = ["install", "watched", "within"]

_MODULE = "mpi4py.MPI"


class _State:
    """The seconds that this rank waits for the others, if :func:`within` has set them."""

    limit_s: float | None = None


@contextmanager
def within(limit_s: float | None) -> Iterator[None]:
    """Sets the seconds that a start of MPI inside may take; None for ``PYCOLLECTIVE_TIMEOUT``."""
    _State.limit_s = limit_s
    try:
        yield
    finally:
        _State.limit_s = None


@contextmanager
def watched() -> Iterator[None]:
    """Watches a start of MPI inside, if a launcher has started several ranks. It ends this process if it takes long."""
    place = place_in_job(os.environ)
    if place is None or place.size == 1 or not NATIVE_LIBRARY.exists():  # init says what to do about no library
        yield
        return
    limit_s = _State.limit_s or config.timeout or DEFAULT_TIMEOUT_S
    library = native_library.load(NATIVE_LIBRARY)
    library.pycollective_start_watch_begin(
        place.rank,
        place.size,
        place.local_size,
        place.rank_variable.encode(),
        " ".join(rank_variables(os.environ)).encode(),
        0.0 if math.isinf(limit_s) else limit_s,
    )
    try:
        yield
    finally:
        library.pycollective_start_watch_end()


def install() -> None:
    """Lets later imports of ``mpi4py.MPI`` go through this module, if a launcher has started this process.

    A program that has imported it before does so in its spawned workers as well, which import its main module. So these
    import this package first.
    """
    if not is_rank(os.environ):
        return
    if _MODULE in sys.modules:
        spawn: Any = importlib.import_module("multiprocessing.spawn")
        spawn.get_command_line = _importing_this_first(spawn.get_command_line)
    else:
        sys.meta_path.insert(0, _Finder())


def _importing_this_first(command_line: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Changes multiprocessing's function for a spawned worker's command: its program imports this package first."""
    folder = str(Path(__file__).parents[2])
    first = f"import sys; sys.path.append({folder!r}); import pycollective; "  # spawn_main sets sys.path later

    def changed(**options: Any) -> list[str]:
        command = command_line(**options)
        return [first + word if before == "-c" else word for before, word in zip(["", *command], command, strict=False)]

    return changed


class _Finder(MetaPathFinder):
    """Finds ``mpi4py.MPI`` where the other finders do, and gives it another loader."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Loads the module by another loader, which the module names afterwards."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        if parent_rank() is None:
            with watched():
                self._loader.exec_module(module)
            return
        settings = sys.modules["mpi4py"].rc
        settings.initialize = settings.finalize = False
        self._loader.exec_module(module)
        _refuse_communicators(module)


def _refuse_communicators(mpi: Any) -> None:
    """Lets a child's use of MPI's two communicators raise. MPI would end the child, and a pool starts the next one."""

    class Refused(mpi.Intracomm):  # type: ignore[misc]
        """Stands for a communicator in a child of a rank."""

        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("__"):
                refuse_child(f"mpi4py.MPI.Comm.{name}")
            return super().__getattribute__(name)

    mpi.COMM_WORLD, mpi.COMM_SELF = Refused(), Refused()
