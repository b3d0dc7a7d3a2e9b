"""The page of what the package changes in a process lists what changes in processes, and nothing else."""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tests import unoptimised
from tests.e2e.launch import is_open_mpi, limited, mpirun
from tests.standin import compile_cpp

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "process.md"
PROGRAM = Path(__file__).parent / "process_changes.py"

# What is seen in a process (a pattern of names), and how the first column of the section's tables says it.
IMPORT = {
    "sys.excepthook": "`sys.excepthook`",
    "atexit": "an exit handler (`atexit`)",
    "builtins.SystemExit.code": "`SystemExit.code`",
    "*.exit": "`sys.exit`",
    "finder of pycollective.transport.mpi_start": (
        "a finder of modules in front of `sys.meta_path`, for `mpi4py.MPI` alone"
    ),
    "multiprocessing.spawn.get_command_line": (
        "`multiprocessing.spawn.get_command_line`, if the program has imported `mpi4py.MPI` before"
    ),
}
MPI = {
    "mallopt -8": "one arena",
    "putenv MPIR_CVAR_CH4_NETMOD": "variables that an MPI library needs at its start",
    "*.DynamicJaxprTrace.make_eqn": "`DynamicJaxprTrace.make_eqn`",
    "*.RuntimeTokenSet.*_token_*": "its tokens of running programs",
    "*.MeshExecutable.create_cpp_call": "how a program that was compiled ahead is called",
    "*.loops._scan_known_hoisting": "how a scan is divided for its derivative",
    "*linear_call_p*": "the rules of `linear_call`",
    "*.partial_eval_jaxpr_custom_rules*.custom_jvp_call_p]": "`jax.checkpoint`'s rules for `custom_jvp`",
    "*.partial_eval_jaxpr_custom_rules*.custom_vjp_call_p]": "`custom_vjp`",
    "*.partial_eval_jaxpr_custom_rules*.linear_solve_p]": "and `custom_linear_solve`",
    "*.mlir._lowerings*.while_p]": "the lowering of `while_loop`",
    "*.compile_or_get_cached": "the call that compiles",
}
INIT = {
    "sys.excepthook": "`sys.excepthook`",
    "threading.excepthook": "`threading.excepthook`",
    "atexit": "a handler at exit",
    "IPython post_run_cell": "IPython's `post_run_cell`",
    "builtins.SystemExit.code": "`SystemExit.code`",
    "*.exit": "`sys.exit`",
    "sys.unraisablehook": "`sys.unraisablehook`",
    "os._exit": "`os._exit`",
    "os.register_at_fork": "handlers of `os.register_at_fork`",
    "environ PYCOLLECTIVE_RANK": "the variable `PYCOLLECTIVE_RANK`",
    "mallopt -4": "no `mmap` for large blocks",
    "mallopt 1": "no fast bins",
    "madvise 14": "huge pages",
    "mallopt -[12]": "freed memory is kept",
    "putenv NPROC": "`NPROC`, while JAX's devices start",
    "config jax_cuda_visible_devices": "`jax_cuda_visible_devices`",
}
TWO_RANKS = {
    "signal 2: SigCgt _show": "`SIGINT` (Ctrl-C): a handler",
    "wakeup descriptor": "a wakeup descriptor",
    "thread pycollective interrupts": "a thread",
    "signal 63: SigCgt in C": "from `SIGRTMAX - 1` down",
    "faulthandler.register": "a handler of `faulthandler`",
    "opens /memfd:pycollective-stacks": "a memory file",
    "opens temporary file": "a temporary file",
    "thread pycollective-stacks": "`pycollective-stacks`",
    "3 native threads": "two of the monitor, and one for each rank that this rank guards",
    "opens listens on @pycollective": "an abstract address of the host",
    "opens socket": "connections to guarded ranks",
    "opens anon_inode:*eventfd*": "an eventfd",
    "opens /memfd:pycollective-board": "a memory file for the ranks of each host",
    "prctl 1499557217": "`prctl(PR_SET_PTRACER_ANY)`",
}


@functools.cache
def unseen() -> dict[str, str]:
    """What does not happen in these processes, and why."""
    reasons = {
        "config jax_cuda_visible_devices": (True, "it needs GPUs"),
        "*.exit": (sys.version_info >= (3, 12), "only Python 3.11"),
        "putenv MPIR_CVAR_CH4_NETMOD": (is_open_mpi(), "only MPICH"),
        "putenv NPROC": (os.cpu_count() == 1, "only where ranks share several cores"),
    }
    return {pattern: why for pattern, (is_unseen, why) in reasons.items() if is_unseen}


@functools.cache
def rows(section: str) -> tuple[str, ...]:
    """The first column of the tables of a section."""
    text = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    lines = (line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| what |"))
    return tuple(line.split(" | ")[0].removeprefix("| ") for line in lines)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """What a step has changed in a process."""
    files = Counter(after["files"]) - Counter(before["files"])
    found = {name for name in after["attributes"] if name not in before["attributes"]}
    found |= {f"finder of {name}" for name in after["finders"] if name not in before["finders"]}
    found |= {f"signal {n}: {what}" for n, what in after["signals"].items() if before["signals"].get(n) != what}
    found |= {f"thread {name}" for name in after["threads"] if name not in before["threads"]}
    found |= {f"opens {name}" for name in files}
    found |= {f"limits {one}" for one in after["limits"] if one not in before["limits"]}
    for kind in ("environ", "config"):
        names = {name for name in (*after[kind], *before[kind]) if after[kind].get(name) != before[kind].get(name)}
        found |= {f"{kind} {name}" for name in names if before[kind]}
    for kind in ("calls", "C"):
        found |= {call for call in after[kind][len(before[kind]) :] if call not in before["C"]}
    if native := len(set(after["native threads"]) - set(before["native threads"])):
        found.add(f"{native} native threads")
    if after["wakeup"] != before["wakeup"]:
        found.add("wakeup descriptor")
    return {change for change in found if not change.startswith("putenv") or f"environ {change[7:]}" not in found}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_cpp([PROGRAM.with_suffix(".cc")], tmp_path_factory.mktemp("C") / "changes.so", "-shared")


@pytest.fixture(scope="module")
def alone(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What the steps change in a process that no launcher has started."""
    (found,) = run(tmp_path_factory.mktemp("alone"), library, ["IPython", "libraries", "import", "MPI", "init"])
    return found


def run(folder: Path, library: Path, steps: Sequence[str], ranks: int = 0, **env: str) -> list[dict[str, set[str]]]:
    """What the steps change in the process of each rank; ``ranks=0``: in one that no launcher has started."""
    file = folder / "looks"
    quick = {"JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": unoptimised.flags()}
    env = {
        **quick,
        "PYTHONPATH": str(PAGE.parents[2]),
        "LD_PRELOAD": str(library),
        "PROCESS_CHANGES": str(folder / "C"),
        **env,
    }
    arguments = [str(PROGRAM), str(file), ",".join(steps)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MPITRAMPOLINE_LIB", raising=False)  # the import of the package has set it in this process
        if ranks == 0:
            done = limited([sys.executable, *arguments], 100, env={**os.environ, **env})
        else:
            done = mpirun(ranks, *arguments, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    found = []
    for rank in range(max(ranks, 1)):
        looks = json.loads(Path(f"{file}{rank}").read_text())
        found.append({step: changes(*pair) for step, pair in zip(steps, itertools.pairwise(looks), strict=True)})
    return found


def matching(change: str, table: Mapping[str, str]) -> list[str]:
    return [pattern for pattern in table if fnmatchcase(change, pattern)]


def check(section: str, table: Mapping[str, str], seen: set[str]) -> None:
    """Compares a section of the page with what was seen in processes, by a table between the two."""
    page = rows(section)
    for change in seen:
        assert matching(change, table), f"{change!r} happens, and this test does not know how {section!r} says it"
        for pattern in matching(change, table):
            said = table[pattern]
            assert any(said in row for row in page), f"{change!r} happens, and {section!r} does not say {said!r}"
    for pattern, said in table.items():
        happens = any(fnmatchcase(change, pattern) for change in seen)
        assert happens != (pattern in unseen()), f"{section!r} says {said!r}, and {pattern!r} happens: {happens}"
    for row in page:
        rest = functools.reduce(lambda text, said: text.replace(said, ""), table.values(), row)
        assert rest != row, f"{section!r} lists {row!r}, and this test does not look for that"
        assert "`" not in rest, f"{section!r} lists {rest!r}, and this test does not look for that"


def test_the_import_of_a_process_that_is_no_rank(tmp_path: Path, library: Path) -> None:
    (found,) = run(tmp_path, library, ["import"], MPITRAMPOLINE_LIB="another")
    assert found["import"] == set()
    (found,) = run(tmp_path, library, ["import"])
    assert found["import"] == {"environ MPITRAMPOLINE_LIB"}
    assert "In every process the import sets `MPITRAMPOLINE_LIB`" in PAGE.read_text()


def test_one_rank_starts_nothing_for_other_ranks(alone: dict[str, set[str]]) -> None:
    assert alone["import"] == set()
    for change in alone["init"]:
        assert matching(change, INIT), f"{change!r} happens with one rank"


def test_the_page_lists_what_happens_in_a_rank(tmp_path: Path, library: Path, alone: dict[str, set[str]]) -> None:
    # XLA opens the native library, with a C library of its own, if it is imported after the package.
    both = run(tmp_path, library, ["libraries", "import", "MPI", "init"], ranks=2, SLURM_STEP_ID="1")
    early = run(tmp_path, library, ["import", "libraries"], ranks=2)
    for rank, early_rank in zip(both, early, strict=True):
        check("At import", IMPORT, early_rank["import"] - {"environ MPITRAMPOLINE_LIB"} | rank["import"])
        check("When MPI is loaded", MPI, rank["MPI"])
        check("At `pc.init`", {**INIT, **TWO_RANKS}, alone["init"] | rank["init"])
