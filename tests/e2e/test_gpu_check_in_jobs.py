"""Runs ``scripts/gpu-check`` without a GPU, which it reports, and with stand-ins for GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu-check"
LEFT_OUT = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "PYTHONPATH")


def gpu_check(where: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the script in the environment of this Python, from the directory ``where``."""
    environ = {name: value for name, value in os.environ.items() if name not in LEFT_OUT} | variables
    start = [SCRIPT, "--here", "--python", sys.executable, "--out", "report.md", *options]
    return subprocess.run(
        start, capture_output=True, text=True, timeout=300, cwd=where, env=environ, stdin=subprocess.DEVNULL
    )


def lines(report: str) -> dict[str, list[str]]:
    """Returns the result and the details of each step."""
    cells = [line.strip("| ").split(" | ") for line in report.splitlines()]
    return {line[0]: [line[1], line[3]] for line in cells if len(line) == 4 and line[0] not in ("step", "---")}


def test_without_a_gpu(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "expected a GPU that JAX can use, got none: nothing was checked" in done.stderr
    steps = lines(done.stdout)
    assert steps["GPUs"][0] == "SKIPPED"
    assert steps["GPUs"][1].startswith("JAX sees no GPU: RuntimeError: ")
    assert steps["training, 2 ranks"] == ["SKIPPED", "there is no GPU"]
    assert (tmp_path / "report.md").read_text() == done.stdout


def test_steps_on_standins(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "--quick", "--only", "overlap,soak,NCCL,1 rank", PYCOLLECTIVE_TEST_STANDIN="staged")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = lines(done.stdout)
    assert steps["what is there"][0] == "ok"
    assert "arrays are staged" in steps["what is there"][1]
    assert steps["collective tests, 1 rank"][0] == "ok"
    assert "not begun within 0 s" in steps["collective tests, 1 rank"][1]
    assert steps["overlap, by the clock"][0] == "ok"
    assert steps["overlap, in a profile"][0] == "SKIPPED"
    assert "expected streams of a GPU, got" in steps["overlap, in a profile"][1]
    assert steps["soak"][0] == "ok"
    assert steps["soak"][1] == "all exact: 64 programs with kernels as XLA launches them"
    assert steps["NCCL beside MPI"][0] == "ok"
    assert "2 ranks x 2 GPUs: exact" in steps["NCCL beside MPI"][1]
    assert len(steps) == 6, "the steps that were asked for, and those that they need"


def test_dispatch_ahead_on_standins(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "--quick", "--only", "ahead", PYCOLLECTIVE_TEST_STANDIN="staged")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = lines(done.stdout)
    assert steps["dispatch ahead"][0] == "ok"
    costs = r"each of 3 sums costs -?[\d.]+ ms of a step, whose dispatch takes [\d.]+ ms"
    wanted = rf"all exact: 64 programs; not overlapped, with wait {costs}; with ahead {costs}"
    assert re.fullmatch(wanted, steps["dispatch ahead"][1])


def test_what_fails_is_told(tmp_path: Path) -> None:
    # There is no stand-in of this mode, so every rank fails at its start.
    done = gpu_check(tmp_path, "--only", "training", PYCOLLECTIVE_TEST_STANDIN="broken")
    assert done.returncode == 1
    steps = lines(done.stdout)
    assert steps["what is there"][0] == "FAILED"
    assert "(full output: what-is-there.txt)" in steps["what is there"][1]
    assert (tmp_path / "report-logs" / "what-is-there.txt").exists()
    with tarfile.open(tmp_path / "report-logs.tar.gz") as archive:
        assert {"./what-is-there.txt", "./report.md"} <= set(archive.getnames())
    assert steps["training, 2 ranks"][0] == "SKIPPED"
