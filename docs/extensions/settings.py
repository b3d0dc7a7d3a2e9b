"""The directive ``settings``: an entry for each environment variable that ``pycollective.config`` reads."""

from __future__ import annotations

import inspect
import re
from typing import Any

from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from pycollective.config import Config

_VARIABLE = re.compile(r"\(``(PYCOLLECTIVE_[A-Z_]+)(?:=([^`]*))?``, default ([^)]*)\)")


def entries(docstring: str) -> list[tuple[str, str, str, str]]:
    """Variable, values, default and meaning of each attribute in the docstring of ``Config``.

    Raises:
        ValueError: an attribute does not name its variable.
    """
    section = inspect.cleandoc(docstring).split("Attributes:\n", 1)[1]
    found = []
    for entry in re.split(r"\n(?= {4}\w+: )", section):
        name, _, text = " ".join(entry.split()).partition(": ")
        variable = _VARIABLE.search(text)
        if variable is None:
            raise ValueError(
                f"Config.{name}: expected (``PYCOLLECTIVE_...``, default ...) in its description, got {text!r}"
            )
        meaning = (text[: variable.start()].rstrip() + text[variable.end() :]).strip()
        found.append((variable[1], variable[2] or "", variable[3], meaning))
    if len(found) != len(Config.__dataclass_fields__):
        raise ValueError(f"Config has {len(Config.__dataclass_fields__)} settings, its docstring {len(found)}")
    return found


class Settings(SphinxDirective):
    """Lists the variables."""

    def run(self) -> list[Any]:
        lines = []
        for variable, values, default, meaning in entries(Config.__doc__ or ""):
            said = [f"Values: ``{values.replace('|', '``, ``')}``."] if values else []
            body = [meaning[0].upper() + meaning[1:], "", *said, f"Default: {default}."]
            lines += [f".. envvar:: {variable}", "", *(f"   {line}".rstrip() for line in body), ""]
        return self.parse_text_to_nodes(StringList(lines, Config.__qualname__))


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("settings", Settings)
    return {"parallel_read_safe": True}
