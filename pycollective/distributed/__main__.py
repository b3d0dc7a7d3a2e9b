"""``python -m pycollective.distributed PROGRAM`` runs a Python program as it is, on each rank.

Where the program calls ``jax.distributed.initialize()`` and leaves to JAX which process this is,
:func:`pycollective.distributed.initialize` answers. Everything else is the program's own. It is given as to Python: a
file, ``-m MODULE`` or ``-c COMMAND``, and its arguments.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
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
            given = inspect.signature(jax_initialize).bind(*args, **options).arguments
            named = {name: value for name, value in given.items() if name not in _COORDINATES or value is not None}
            if _COORDINATES & named.keys():
                jax_initialize(*args, **options)
            else:
                pycollective.distributed.initialize(**named)

        initialize.__doc__ = jax_initialize.__doc__
        module.initialize = initialize  # type: ignore[attr-defined]


def main(arguments: Sequence[str]) -> None:
    """Becomes the program of these arguments."""
    if not arguments or (arguments[0] in ("-m", "-c") and len(arguments) < 2):
        expected = "a Python program: FILE, -m MODULE or -c COMMAND, and its arguments"
        sys.exit(message("distributed", expected, " ".join(arguments) or "none", "Name it."))
    sys.meta_path.insert(0, _Finder())
    rank_exit.end_all_on_error()  # other ranks may wait in initialize for one that has raised before it
    sys.argv, sys.path[0] = list(arguments), ""
    if arguments[0] == "-m":
        spec, code = _module(arguments[1])
        sys.argv = [spec.origin or arguments[1], *arguments[2:]]
        _become(code, __file__=spec.origin, __spec__=spec, __package__=spec.parent, __loader__=spec.loader)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        _become(compile(arguments[1], "<string>", "exec"))
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        with io.open_code(arguments[0]) as file:
            code = compile(file.read(), arguments[0], "exec")
        _become(code, __file__=arguments[0])


def _module(name: str) -> tuple[ModuleSpec, CodeType]:
    """A module that runs as a program, as Python finds it, and its code."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        sys.exit(message("distributed", "a module that runs as a program", name, "Check its name."))
    return spec, code


def _become(code: CodeType, **attributes: Any) -> None:
    """Runs code as the module ``__main__``, which stays: exit handlers and threads of the program use it later."""
    main_module = ModuleType("__main__")
    vars(main_module).update(attributes)
    sys.modules["__main__"] = main_module
    exec(code, vars(main_module))


if __name__ == "__main__":
    main(sys.argv[1:])
