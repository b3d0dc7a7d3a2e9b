"""Writes the table of operations in semantics.md from the docstrings; ``--check`` compares it with them."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from pathlib import Path

import pycollective

PAGE = Path(__file__).parent / "semantics.md"
BEGIN, END = "<!-- docs/operations.py writes this table -->", "<!-- end of the table -->"
FIELDS = ("Shape", "Differentiation", "Dtypes")
_SECTION = re.compile(r"^(\w+):\n((?:(?: +.*)?\n)+)", re.MULTILINE)


def operations() -> list[str]:
    """The public functions that are collectives or messages, those with jax.lax's names first."""
    found = {name: getattr(pycollective, name) for name in pycollective.__all__}
    modules = [
        f"pycollective.collectives.{room}"
        for room in (
            "jax_reductions",
            "replicated",
            "jax_collectives",
            "mpi_collectives",
            "ragged",
            "halos",
            "requests",
        )
    ]
    functions = {name: value for name, value in found.items() if not inspect.isclass(value)}
    ours = [name for name, value in functions.items() if getattr(value, "__module__", "") in modules]
    lines = {name: inspect.getsourcelines(found[name])[1] for name in ours}
    return sorted(ours, key=lambda name: (modules.index(found[name].__module__), lines[name]))


def call(name: str) -> str:
    """How a function is called: what has a default and is no operand is left out, but for keywords."""
    parameters = inspect.signature(getattr(pycollective, name)).parameters.values()
    shown = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    shown += [f"{p.name}=" for p in parameters if p.kind is p.KEYWORD_ONLY]
    return f"{name}({', '.join(shown)})"


def fields(name: str) -> dict[str, str]:
    """What the docstring of a function says in its first paragraph ("result"), and in each section."""
    text = f"{inspect.getdoc(getattr(pycollective, name))}\n"
    found = {"result": text.split("\n\n")[0], **dict(_SECTION.findall(text))}
    return {field: " ".join(said.split()) for field, said in found.items()}


def markdown(text: str) -> str:
    """A docstring's markup as Markdown, in the cell of a table."""
    text = re.sub(r":(?:func|mod|class|data):`([^`]*)`", r"`\1`", text).replace("``", "`")
    return text.strip().removesuffix(".").replace("|", r"\|")


def table() -> str:
    """The table; each function has a row."""
    rows = ["| function | result on rank r | shape of the result | derivative | dtypes |", "|---|---|---|---|---|"]
    for name in operations():
        said = fields(name)
        cells = [f"`{call(name)}`", *(markdown(said.get(field, "")) for field in ("result", *FIELDS))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> int:
    """Writes the table, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the table is another")
    check = parser.parse_args().check
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    new = f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"
    if check and new != text:
        sys.stderr.write("docs/semantics.md: its table is not that of the docstrings. Run: python docs/operations.py\n")
        return 1
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
