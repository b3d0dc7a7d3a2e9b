"""Tests the runner of ``scripts/gpu-check``: limits, missing things, the report, and reading the output of programs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pycollective.bench.report import Row
from pycollective.doctor import build_id
from tests.gpu_check import __main__ as gpu_check
from tests.gpu_check import environment, steps, streams, table
from tests.gpu_check.running import (
    FAILED,
    OK,
    SKIPPED,
    AbsentError,
    Result,
    Runner,
    Step,
    StepError,
    adopt_orphans,
    last_lines,
)
from tests.gpu_check.streams import Event, Span

ROOT = Path(__file__).parents[2]
NOTE = build_id._NOTE
SLEEPS = "import time; print('on its way', flush=True); time.sleep(60)"


def run(*words: str) -> object:
    """Returns the work of a step that runs this Python."""
    return lambda step: step.run([sys.executable, *words]).strip()


# Steps ----------------------------------------------------------------------------------------------------------


def test_every_step_has_its_line(tmp_path: Path) -> None:
    def lacks(_: Step) -> str:
        raise AbsentError("no GPU")

    runner = Runner(tmp_path, 100)
    assert runner.step("good", 30, run("-c", "print('figures')"))  # type: ignore[arg-type]
    assert not runner.step("bad", 30, run("-c", "print('why'); raise SystemExit(3)"))  # type: ignore[arg-type]
    assert not runner.step("lacks", 30, lacks)
    assert not runner.step("is wrong itself", 30, lambda _: str(1 / 0))
    assert not runner.step("cannot start", 30, lambda step: step.run(["/no/such/program"]))
    assert [(result.status, result.text) for result in runner.results] == [
        (OK, "figures"),
        (FAILED, "exit status 3: why"),
        (SKIPPED, "no GPU"),
        (FAILED, "error in gpu-check itself: ZeroDivisionError: division by zero"),
        (FAILED, "/no/such/program did not start: No such file or directory"),
    ]
    log = runner.results[1].log
    assert log is not None
    assert "why" in log.read_text()


@pytest.fixture
def orphans() -> Iterator[None]:
    adopt_orphans()
    yield
    adopt_orphans(False)


def test_a_step_ends_at_its_limit_with_all_that_it_started(tmp_path: Path, orphans: None) -> None:
    # Its child has a session of its own, so that a signal to the step's processes does not reach it.
    child = f"import os, subprocess, sys; os.setsid(); {SLEEPS}"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}, 'gpu-check-child']); {SLEEPS}"
    runner = Runner(tmp_path, 100)
    began = time.monotonic()
    assert not runner.step("hangs", 2, run("-c", parent))  # type: ignore[arg-type]
    assert time.monotonic() - began < 15
    assert runner.results[0].text.startswith("it did not end within its limit: on its way")
    left = [pid for pid in Path("/proc").glob("[0-9]*") if b"gpu-check-child" in command_line(pid)]
    assert not left


def command_line(pid: Path) -> bytes:
    try:
        return (pid / "cmdline").read_bytes()
    except OSError:
        return b""


def test_what_comes_after_the_deadline_is_skipped(tmp_path: Path) -> None:
    runner = Runner(tmp_path, 5)
    assert not runner.step("late", 30, lambda _: "never begun")
    assert runner.results == [Result("late", SKIPPED, "out of time")]
    # A limit is never beyond the deadline.
    runner = Runner(tmp_path, 6, patience=2)
    assert runner.step("short", 30, lambda step: f"{step.left_s() <= 12}")
    assert runner.results[0].text == "True"
    # A fraction of what is left may be more than the limit.
    assert runner.step("tests", 1, lambda step: f"{5 < step.left_s() <= 6}", fraction=0.5)
    assert runner.results[1].text == "True"


def test_some_steps_alone(tmp_path: Path) -> None:
    runner = Runner(tmp_path, 100, only=["axes"])
    runner.skip("bandwidth", "not asked for")
    assert not runner.step("training", 30, lambda _: "")
    assert runner.step("named axes", 30, lambda _: "")
    assert [result.name for result in runner.results] == ["named axes"]


def test_limits_leave_time_for_all() -> None:
    place = steps.Place(Path(sys.executable), ROOT, Path())
    assert sum(step.limit_s for step in steps.steps_of(place)) <= 480
    assert gpu_check.SECONDS < 480


def test_last_lines() -> None:
    assert last_lines("a\n\n  b\n=====\nc\n", 2) == "b / c"
    assert last_lines("\n---\n") == "it printed nothing"
    assert last_lines("why\n=   EXIT CODE: 15\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Terminated") == "why"


# The report -----------------------------------------------------------------------------------------------------


def test_report(tmp_path: Path) -> None:
    results = [
        Result("one", OK, "9.1 GB/s | 3", 12.4, tmp_path / "one.txt"),
        Result("two", FAILED, "exit status 1:\nwhy", 3, tmp_path / "two.txt"),
        Result("three", SKIPPED, "no compiler"),
    ]
    rows = [
        {"op": "psum", "size": 1 << 20, "contender": "pycollective", "algbw": 3.14159},
        {"op": "psum", "size": 1 << 20, "contender": "copies alone", "algbw": 10.0},
        {"op": "all_gather", "size": 16 << 20, "contender": "pycollective", "algbw": 5.0},
    ]
    assert table.report("H100, 2026-01-02", {"MPI": "MPICH"}, results, rows) == (
        "### H100, 2026-01-02\n\n"
        "|  |  |\n| --- | --- |\n| MPI | MPICH |\n\n"
        "| step | result | s | details |\n| --- | --- | --- | --- |\n"
        "| one | ok | 12 | 9.1 GB/s \\| 3 |\n"
        "| two | FAILED | 3 | exit status 1: why (full output: two.txt) |\n"
        "| three | SKIPPED |  | no compiler |\n\n"
        "| GB/s | pycollective | copies alone |\n| --- | --- | --- |\n"
        "| psum, 1 MiB | 3.14 | 10.00 |\n"
        "| all_gather, 16 MiB | 5.00 | - |\n\n"
        "Steps: 1 ok, 1 failed, 1 skipped.\n"
    )
    assert len(table.cell("x" * 1000)) < 500


@pytest.mark.parametrize(
    ("statuses", "on_devices", "want"),
    [([OK, SKIPPED], True, 0), ([OK, FAILED], True, 1), ([SKIPPED], False, 1), ([FAILED], False, 1)],
)
def test_exit_status(statuses: list[str], on_devices: bool, want: int) -> None:
    assert gpu_check.status([Result("", status, "") for status in statuses], on_devices) == want


# What others say ------------------------------------------------------------------------------------------------


def test_counts_of_pytest() -> None:
    late = "SKIPPED [7] tests/under_mpirun.py:79: LOUD: out of time after 50 s\nSKIPPED [2] t.py:1: LOUD: two ranks\n"
    assert steps.counted("....\n12 passed in 3.21s\n", seconds=50) == "12 passed"
    got = steps.counted(f"..s.\n{late}30 passed, 9 skipped in 61.00s (0:01:01)\n", seconds=50)
    assert got == "30 passed, 2 skipped, 7 not begun within 50 s"
    for nothing in ("9 skipped in 1.00s", "no tests ran in 0.01s", "Killed"):
        with pytest.raises(StepError, match="no test has passed"):
            steps.counted(nothing, seconds=50)


def test_rows_of_the_benchmark() -> None:
    def row(contender: str, wrong: int) -> str:
        figures = (1104.3, 1057.3, 1147.0, 0.95, 0.94, wrong, None, 0.1)
        return Row("psum", "jit", 1 << 20, 1 << 18, "float32", contender, *figures).line()

    lines = ["# pycollective 0.1.0: 2 rank(s)", "", "# psum, jit", "#  size  count", row("pycollective", 0)]
    lines += [row("raw MPI", 3), "", "# all_gather, jit", row("through NumPy", 0), "# wrong results: 0"]
    output = "\n".join(lines)
    assert steps.bandwidth_rows(output) == [
        {"op": "psum", "size": 1 << 20, "contender": "pycollective", "us": 1104.3, "algbw": 0.95, "wrong": 0},
        {"op": "psum", "size": 1 << 20, "contender": "raw MPI", "us": 1104.3, "algbw": 0.95, "wrong": 3},
        {"op": "all_gather", "size": 1 << 20, "contender": "through NumPy", "us": 1104.3, "algbw": 0.95, "wrong": 0},
    ]


def test_what_a_program_of_ranks_tells() -> None:
    assert steps.told("facts", 'noise\nfacts: {"a": 1}\nmore') == {"a": 1}
    with pytest.raises(StepError, match="it printed no result: noise"):
        steps.told("facts", "noise\nother: {}")


def test_losses_are_compared() -> None:
    assert "at most 5.0e-04 away" in steps.compared([2.001, 1.0], [2.0, 1.0])
    for wrong in ([2.01, 1.0], [2.0, float("nan")], [2.0]):
        with pytest.raises(StepError):
            steps.compared(wrong, [2.0, 1.0])


# Profiles -------------------------------------------------------------------------------------------------------


def test_spans() -> None:
    spans = [Span(5, 7), Span(0, 2), Span(1, 3), Span(7, 8)]
    assert streams.union(spans) == [Span(0, 3), Span(5, 8)]
    assert streams.length(spans) == 6
    assert streams.common(spans, [Span(2, 6), Span(7.5, 20)]) == [Span(2, 3), Span(5, 6), Span(7.5, 8)]
    assert streams.common(spans, []) == []


def test_sums_are_under_way_from_the_first_copy_to_the_last() -> None:
    # A sum of three pieces, where each piece comes before the last one has gone; then a sum of one piece.
    come = [Span(0, 1), Span(1, 2), Span(4, 5), Span(20, 22)]
    gone = [Span(3, 4), Span(6, 7), Span(8, 9), Span(30, 31)]
    assert streams.under_way(come, gone) == [Span(0, 9), Span(20, 31)]
    with pytest.raises(ValueError, match="as many copies to the device as from it, got 1 and 2"):
        streams.under_way([Span(0, 1), Span(2, 3)], [Span(4, 5)])


def test_overlap_of_sums_and_kernels() -> None:
    events = [
        Event("Stream #7(MemcpyD2H)", "MemcpyD2H", Span(0, 2)),
        Event("Stream #8(MemcpyH2D)", "MemcpyH2D", Span(6, 8)),
        Event("Stream #7(MemcpyD2H)", "MemcpyD2H", Span(10, 12)),
        Event("Stream #8(MemcpyH2D)", "MemcpyH2D", Span(16, 18)),
        Event("Stream #3(MemcpyD2H)", "MemcpyD2H", Span(40, 41)),  # XLA's, of the loss
        Event("Stream #1(Compute)", "gemm", Span(4, 11)),
        Event("Stream #1(Compute)", "loop_fusion", Span(30, 35)),
        Event("Stream #1(Compute)", "Memset", Span(12, 18)),
    ]
    seen = streams.overlap(events)
    assert (seen.sums, seen.kernels, seen.both) == (16, 12, 5)
    assert seen.share == 5 / 16
    with pytest.raises(ValueError, match="copies from the device and to it, got none"):
        streams.overlap(events[5:])


def test_a_profile_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a profile"):
        streams.read(tmp_path)
    with jax.profiler.trace(str(tmp_path)):
        jnp.ones(3).block_until_ready()
    with pytest.raises(ValueError, match=r"expected streams of a GPU, got .*/host:CPU"):
        streams.read(tmp_path)


# The environment ------------------------------------------------------------------------------------------------


def pack(folder: Path, build_id: str, change: bytes = b"", name: str = "pycollective-0.1.0-py3-none-any.whl") -> Path:
    """Makes a wheel of this tree's Python files, with a native library of this build ID."""
    wheel = folder / name
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(environment.NATIVE, b"\x7fELF" + NOTE + bytes.fromhex(build_id))
        for file in (ROOT / "pycollective").rglob("*.py"):
            archive.writestr(str(file.relative_to(ROOT)), file.read_bytes() + change)
    return wheel


def test_a_wheel_of_this_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = build_id.of_sources(ROOT), "ab" * 32
    monkeypatch.setattr(environment, "has_compiler", lambda: False)
    with pytest.raises(StepError, match=r"expected a wheel of the package or a C\+\+ compiler, got neither"):
        environment.wheel_of(tmp_path, ROOT)
    monkeypatch.setattr(environment, "has_compiler", lambda: True)
    assert environment.wheel_of(tmp_path, ROOT) is None
    assert environment.wheel_of(None, ROOT) is None
    # A wheel of other sources is refused, with or without a compiler.
    remedy = rf"Make it from this tree: scripts/gpu-carry {tmp_path}"
    wheel = pack(tmp_path, other)
    native = rf"native library of this tree \(build ID {own[:12]}\), got one of other sources \(abababababab\)\. {remedy}"
    with pytest.raises(StepError, match=native):
        environment.wheel_of(tmp_path, ROOT)
    pack(tmp_path, "")
    with pytest.raises(StepError, match="got one without a build ID"):
        environment.wheel_of(tmp_path, ROOT)
    pack(tmp_path, own, b"# older\n")
    python = rf"the Python files of this tree, got another pycollective/__init__\.py\. {remedy}"
    with pytest.raises(StepError, match=python):
        environment.wheel_of(tmp_path, ROOT)
    pack(tmp_path, own)
    assert environment.wheel_of(tmp_path, ROOT) == wheel
    pack(tmp_path, other, name="pycollective-0.0.9-py3-none-any.whl")
    assert environment.wheel_of(tmp_path, ROOT) == wheel, "an older one beside it"


def test_the_build_id_is_that_of_the_sources(tmp_path: Path) -> None:
    for name in ("setup.py", "pycollective/doctor/build_id.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "one.cc").write_text('#include "one.h"\nint one() { return kOne; }\n')

    def built(header: str) -> str:
        (tmp_path / "native" / "one.h").write_text(header)
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tmp_path, check=True)
        found = build_id.of_library((tmp_path / environment.NATIVE).read_bytes())
        assert found == build_id.of_sources(tmp_path)
        return found

    first = built("constexpr int kOne = 1;\n")
    assert built("constexpr int kOne = 2;\n") != first
    assert build_id.of_library(b"\x7fELF") == ""


def test_no_folder_of_somebody_elses_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    step = Step(tmp_path / "log", time.monotonic() + 10)
    with pytest.raises(StepError, match="to be a virtual environment, got something else"):
        environment.make(step, ROOT, tmp_path)
    assert (tmp_path / "mine").exists()


def test_the_runner_needs_the_standard_library_alone() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import tests.gpu_check.__main__"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
