"""Tests the runner of ``scripts/gpu-check``: limits, missing things, the report, and reading the output of programs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pycollective import build_id
from pycollective.bench.report import Row
from tests.gpu_check import __main__ as gpu_check
from tests.gpu_check import carry, environment, steps, streams, table
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
    assert runner.results[0].text.startswith("it did not end within the limit of this step, 2 s: on its way")
    left = [pid for pid in Path("/proc").glob("[0-9]*") if b"gpu-check-child" in command_line(pid)]
    assert not left


def command_line(pid: Path) -> bytes:
    try:
        return (pid / "cmdline").read_bytes()
    except OSError:
        return b""


def test_what_may_fail_must_end_all_the_same(tmp_path: Path) -> None:
    runner = Runner(tmp_path, 100)
    words = [sys.executable, "-c", "print('partly', flush=True); raise SystemExit(1)"]
    assert runner.step("fails", 30, lambda step: step.run(words, partly=True).strip())
    assert runner.results[0].text == "partly"
    words[2] = SLEEPS
    assert not runner.step("hangs", 0.5, lambda step: step.run(words, partly=True))
    assert runner.results[1].status == FAILED
    assert runner.results[1].text.startswith("it did not end within the limit of this step, 0.5 s: ")


def test_a_slow_start_of_jax_is_no_missing_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_check.FIND_GPUS_S >= 120
    monkeypatch.setattr(gpu_check, "FIND_GPUS_S", 0.5)
    monkeypatch.setattr(gpu_check, "_FIND_GPUS", SLEEPS)
    runner = Runner(tmp_path, 100)
    gpu_check.check(runner, gpu_check.parse(["--here"]), steps.Place(Path(sys.executable), ROOT, tmp_path))
    first, *others = runner.results
    assert (first.name, first.status) == ("GPUs", FAILED)
    assert "did not end within the limit" in first.text
    assert {(other.status, other.text) for other in others} == {
        (SKIPPED, "it is not known whether there is a GPU: the step 'GPUs' has failed")
    }
    assert gpu_check.status(runner.results, False) == 1


def test_the_first_start_of_jax_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_devices = gpu_check._FIND_GPUS.replace('"cuda"', '"cpu"')
    monkeypatch.setattr(gpu_check, "_FIND_GPUS", f"{cpu_devices}\nprint('a warning of a plugin')")
    facts: dict[str, object] = {}
    text = gpu_check.find_gpus(Step(tmp_path / "log", 60), sys.executable, facts)
    assert re.fullmatch(r"\d+ x cpu; the first start of JAX took \d+ s", text)
    assert set(facts["gpus"]) == {"cpu"}  # type: ignore[call-overload]


def test_logs_of_an_earlier_run_are_gone(tmp_path: Path) -> None:
    Runner(tmp_path, 100).step("one", 30, run("-c", "print(1)"))  # type: ignore[arg-type]
    Runner(tmp_path, 100).step("two", 30, run("-c", "print(2)"))  # type: ignore[arg-type]
    assert [log.name for log in tmp_path.iterdir()] == ["two.txt"]


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


INTERRUPTED = f"""
import sys
from tests.gpu_check import __main__ as gpu_check, steps
sleeps = lambda step: step.run([sys.executable, "-c", {SLEEPS!r}])
steps.steps_of = lambda place: [steps.PlannedStep("sleeps", 60, sleeps), steps.PlannedStep("later", 60, sleeps)]
sys.exit(gpu_check.main(["--here", "--out", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_report(tmp_path: Path, number: signal.Signals) -> None:
    report, log = tmp_path / "report.md", tmp_path / "report-logs" / "sleeps.txt"
    environ = {**os.environ, "PYCOLLECTIVE_TEST_STANDIN": "staged", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", INTERRUPTED, str(report)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        while "on its way" not in (log.read_text() if log.exists() else ""):
            assert process.poll() is None
            time.sleep(0.01)
        while process.poll() is None:  # a later one must not keep it from writing the report
            process.send_signal(number)
            time.sleep(0.001)
        out, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number, errors
    told = rf"\| sleeps \| FAILED \| \d+ \| interrupted by {number.name} \(full output: sleeps.txt\) \|"
    assert re.search(told, out)
    assert f"| the rest | SKIPPED |  | interrupted by {number.name} |" in out
    assert "later" not in out
    assert report.read_text() == out
    with tarfile.open(tmp_path / "report-logs.tar.gz") as archive:
        assert set(archive.getnames()) == {".", "./sleeps.txt", "./report.md"}


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


def test_warnings_are_counted_and_no_failure(tmp_path: Path) -> None:
    assert steps.counted("..\n2 passed, 1 warning in 0.10s\n", seconds=50) == "2 passed, 1 warning"
    test = tmp_path / "test_warns.py"
    test.write_text("import warnings\ndef test_warns():\n    warnings.warn('the driver is old', RuntimeWarning)\n")
    own = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(test)]
    command = [sys.executable, "-m", "pytest", *steps.PYTEST, *own]
    output = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout
    assert steps.counted(output, seconds=50) == "1 passed, 1 warning"


class Bench(Step):
    """A step in which ``pycollective bench`` prints what ``figures`` says of a size and the environment."""

    def __init__(self, figures: Callable[[int, str, Mapping[str, str]], float], sizes: Sequence[int]) -> None:
        self._figures, self._sizes = figures, sizes
        self.commands: list[list[str]] = []

    def run(self, command: Sequence[str | Path], *, environ: Mapping[str, str], **_: object) -> str:  # type: ignore[override]
        self.commands.append(list(map(str, command)))
        lines = ["# psum, jit"]
        for size in self._sizes:
            for contender in ("pycollective", "raw MPI", "through NumPy", "copies alone"):
                figure = self._figures(size, contender, environ)
                figures = (figure, figure, figure, figure, figure, 0, None, 0.1)
                lines.append(Row("psum", "jit", size, size // 4, "float32", contender, *figures).line())
        return "\n".join(lines)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> steps.Place:
    """One H200."""
    monkeypatch.setattr(steps.Place, "ranks", lambda _, number: ["mpiexec", "-n", str(number)])
    return steps.Place(Path(sys.executable), ROOT, Path(), facts={"gpus": ["H200"]})


def test_pieces_are_compared_with_copies_alone(place: steps.Place) -> None:
    def figure(size: int, contender: str, environ: Mapping[str, str]) -> float:
        piece = int(environ["PYCOLLECTIVE_STAGE_BYTES"])
        return 40.0 if contender == "copies alone" else size / (1 << 24) + piece / (1 << 20)

    bench = Bench(figure, (16 << 20, 256 << 20))
    got = steps.pieces(place, bench, "256M")
    assert [command[command.index("-b") : command.index("-n", 4)] for command in bench.commands] == [
        ["-b", "16M", "-e", "256M", "-f", "16"]
    ] * 3
    assert got == (
        "psum on 1 rank, GB/s; 16 MiB: 2.0 in pieces of 1 MiB (0.05 of copies alone), 5.0 in pieces of 4 MiB (0.12 of "
        "copies alone), 17.0 in pieces of 16 MiB (0.42 of copies alone); 256 MiB: 17.0 in pieces of 1 MiB (0.42 of "
        "copies alone), 20.0 in pieces of 4 MiB (0.50 of copies alone), 32.0 in pieces of 16 MiB (0.80 of copies alone)"
    )
    assert table.cell(got) == got


def test_latency_of_small_sums(place: steps.Place) -> None:
    def figure(size: int, contender: str, _: Mapping[str, str]) -> float:
        return 300.0 + size if contender == "through NumPy" else 70.2 + size / 1000

    bench = Bench(figure, [8 << i for i in range(14)])
    assert steps.latency(place, bench) == (
        "psum, microseconds: 1 rank: 8 B 70, 512 B 71, 4096 B 74, 65536 B 136 (through NumPy from 308); "
        "2 ranks: 8 B 70, 512 B 71, 4096 B 74, 65536 B 136 (through NumPy from 308)"
        " (ranks share a GPU by time slices, so this is no figure of ranks with a GPU each)"
    )
    assert "-b 8 -e 64K -f 2" in " ".join(bench.commands[0])


def test_figures_of_ranks_that_share_a_gpu_say_so(place: steps.Place) -> None:
    assert "share a GPU by time slices" in steps.shared(place, 2)
    assert steps.shared(place, 1) == ""
    profile = {"sums": 20.0, "kernels": 17.0, "share": 0.5}
    place.facts["overlap"] = {"profile": profile}
    in_profile = (
        "sums are under way for 20.0 ms a step, kernels run for 17.0 ms; kernels run during 50% of the sums' time"
    )
    assert steps.overlap_in_profile(place, Bench(lambda *_: 0, ())).startswith(f"{in_profile} (ranks share a GPU")
    place.facts["gpus"] = ["H200", "H200"]
    assert steps.overlap_in_profile(place, Bench(lambda *_: 0, ())) == in_profile


def test_what_each_sum_of_a_step_costs() -> None:
    ms = {"step": 28.0, "compute": 22.0, "sums": 20.0}
    found = {"rows": 2944, "width": 2048, "layers": 6, "ms": ms, "begun": 4}
    assert steps.overlap_text(found) == (
        "6 layers of 2048 x 2048, 2944 rows: 28.0 ms a step, 22.0 computing alone, 20.0 summing alone; "
        "70% of the shorter one is hidden, and each of 4 sums costs 1.50 ms of a step"
    )
    with pytest.raises(StepError, match="expected sums that run while the GPU computes"):
        steps.overlap_text({**found, "begun": 0})


def test_xla_does_not_autotune_in_any_step(place: steps.Place) -> None:
    known = steps._accepted_flags(place, Bench(lambda *_: 0, ()), steps._AUTOTUNING)
    place.facts["xla_flags"] = known
    want = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    assert place.environ(XLA_FLAGS="")["XLA_FLAGS"] == ""
    assert place.environ()["XLA_FLAGS"].endswith(want)


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
    native = (
        rf"native library of this tree \(build ID {own[:12]}\), got one of other sources \(abababababab\)\. {remedy}"
    )
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
    for name in ("setup.py", "pycollective/build_id.py"):
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


def run_in_bash(command: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, **environ}
    return subprocess.run(["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=60)


def script(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def test_the_command_for_the_gpu_machine(tmp_path: Path) -> None:
    command = carry.command("some wheels", "3.12", "v0.1.0-12-g6aff178-dirty")
    assert len(command) <= carry.LONGEST == 2000
    assert gpu_check.SECONDS <= carry.SECONDS < carry.TERM_S < 9 * 60
    # The machine runs it in the tree, and brings back what is in $OUT.
    out = tmp_path / "out put"
    makes = (
        'mkdir -p "$OUT/gpu-check-logs"; touch "$OUT/gpu-check-logs/a" "$OUT/gpu-check.md" "$OUT/gpu-check-logs.tar.gz"'
    )
    script(tmp_path / "scripts" / "gpu-check", f'{makes}; printf "%s\\n" "$@"; exit 3')
    done = run_in_bash(command, tmp_path, OUT=str(out))
    assert done.returncode == 3, done.stderr
    options = gpu_check.parse(done.stdout.splitlines())
    assert (options.python, options.out) == ("python3.12", out / "gpu-check.md")
    assert (options.wheels.name, options.commit) == ("some wheels", "v0.1.0-12-g6aff178-dirty")
    assert (options.seconds, options.only, options.here, options.quick) == (carry.SECONDS, "", False, False)
    assert {file.name for file in out.iterdir()} == {"gpu-check.md", "gpu-check-logs.tar.gz"}


def test_it_gets_a_signal_before_the_machine_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "TERM_S", 0.2)
    script(tmp_path / "scripts" / "gpu-check", "trap 'echo report; exit 143' TERM; while :; do sleep 0.05; done")
    done = run_in_bash(carry.command("wheels", "3.12", "x"), tmp_path)
    assert (done.stdout, done.returncode) == ("report\n", 143)


def test_the_command_is_for_a_wheel_of_this_tree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu_check.carry", str(tmp_path), "3.12", "x"]
    pack(tmp_path, "ab" * 32)
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert "a native library of this tree" in done.stderr
    pack(tmp_path, build_id.of_sources(ROOT))
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"{carry.command(str(tmp_path), '3.12', 'x')}\n")


def test_the_python_that_has_jax_is_taken(tmp_path: Path) -> None:
    for name, has_jax in (("python3", 1), ("python3.13", 1), ("python3.12", 0), ("python3.11", 0)):
        asked = f'case "$2" in *jax*) exit {has_jax} ;; "import sys; sys.exit"*) exit 0 ;; *) echo {name} ;; esac'
        script(tmp_path / name, asked)
    assert run_in_bash(str(ROOT / "scripts" / "gpu-check"), tmp_path, PYTHON="").stdout == "python3.12\n"
    for name in ("python3.12", "python3.11"):
        (tmp_path / name).write_text((tmp_path / name).read_text().replace("exit 0", "exit 1"))
    assert run_in_bash(str(ROOT / "scripts" / "gpu-check"), tmp_path, PYTHON="").stdout == "python3\n"


def test_no_folder_of_somebody_elses_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    step = Step(tmp_path / "log", 10)
    with pytest.raises(StepError, match="to be a virtual environment, got something else"):
        environment.make(step, ROOT, tmp_path)
    assert (tmp_path / "mine").exists()


def test_the_runner_needs_the_standard_library_alone() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import tests.gpu_check.__main__"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
