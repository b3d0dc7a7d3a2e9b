"""The runner of scripts/test, with steps that take no time."""

from __future__ import annotations

import getpass
import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "suite.py"


@pytest.fixture(scope="module")
def suite() -> ModuleType:
    spec = importlib.util.spec_from_file_location("suite", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["suite"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ran(suite: ModuleType, tmp_path: Path, *steps: Any) -> Any:
    runner = suite.Runner(list(steps), tmp_path)
    runner.run()
    return runner


def shell(suite: ModuleType, name: str, script: str = "true", **options: Any) -> Any:
    return suite.Step(**{"name": name, "command": ("sh", "-c", script), "kind": "unit", "limit": 10, **options})


def test_a_step_that_fails_is_shown(suite: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    summary = "echo '== 3 passed, 1 skipped in 0.1s =='; echo 'SKIPPED [2] tests/a.py:3: LOUD: needs two ranks'"
    good, bad = shell(suite, "good", summary), shell(suite, "bad", "echo why; exit 3", ranks=2)
    runner = ran(suite, tmp_path, good, bad)
    lines = re.sub(r"\d+ s", "1 s", capfd.readouterr().out).splitlines()
    assert lines[0] == "=== [1/2] good"
    assert "=== [1/2] good: ok (1 s, CPU 1 s), 3 passed, 1 skipped" in lines
    assert "why" in lines
    assert "=== [2/2] bad: FAILED (1 s, CPU 1 s, exit 3)" in lines
    assert (runner.passed, runner.failed) == (1, ["bad (exit 3)"])
    assert runner.skipped == {"needs two ranks": ["2 in good"]}


def test_a_step_that_takes_too_long_has_failed(suite: ModuleType, tmp_path: Path) -> None:
    assert ran(suite, tmp_path, shell(suite, "slow", "sleep 60", limit=1)).failed == ["slow (exit 124)"]


def test_steps_of_one_rank_run_side_by_side(suite: ModuleType, tmp_path: Path) -> None:
    # Each waits for the other; behind them a step that needs both cores finds them gone.
    meets = [shell(suite, a, f"touch {tmp_path}/{a}; until [ -e {tmp_path}/{b} ]; do :; done") for a, b in ("ab", "ba")]
    leaves = f"rm {tmp_path}/a {tmp_path}/b"
    alone = shell(suite, "alone", f"{leaves}; sleep 0.5; [ ! -e {tmp_path}/c ]", ranks=2)
    assert ran(suite, tmp_path, *meets, alone, shell(suite, "c", f"touch {tmp_path}/c", ranks=2)).passed == 4


def test_a_step_of_one_rank_overtakes_those_that_need_all_cores(suite: ModuleType, tmp_path: Path) -> None:
    long = shell(suite, "long", f"until [ -e {tmp_path}/short ]; do sleep 0.1; done; touch {tmp_path}/ended")
    alone = shell(suite, "alone", f"[ -e {tmp_path}/ended ]", ranks=2)
    short = shell(suite, "short", f"[ ! -e {tmp_path}/ended ] && touch {tmp_path}/short")
    assert ran(suite, tmp_path, long, alone, short).passed == 3


def test_a_step_waits_for_the_one_that_it_needs_and_tests_for_all_environments(
    suite: ModuleType, tmp_path: Path
) -> None:
    steps = [
        shell(suite, "test", f"[ -e {tmp_path}/needed ]"),
        shell(suite, "needs", f"[ -e {tmp_path}/needed ]", kind="setup", after="needed"),
        shell(suite, "needed", f"touch {tmp_path}/needed", kind="setup"),
    ]
    assert ran(suite, tmp_path, *steps).passed == 3


def test_the_cpu_time_is_that_of_the_step_alone(
    suite: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    busy = f"{sys.executable} -c 'import time\nwhile time.process_time() < 0.7: pass'"
    ran(suite, tmp_path, shell(suite, "busy", busy), shell(suite, "idle", "sleep 1"))
    took = dict(re.findall(r"(busy|idle): ok \(\d+ s, CPU (\d+) s\)", capfd.readouterr().out))
    assert took == {"busy": "1", "idle": "0"}


def test_what_needs_an_environment_that_is_not_there_is_left_out(suite: ModuleType, tmp_path: Path) -> None:
    steps = [
        shell(suite, "packages", "sleep 0.5; exit 1", kind="setup", mpi="", optional="Slurm"),
        shell(suite, "first", "exit 1", kind="setup"),
        shell(suite, "second", kind="setup", mpi="system", lacks=lambda: "there is none", after="packages"),
        shell(suite, "of the first", f"touch {tmp_path}/first"),
        shell(suite, "of the second", f"touch {tmp_path}/second", mpi="system"),
        shell(suite, "of a third", mpi="openmpi"),
    ]
    runner = ran(suite, tmp_path, *steps)
    assert runner.failed == ["first (exit 1)"]
    assert runner.omitted == [
        "Slurm: packages failed",
        "second: there is none",
        "of the first: there is no environment for mpich",
        "of the second: there is no environment for system",
    ]
    assert runner.passed == 1


def test_an_environment_may_lack_an_extra(suite: ModuleType, tmp_path: Path) -> None:
    steps = [
        shell(suite, "environment", kind="setup"),
        shell(suite, "more", "exit 1", kind="setup", extra="mpi4jax", optional="mpi4jax", after="environment"),
        shell(suite, "with it", f"touch {tmp_path}/with", extra="mpi4jax"),
        shell(suite, "without it"),
    ]
    runner = ran(suite, tmp_path, *steps)
    assert runner.failed == []
    assert runner.omitted == ["mpi4jax: more failed", "with it: there is no environment for mpich with mpi4jax"]
    assert runner.passed == 2
    assert not (tmp_path / "with").exists()


def test_python_keeps_what_it_compiles(suite: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in suite.environment(shell(suite, "step"), Path("programs"))


def test_steps_that_never_run_side_by_side_share_what_jax_compiles(suite: ModuleType) -> None:
    """JAX's cache may read a file while another process writes it."""

    def programs(**options: Any) -> str | None:
        step = shell(suite, "step", **options)
        folder: str | None = suite.environment(step, Path("/programs")).get("PYCOLLECTIVE_TEST_PROGRAMS")
        return folder

    assert programs(kind="collective", ranks=1) is None
    assert programs(kind="unit", ranks=2) is None  # it may have several workers
    assert programs(kind="collective", ranks=2) == programs(kind="collective", ranks=2, mpi="openmpi")
    assert len({programs(kind="collective", ranks=ranks) for ranks in (2, 3, 4)}) == 3


@pytest.mark.parametrize("everything", [False, True])
def test_its_files_are_there(everything: bool, suite: ModuleType) -> None:
    steps = suite.steps(everything=everything, install=True)
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        for word in step.command:
            if word.startswith(("tests/", "scripts/")):
                assert (SCRIPT.parents[1] / word.split("::")[0]).exists(), word


def test_no_other_pytest_clears_the_root_of_temporary_directories(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two ranks that clear one root at once end the job, so each has its own (tests/conftest.py)."""
    default = Path(tempfile.gettempdir()).resolve() / f"pytest-of-{getpass.getuser()}"
    base = tmp_path_factory.getbasetemp()
    assert default not in base.parents
    assert Path(os.environ["PYTEST_DEBUG_TEMPROOT"]) in base.parents


SUFFIXES = {
    "collective": "_on_ranks",
    "spmd": "_on_devices",
    "distributed": "_of_global_arrays",
    "mpi4jax": "_with_mpi4jax",
    "e2e": "_in_jobs",
    "compiled_for_gpu": "_for_gpu",
}
"""How the names of files end in each folder, if other folders test the same subject (docs/contributing.md)."""


def test_the_name_of_a_test_file_tells_its_folder() -> None:
    folders: dict[str, list[str]] = {}
    for path in SCRIPT.parents[1].glob("tests/*/test_*.py"):
        folders.setdefault(path.stem, []).append(path.parent.name)
    assert len(folders) > 100
    assert {name: found for name, found in folders.items() if len(found) > 1} == {}
    for name, (folder,) in folders.items():
        ends = [other for other, suffix in SUFFIXES.items() if name.endswith(suffix)]
        assert ends in ([], [folder]), name


def test_each_file_that_a_step_names_is_there(suite: ModuleType) -> None:
    root = SCRIPT.parents[1]
    for everything in (False, True):
        for step in suite.steps(everything=everything, install=False):
            for part in step.command:
                file = part.removeprefix("--ignore=").partition("::")[0]
                assert not file.startswith("tests/") or (root / file).exists(), f"{step.name}: {file}"
