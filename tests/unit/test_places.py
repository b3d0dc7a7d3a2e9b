"""A collective stands in few places, which docs/contributing.md lists. This test fails if one more comes.

A place is a paragraph of code: lines without an empty one between them. Comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pycollective as pc
from pycollective.timeline.waits import WAIT_FOR_ALL, awaited
from pycollective.transport import native

ROOT = Path(__file__).parents[2]

# What makes up exscan, and no other operation.
PLACES = {
    "native/base/operations.h",  # the row of the table
    "native/mpi/library_of.h",  # the function that calls MPI
    "native/mpi/mpi.h",  # MPI's function
    "native/shared_memory/combine.cc",  # what a rank makes of the others' operands, where they share memory
    "pycollective/__init__.pyi",  # the public name
    "pycollective/collectives/mpi_collectives.py",  # the public function
    "pycollective/primitives/reductions.py",  # the registration
    "pycollective/transport/mpi4jax_operations.py",  # the operation made of mpi4jax's
}


def code_of(path: Path) -> str:
    """The text of a file without its comments and docstrings."""
    text = path.read_text()
    if path.suffix in (".cc", ".h"):
        return re.sub(r" *//.*", "", text)
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            for number in range(node.lineno - 1, node.end_lineno):
                lines[number] = "#"  # no empty line, since it lies inside a function
    return "\n".join(lines)


def places_in(path: Path) -> int:
    paragraphs = re.split(r"\n\s*\n", code_of(path))
    return sum(re.search("exscan", paragraph, re.IGNORECASE) is not None for paragraph in paragraphs)


def test_a_collective_stands_in_few_places() -> None:
    files = [*ROOT.glob("native/**/*.*"), *ROOT.glob("pycollective/**/*.py*")]
    files.remove(ROOT / "native" / "xla" / "xla_mpi_names.h")  # all names that XLA looks up, of whatever we have
    places = {
        str(file.relative_to(ROOT)): places_in(file) for file in files if file.suffix in (".cc", ".h", ".py", ".pyi")
    }
    assert {name: count for name, count in places.items() if count > 0} == dict.fromkeys(PLACES, 1)


def test_synchronizing_collectives_are_those_of_the_table() -> None:
    """``awaited`` says for which ranks each call waits; the table of operations says on whose data it depends."""
    table = (ROOT / "native" / "base" / "operations.h").read_text()
    rows = re.findall(r"(?:COLLECTIVE|OTHER)\((\w+), [^()]*?(kAllToAll|kNoData|kFromRoot|kToRoot)\b", table)
    pc.init()
    found: dict[str, set[str]] = {}
    for name, dataflow in rows:
        found.setdefault(dataflow, set()).add(name)
    assert found["kAllToAll"] | found["kNoData"] == WAIT_FOR_ALL
    assert {name for name in native.host_targets() if list(awaited(name, 0, 1, 3)) == [1]} == found["kFromRoot"]
    waiting_roots = {name for name in native.host_targets() if list(awaited(name, 1, 1, 3)) == [0, 1, 2]}
    assert waiting_roots - WAIT_FOR_ALL == found["kToRoot"]


def test_what_ranks_of_a_host_combine_has_a_case() -> None:
    """A row whose arrays go through shared memory has a case in ``Combine``."""
    table = (ROOT / "native" / "base" / "operations.h").read_text()
    rows = re.findall(r"(?:COLLECTIVE|OTHER)\(\w+, (\w+), [^()]*?(kByMpi|kBuffered|kReadable|kReadableOnce)\b", table)
    pc.init()
    assert len(rows) == len(native.host_targets())
    cases = re.findall(r"case k(\w+):", code_of(ROOT / "native" / "shared_memory" / "combine.cc"))
    assert [name for name, exchange in rows if (name in cases) == (exchange == "kByMpi")] == []


def test_only_two_reductions_may_be_read() -> None:
    """``Combine`` reduces where arrays lie: in buffers. Another process's array is reduced by ``ReadAndReduce``."""
    table = code_of(ROOT / "native" / "base" / "operations.h")
    rows = re.findall(r"\b(?:COLLECTIVE|OTHER)\((\w+), (.*?)(?=\b(?:COLLECTIVE|OTHER)\(|#define)", table, re.DOTALL)
    pc.init()
    assert {name for name, _ in rows} == set(native.host_targets())
    reductions = {name: row for name, row in rows if re.search(r'\bkOp\b|"op"', row)}
    assert len(reductions) >= 5
    read = {name for name, row in reductions.items() if re.search(r"\bkReadable(Once)?\b", row)}
    assert read - {"allreduce", "reduce_scatter"} == set()


def test_places_are_counted(tmp_path: Path) -> None:
    python = tmp_path / "a.py"
    python.write_text(
        '"""An exscan."""\n\ntable = {\n    "exscan": 1,\n    "Exscan": 2,\n}\n\n\ndef exscan():\n    pass\n'
    )
    assert places_in(python) == 2
    cpp = tmp_path / "a.cc"
    cpp.write_text("// exscan\n\nX(Exscan)\nX(scan)\nX(Iexscan)\n\nint f();  // exscan\n")
    assert places_in(cpp) == 1


def test_the_page_names_them() -> None:
    page = (ROOT / "docs" / "contributing.md").read_text()
    assert {place for place in PLACES if place not in page} == set()
    named = re.findall(r"`(\w+)`\s+\(`([\w/]+\.(?:py|pyi|cc|h))`\)", page)
    assert len(named) > 10
    missing = []
    for name, place in named:
        files = [path for path in (ROOT / place, ROOT / "pycollective" / place) if path.exists()]
        if not any(re.search(rf"\b{name}\b", path.read_text()) for path in files):
            missing.append((name, place))
    assert missing == []
