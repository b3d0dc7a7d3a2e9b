"""Looks at this process before and after each step of the start of the package, and writes what it sees as JSON.

``python process_changes.py FILE STEPS``: the steps, between commas, in the order in which they are made. The file gets
the rank at its end. ``PROCESS_CHANGES`` is the beginning of the names of the files of process_changes.cc.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import json
import os
import re
import signal
import sys
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

OURS = "pycollective"

calls: list[str] = []
"""The calls of watched functions by this package."""


def watch_calls_of(owner: Any, name: str, what: Callable[..., str], *, by_all: bool = False) -> None:
    """Notes the calls of a function by this package, or by all."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def noting(*args: Any, **options: Any) -> Any:
        if by_all or str(sys._getframe(1).f_globals.get("__name__")).startswith(OURS):
            calls.append(what(*args))
        return function(*args, **options)

    setattr(owner, name, noting)


def is_ours(value: Any) -> bool:
    """Whether an object is a function of this package, or an instance of one of its classes."""
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, functools.partial):
        value = value.func
    if type(value).__name__ == "LoweringRuleEntry":  # of JAX's table
        value = value.rule
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):  # functools.wraps changes __module__
        return str(function.__globals__.get("__name__")).startswith(OURS)
    return not isinstance(value, type) and str(type(value).__module__).startswith(OURS)


def attributes_of_others() -> list[str]:
    """The attributes of modules, classes and objects of others, and entries of their tables, that are this package's.

    A table is looked through for keys that are others' objects: its entry for a primitive of this package changes
    nothing for others.
    """
    owners: dict[int, tuple[str, Any]] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in (OURS, "__main__") or not isinstance(module, types.ModuleType):
            continue
        owners[id(module)] = name, module
        for attribute, value in list(vars(module).items()):
            if isinstance(value, dict) or isinstance(getattr(value, "__dict__", None), Mapping):
                home = value.__module__ if isinstance(value, type) else name
                owners.setdefault(id(value), (f"{home}.{attribute}", value))
    found = set()
    for name, owner in owners.values():
        if is_ours(owner) or str(getattr(owner, "__module__", "")).startswith(OURS):
            continue
        for key, value in list(owner.items() if isinstance(owner, dict) else vars(owner).items()):
            if is_ours(value) and isinstance(key, str):
                found.add(f"{name}.{key}")
            elif is_ours(value) and id(key) in owners:
                found.add(f"{name}[{owners[id(key)][0]}]")
    return sorted(found)


def open_files() -> list[str]:
    """What this process has open, or in its memory, without the numbers that differ between processes."""
    listening = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "00010000":
            listening[fields[6]] = fields[-1]
    for net in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{net}").read_text().splitlines()[1:]:
            if line.split()[3] == "0A":
                listening[line.split()[9]] = net
    found = re.findall(r"/memfd:\S+", Path("/proc/self/maps").read_text())
    for file in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(file)
        except OSError:  # of the folder itself
            continue
        number = target.removeprefix("socket:[").rstrip("]")
        if number in listening:
            target = f"listens on {re.sub('-[0-9a-f]+$', '', listening[number])}"
        elif target.endswith(" (deleted)") and not target.startswith(("/memfd:", "/dev/shm/")):
            target = "temporary file"
        found.append(re.sub(r":\[\d+\]| \(deleted\)", "", target))
    return sorted(found)


def signals() -> dict[str, str]:
    """What the process does with each signal that has not its default, by number."""
    status = Path("/proc/self/status").read_text()
    found = {}
    for kind in ("SigCgt", "SigIgn"):
        mask = int(re.search(rf"{kind}:\t(\w+)", status)[1], 16)  # type: ignore[index]
        for number in range(1, signal.SIGRTMAX + 1):
            if mask >> (number - 1) & 1:
                handler = signal.getsignal(number) if number in signal.valid_signals() else None
                found[str(number)] = f"{kind} {getattr(handler, '__qualname__', 'in C')}"
    return found


def wakeup_descriptor() -> int:
    number = signal.set_wakeup_fd(-1)
    if number != -1:
        signal.set_wakeup_fd(number, warn_on_full_buffer=False)
    return number


def look() -> dict[str, Any]:
    """This process as it is now."""
    notes = Path(f"{os.environ['PROCESS_CHANGES']}{os.getpid()}")
    config = sys.modules["jax"].config.values if "jax" in sys.modules else {}
    tasks = list(Path("/proc/self/task").iterdir())
    python_threads = {str(thread.native_id) for thread in threading.enumerate()}
    return {
        "attributes": attributes_of_others(),
        "finders": [type(finder).__module__ for finder in sys.meta_path],
        "environ": dict(os.environ),
        "signals": signals(),
        "wakeup": wakeup_descriptor(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": sorted(task.name for task in tasks if task.name not in python_threads),
        "files": open_files(),
        "config": {name: repr(value) for name, value in config.items()},
        "calls": calls.copy(),
        "C": notes.read_text().splitlines() if notes.exists() else [],
        "limits": [sys.getswitchinterval(), sys.getrecursionlimit(), sorted(os.sched_getaffinity(0)), Path.cwd().name],
    }


def load_ipython() -> None:
    """A session of IPython, as far as this package looks at it."""
    events = types.SimpleNamespace(register=lambda *_: None)
    watch_calls_of(events, "register", "IPython {}".format)
    sys.modules["IPython"] = types.SimpleNamespace(  # type: ignore[assignment]
        get_ipython=lambda: types.SimpleNamespace(events=events)
    )


STEPS: dict[str, Callable[[], object]] = {
    "import": lambda: importlib.import_module(OURS),
    "IPython": load_ipython,
    "libraries": lambda: (importlib.import_module("jax").devices(), importlib.import_module("mpi4py.MPI")),
    "MPI": lambda: importlib.import_module(OURS).pmap,
    "init": lambda: importlib.import_module(OURS).init(),
}


def main() -> None:
    watch_calls_of(atexit, "register", lambda *_: "atexit")
    watch_calls_of(os, "register_at_fork", lambda *_: "os.register_at_fork")
    watch_calls_of(faulthandler, "register", lambda *_: "faulthandler.register")
    watch_calls_of(os, "putenv", lambda name, _: f"putenv {os.fsdecode(name)}", by_all=True)  # os.environ calls it
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # a launcher may have given this rank a core of its own
    looks = [look()]
    for step in sys.argv[2].split(","):
        STEPS[step]()
        looks.append(look())
    mpi: Any = sys.modules.get("mpi4py.MPI")
    Path(f"{sys.argv[1]}{mpi.COMM_WORLD.rank if mpi else 0}").write_text(json.dumps(looks))


if __name__ == "__main__":
    main()
