"""What the pages refer to, and whether they show all that there is.

- A name of this package is a link to where the package offers it, wherever its file lies.
- A name of another project is plain text where no inventory of that project is at hand. It must exist: it is looked up.
- Every public name is in the reference.
"""

from __future__ import annotations

import functools
import operator
import pydoc
import sys
from types import ModuleType
from typing import Any

from sphinx.util import logging

import pycollective

_log = logging.getLogger(__name__)


def resolve(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Finds what Sphinx did not; None leaves it to be a warning, which is an error in scripts/docs."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    first, _, last = target.rpartition(".")
    if first.startswith("pycollective") and last in pycollective.__all__ and target != f"pycollective.{last}":
        domain = env.get_domain("py")
        return domain.resolve_xref(
            env, node["refdoc"], app.builder, node["reftype"], f"pycollective.{last}", node, contnode
        )
    return contnode if pydoc.locate(target) is not None or any(_has(file, target) for file in _files()) else None


def _has(file: ModuleType, name: str) -> bool:
    try:
        operator.attrgetter(name)(file)
    except AttributeError:
        return False
    return True


@functools.cache
def _files() -> list[ModuleType]:
    """The modules that define the public functions: their signatures use names of theirs, such as ``MPI.Intracomm``."""
    return [sys.modules[operator.attrgetter(name)(pycollective).__module__] for name in _names()]


def _names() -> list[str]:
    """The public names: those of the package, with those of a public module in its place."""
    members = {name: getattr(pycollective, name) for name in pycollective.__all__}
    modules = {name: member.__all__ for name, member in members.items() if isinstance(member, ModuleType)}
    inner = [f"{name}.{part}" for name, parts in modules.items() for part in parts]
    return [*(name for name in members if name not in modules), *inner]


def check_complete(app: Any, env: Any) -> None:  # noqa: ARG001
    """Warns of public names that no page documents."""
    documented = env.get_domain("py").objects
    comm = pycollective.world()
    expected = {f"pycollective.{name}" for name in _names()}
    expected |= {f"pycollective.Communicator.{name}" for name in dir(comm) if not name.startswith("_")}
    for name in sorted(expected - set(documented)):
        _log.warning("%s is public, and no page of docs/reference documents it", name)


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("missing-reference", resolve, priority=900)  # intersphinx: 500
    app.connect("env-check-consistency", check_complete)
    return {"parallel_read_safe": True}
