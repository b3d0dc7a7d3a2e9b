"""``pycollective bench``, run as users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pycollective.bench.operations import OPERATIONS
from tests.e2e.launch import mpirun

pytestmark = pytest.mark.whole
EVERY = [*OPERATIONS, "step", "tree"]


def test_every_operation(tmp_path: Path) -> None:
    data, page = tmp_path / "bench.json", tmp_path / "bench.html"
    options = ["-b", "64", "-e", "4K", "-f", "64", "-n", "5", "--model", "many-small", "--against", "numpy,copies"]
    done = mpirun(
        2, "-m", "pycollective", "bench", *EVERY, *options, "--json", str(data), "--plot", str(page), timeout=200
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(data.read_text())["rows"]
    assert {row["op"] for row in rows} == {*EVERY[:-1], "tree:many-small"}
    assert {row["wrong"] for row in rows} == {0}
    for row in rows:
        assert 0 < row["min_us"] <= row["median_us"] <= row["p99_us"]
        assert row["algbw"] == pytest.approx(row["size"] / row["median_us"] / 1e3)
        if row["implementation"] == "raw MPI":
            assert row["over_raw"] == 1
        if row["op"] == "psum":  # busbw = algbw * 2 (n - 1) / n, and n = 2
            assert row["busbw"] == pytest.approx(row["algbw"])
        elif row["op"] == "all_gather":
            assert row["busbw"] == pytest.approx(row["algbw"] / 2)
    implementations = {op: {row["implementation"] for row in rows if row["op"] == op} for op in EVERY[:-1]}
    assert implementations["psum"] == {"pycollective", "raw MPI", "through NumPy", "copies alone"}
    assert implementations["all_gather"] == {"pycollective", "raw MPI", "through NumPy"}  # no copies
    for op in EVERY[:-2]:
        assert [r["size"] for r in rows if (r["op"], r["implementation"]) == (op, "pycollective")] == [64, 4096]
    assert "wrong results: 0" in done.stdout
    assert "<svg" in page.read_text()


MODES = ["--modes", "jit,eager,loop", "--loop", "3"]
DEVICES = ["--donate", "both", "--devices", "2"]


@pytest.mark.parametrize("options", [MODES, DEVICES], ids=["modes", "devices"])
def test_modes_and_devices(options: list[str], tmp_path: Path) -> None:
    data = tmp_path / "bench.json"
    sizes = ["-b", "1K", "-e", "1M", "-f", "1024", "-n", "3"]
    done = mpirun(
        2, "-m", "pycollective", "bench", "psum", "ppermute", *sizes, *options, "--json", str(data), timeout=100
    )
    assert done.returncode == 0, done.stderr
    rows = [row for row in json.loads(data.read_text())["rows"] if row["implementation"] == "pycollective"]
    modes = {"jit", "eager", "loop"} if options == MODES else {"jit", "jit, donated"}
    assert {(row["op"], row["mode"]) for row in rows} == {(op, mode) for op in ("psum", "ppermute") for mode in modes}
    assert {row["wrong"] for row in rows} == {0}


def test_both_where_an_operand_cannot_be_donated(tmp_path: Path) -> None:
    data = tmp_path / "bench.json"
    options = ["-b", "1K", "-e", "1K", "-n", "3", "--donate", "both", "--json", str(data)]
    done = mpirun(2, "-m", "pycollective", "bench", "psum", "all_gather", *options, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = json.loads(data.read_text())["rows"]
    assert {(r["op"], r["mode"]) for r in rows} == {("psum", "jit"), ("psum", "jit, donated"), ("all_gather", "jit")}


@pytest.mark.parametrize("devices", [1, 2])
def test_an_implementation_in_subprocesses(devices: int, tmp_path: Path) -> None:
    data = tmp_path / "bench.json"
    operations = EVERY if devices > 1 else ["psum"]
    options = ["-b", "4K", "-e", "4K", "-n", "5", "--model", "many-small", "--devices", str(devices)]
    against = ["--against", "floor,jax-gloo", "--json", str(data)]
    done = mpirun(2, "-m", "pycollective", "bench", *operations, *options, *against, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "connected to" not in done.stdout  # gloo prints this, but it must not get into the table
    assert "Warning" not in done.stderr  # it shares the cores with our ranks, which have their devices already
    every = json.loads(data.read_text())["rows"]
    assert {row["implementation"] for row in every if row["op"] == "psum"} >= {"raw MPI", "dispatch, raw MPI"}
    rows = [row for row in every if row["implementation"] == "jax gloo"]
    measured = {*EVERY[:-1], "tree:many-small"} - {"broadcast"} if devices > 1 else {"psum"}  # XLA has no broadcast
    assert {row["op"] for row in rows} == measured
    assert {row["wrong"] for row in rows} == {0}
    for row in rows:
        assert 0 < row["min_us"] <= row["median_us"]
        if row["op"] == "psum":
            assert row["busbw"] == pytest.approx(row["algbw"] * 2 * (2 * devices - 1) / (2 * devices))


def test_starts_its_own_ranks() -> None:
    command = [sys.executable, "-m", "pycollective", "bench", "-e", "8", "-n", "3", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 rank(s) x 1 device(s)" in done.stdout


def test_an_unknown_operation() -> None:
    done = mpirun(2, "-m", "pycollective", "bench", "psum", "pusm", timeout=60)
    assert done.returncode != 0
    assert "expected one of psum" in done.stderr
    assert "'pusm'" in done.stderr


def test_one_rank(tmp_path: Path) -> None:
    options = ["-e", "8", "-n", "3", "--ranks", "1"]
    done = mpirun(1, "-m", "pycollective", "bench", "psum", "all_to_all", *options, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "1 rank(s)" in done.stdout


def test_narrow_numbers(tmp_path: Path) -> None:
    data = tmp_path / "bench.json"
    options = ["-b", "4K", "-e", "4K", "-n", "3", "-d", "bfloat16,float16,int8", "--wire-dtype", "bfloat16"]
    done = mpirun(2, "-m", "pycollective", "bench", "psum", *options, "--json", str(data), timeout=100)
    assert done.returncode == 0, done.stderr
    rows = json.loads(data.read_text())["rows"]
    assert {(row["type"], row["implementation"]) for row in rows if row["type"] == "bfloat16"} == {
        ("bfloat16", "pycollective"),
        ("bfloat16", "pycollective, bfloat16"),
    }
    assert {row["wrong"] for row in rows} == {0}
