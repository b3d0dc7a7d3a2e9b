"""How docstrings and signatures become pages.

Docstrings have sections ``Shape``, ``Dtypes``, ``Differentiation``, ``Order`` and ``Source``, or lines that begin with
these words. They become fields: Sphinx then sets them beside Parameters, Returns and Raises, which napoleon makes from
the other sections.

Signatures show types as the source writes them (``PyTree``, not what it stands for), without the overloads that are for
type checkers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import stringify_signature

import pycollective

_NAMES = ("Shape", "Dtypes", "Differentiation", "Order", "Source")
_FIELD = re.compile(rf"(?:^|(?<=[.;)] ))({'|'.join(_NAMES)})( \([^:]*(?::func:`[^`]*`[^:]*)?\))?: ")


def paragraphs(lines: list[str]) -> Iterator[list[str]]:
    """Cuts lines at empty ones and where the indentation begins or ends; each empty line comes alone."""
    last: list[str] = []
    for line in lines:
        if last and (not line or not last[-1] or line.startswith(" ") != last[-1].startswith(" ")):
            yield last
            last = []
        last.append(line)
    if last:
        yield last


def fields(text: str) -> list[str]:
    """What a paragraph says before its first field, and each field.

    Example:
        >>> fields("Sums. Differentiation: itself. Order: as written. Source: MPI.")
        ['Sums.', '', ':Differentiation: Itself.', ':Order: As written.', ':Source: MPI.', '']
    """
    found = list(_FIELD.finditer(text))
    if not found:
        return [text]
    before = text[: found[0].start()].strip()
    ends = [match.start() for match in found[1:]] + [len(text)]
    made = []
    for match, end in zip(found, ends, strict=True):
        body = text[match.end() : end].strip()
        if match[2]:  # "Differentiation (beyond JAX): its mean."
            body = f"{match[2][2:-1]}: {body}"
        made.append(f":{match[1]}: {body[0].upper()}{body[1:]}")
    return [*([before, ""] if before else []), *made, ""]


def sections(lines: list[str]) -> list[str]:
    """Makes one line of each section of this file's names: its name and its text.

    Example:
        >>> sections(["Sums.", "", "Order:", "    As written,", "    on all ranks.", "", "Example:", "    >>> 1"])
        ['Sums.', '', 'Order: As written, on all ranks.', '', 'Example:', '    >>> 1']
    """
    made: list[str] = []
    is_inside = False
    for line in lines:
        if line.startswith(" ") and is_inside:
            made[-1] += f" {line.strip()}"
        else:
            made.append(line)
            is_inside = line.removesuffix(":") in _NAMES and line.endswith(":")
    return made


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:  # noqa: ARG001
    """Rewrites a docstring before napoleon sees it."""
    made: list[str] = []
    for paragraph in paragraphs(sections(lines)):
        is_prose = bool(paragraph[0]) and not paragraph[0].startswith(" ")
        text = " ".join(paragraph) if is_prose else ""
        made += fields(text) if _FIELD.search(text) else paragraph
    lines[:] = made


def as_written(
    app: Any,  # noqa: ARG001
    what: str,
    name: str,  # noqa: ARG001
    obj: Any,
    options: Any,  # noqa: ARG001
    args: str | None,  # noqa: ARG001
    returns: str | None,  # noqa: ARG001
) -> tuple[str, str] | None:
    """The signature of a function, its annotations not evaluated."""
    if not inspect.isfunction(obj):
        return None
    signature = inspect.signature(obj)
    if what == "method":
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    arguments, _, result = stringify_signature(signature).rpartition(" -> ")
    return arguments, result


def forget_overloads(app: Any) -> None:  # noqa: ARG001
    """Empties what autodoc would find of overloads of public functions."""
    for name in pycollective.__all__:
        offered = getattr(pycollective, name)
        if inspect.isfunction(offered):
            analyzer = ModuleAnalyzer.for_module(offered.__module__)
            analyzer.analyze()
            analyzer.overloads.pop(name, None)


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("builder-inited", forget_overloads)
    app.connect("autodoc-process-signature", as_written)
    app.connect("autodoc-process-docstring", process, priority=400)  # napoleon: 500
    return {"parallel_read_safe": True}
