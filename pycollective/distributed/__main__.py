"""``python -m pycollective.distributed PROGRAM`` runs a Python program as it is, on each rank.

Where the program calls ``jax.distributed.initialize()`` and leaves to JAX which process this is,
:func:`pycollective.distributed.initialize` answers. Everything else is the program's own. It is given as to Python: a
file, ``-m MODULE`` or ``-c COMMAND``, and its arguments.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pycollective.distributed
from pycollective.errors import message
from pycollective.faults import rank_exit

_MODULE = "jax.distributed"

_COORDINATES = frozenset(["coordinator_address", "num_processes", "process_id", "cluster_detection_method"])
"""The options by which a program says itself which process this is."""


class _Finder(MetaPathFinder):
    """Finds ``jax.distributed``, once, and loads it with our ``initialize``.

    The program shall be the first to import JAX: it may set variables before, which JAX reads when it is imported.
    """

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads the module as ``loader`` does, then replaces ``initialize``."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        jax_initialize = module.initialize

        def initialize(*args: Any, **options: Any) -> None:
            if args or _COORDINATES & options.keys():
                jax_initialize(*args, **options)
            else:
                pycollective.distributed.initialize(**options)

        initialize.__doc__ = jax_initialize.__doc__
        module.initialize = initialize  # type: ignore[attr-defined]


def main(arguments: Sequence[str]) -> None:
    """Becomes the program of these arguments."""
    if not arguments or (arguments[0] in ("-m", "-c") and len(arguments) < 2):
        expected = "a Python program: FILE, -m MODULE or -c COMMAND, and its arguments"
        sys.exit(message("distributed", expected, " ".join(arguments) or "none", "Name it."))
    sys.meta_path.insert(0, _Finder())
    rank_exit.end_all_on_error()  # other ranks may wait in initialize for one that has raised before it
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path[0] = ""
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[0] = ""
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = list(arguments)
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
