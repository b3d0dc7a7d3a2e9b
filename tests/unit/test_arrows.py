"""The package is a house of rooms: folders, and the files beside them. A room imports only rooms below it."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pycollective"

# From the top down. A file may import files of its own room, and rooms that stand after it.
ROOMS = (
    "__main__",
    "doctor",
    "report",
    "profiling",
    "bench",
    "run",
    "compat",
    "__init__",
    "planning",
    "fft",
    "parallel",
    "linalg",
    "distributed",
    "elastic",
    "recorder",
    "timeline",
    "spmd",
    "collectives",
    "named_axes",
    "primitives",
    "ranks",
    "faults",
    "ordering",
    "jax_support",
    "transport",
    "launch",
    "config",
    "environment",
    "build_id",
    "files",
    "errors",
)

FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(module: str) -> str:
    return module.split(".")[0]


def modules_in(text: str) -> list[str]:
    """The module of the package that a dotted name means; the package itself is ``__init__``."""
    parts = text.split(".")
    if parts[0] != "pycollective":
        return []
    names = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
    found = (full for name in names for full in (name, f"{name}.__init__") if full in FILES)
    return [next(found, "__init__")]


def imported(path: Path) -> list[str]:
    """The package's modules that a file imports, at its top, in functions, or by their names in strings."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            for alias in node.names:
                found += modules_in(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found += modules_in(alias.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("pycollective."):
            # The string may be for importlib or for `python -m`. A part of an f-string ends with a dot.
            found += [name for name in modules_in(node.value) if name != "__init__"]
    return found


ARROWS = {name: imported(path) for name, path in FILES.items()}


def test_every_file_is_in_a_room() -> None:
    assert {room_of(name) for name in FILES} == set(ROOMS)


@pytest.mark.parametrize("name", FILES)
def test_arrows_between_rooms_point_down(name: str) -> None:
    own = ROOMS.index(room_of(name))
    for other in ARROWS[name]:
        assert ROOMS.index(room_of(other)) >= own, f"{name} imports {other} from above"


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("planning.")])
def test_planners_do_not_know_each_other(name: str) -> None:
    """What both need lies beside them, in ``planning`` itself, which knows neither. The command chooses one."""
    if name == "planning.command":
        return
    own, *_ = name.split(".")[1:]
    inner = {other.split(".")[1] for other in ARROWS[name] if other.startswith("planning.by_")}
    assert inner <= {own}, f"{name} imports from {inner}"


def test_no_circle_of_files() -> None:
    graphlib.TopologicalSorter({name: set(others) - {name} for name, others in ARROWS.items()}).prepare()


def test_names_of_mpi_libraries_are_seen() -> None:
    code = (
        'import mpich\ndef of_hydra(): os.environ["OMPI_MCA_pml"]\nx = f"sm {FI_PROVIDER}"\nprint("Open MPI", report)'
    )
    seen = {word for word in words_of_code(ast.parse(code)) if LIBRARY_NAMES.search(word)}
    assert seen == {"mpich", "of_hydra", "OMPI_MCA_pml", "FI_PROVIDER", "Open MPI"}


def test_imports_in_functions_and_in_strings_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text('def f():\n    from pycollective.bench import main\n    import_module("pycollective.doctor.job")\n')
    assert imported(file) == ["bench.main", "doctor.job"]


@pytest.mark.parametrize("name", FILES)
def test_imports_stand_at_the_top(name: str) -> None:
    tree = ast.parse(FILES[name].read_text())
    inner = [n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)]
    late = [node.lineno for node in inner if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not late, f"{name} imports inside functions at lines {late}"


# Names that JAX's public API does not have, or does not promise to keep.
FRAGILE = {"_src", "jaxpr_subcomp", "is_high", "to_lojax", "vma", "manual_axis_type"}


@pytest.mark.parametrize("name", FILES)
def test_two_files_look_inside_jax(name: str) -> None:
    tree = ast.parse(FILES[name].read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and not is_own(node.value)}
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    used |= {part for module in modules for part in module.split(".")}
    assert (name in ("jax_support.jax_internals", "jax_support.jax_dispatch")) == bool(used & FRAGILE), used & FRAGILE


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("jax_internals", "jax_dispatch", "jaxprs")


LIBRARY_NAMES = re.compile(
    r"(?<![a-z])(mpich|mvapich|cray|open_?\s?mpi|openmpi|intel|i_mpi|hydra|ompi|pr?rte|orte|mpir_|ucx|libfabric|fi_[a-z]+"
    r"|pmix?_|libmpi|mpi_abi)",
    re.IGNORECASE,
)
MAY_NAME_A_LIBRARY = {
    "errors": "the remedy of several messages names the extra of setup.cfg that brings an MPI library"
}


def words_of_code(tree: ast.AST) -> set[str]:
    """The names and strings of a file; not its comments and docstrings, which are prose."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose}
    for node in ast.walk(tree):
        words |= {getattr(node, field, None) for field in ("id", "attr", "name", "asname", "module", "arg")}
    return {word for word in words if isinstance(word, str)}


@pytest.mark.parametrize("name", [name for name in FILES if room_of(name) != "launch"])
def test_only_launch_knows_mpi_libraries_by_name(name: str) -> None:
    """What differs between them is an attribute or a method of ``Library``, which other rooms ask for."""
    found = {word for word in words_of_code(ast.parse(FILES[name].read_text())) if LIBRARY_NAMES.search(word)}
    assert bool(found) == (name in MAY_NAME_A_LIBRARY), f"{name} names an MPI library: {found}"


def test_a_program_may_import_jax_after_the_hooks_for_errors() -> None:
    """``pycollective.distributed.__main__`` needs that: programs set variables that JAX reads when it is imported."""
    code = "import sys, pycollective.faults.rank_exit, pycollective.faults.monitor; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
