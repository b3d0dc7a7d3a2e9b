"""The house has floors: a module imports only those below it, at its top."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pycollective"

# From the top down. A module may import those that stand after it.
FLOORS = (
    "__main__",
    "bench.command",
    "launch.examine",
    "launch.doctor",
    "launch.findings",
    "launch.run",
    "launch.dialects",
    "launch.libraries",
    "launch.rank",
    "launch.__init__",
    "bench.main",
    "bench.plot",
    "bench.report",
    "bench.options",
    "bench.peers",
    "bench.measure",
    "bench.light",
    "bench.jax_gloo",
    "bench.torch_gloo",
    "bench.contenders",
    "bench.works",
    "bench.__init__",
    "__init__",
    "spmd",
    "named",
    "sharded",
    "jitted",
    "mapped",
    "buckets",
    "overlap",
    "agreement",
    "discharge",
    "discharge_rules",
    "mpi_collectives",
    "collectives",
    "wire",
    "mesh",
    "checks",
    "primitives",
    "hierarchy",
    "blocks",
    "communicator",
    "control",
    "devices",
    "members",
    "accelerators",
    "threads",
    "watchdog",
    "lifecycle",
    "lowering",
    "ordering",
    "turns",
    "jaxprs",
    "transport.native",
    "transport.runtime",
    "transport.__init__",
    "config",
    "arguments",
    "mpi",
    "environment",
    "processes",
    "launchers",
    "errors",
)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imported(path: Path) -> list[tuple[str, ast.AST]]:
    """The package's own modules that a file imports, wherever in it."""
    found: list[tuple[str, ast.AST]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pycollective":
            module = node.module.removeprefix("pycollective").removeprefix(".")
            for alias in node.names:
                full = f"{module}.{alias.name}".removeprefix(".")
                found.append((full if full in FLOORS else module or full, node))
        elif isinstance(node, ast.Import):
            found += [
                (a.name.removeprefix("pycollective."), node) for a in node.names if a.name.startswith("pycollective.")
            ]
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_module_has_a_floor() -> None:
    assert {name_of(path) for path in FILES} == set(FLOORS)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    own = FLOORS.index(name_of(path))
    for module, node in imported(path):
        assert module in FLOORS, f"{path}:{node.lineno} imports {module}"  # type: ignore[attr-defined]
        assert FLOORS.index(module) > own, f"{path}:{node.lineno} imports {module} from above"  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_stand_at_the_top(path: Path) -> None:
    tree = ast.parse(path.read_text())
    inner = [n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)]
    late = [node.lineno for node in inner if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not late, f"{path} imports inside functions at lines {late}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_ordering_looks_inside_jax(path: Path) -> None:
    if name_of(path) != "ordering":
        code = ast.unparse(ast.parse(path.read_text()))
        assert "jax._src" not in code


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_rooms_are_small(path: Path) -> None:
    code = [line for line in path.read_text().splitlines() if line.strip()]
    assert len(code) <= 450, f"{path} has {len(code)} lines"
