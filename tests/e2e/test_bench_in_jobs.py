"""``pycollective bench``, run as users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pycollective.bench.operations import OPERATIONS
from tests import unoptimised
from tests.e2e.launch import mpirun

pytestmark = pytest.mark.whole
EVERY = [*OPERATIONS, "step", "tree"]


PEERS = str(Path(__file__).parents[2] / "benchmarks" / "peers.py")


def bench(
    tmp_path: Path, *arguments: str, program: tuple[str, ...] = ("-m", "pycollective", "bench")
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Runs it on 2 ranks; returns the process and the rows of its table. Results are whole numbers."""
    data = tmp_path / "bench.json"
    start = (*program, *arguments, "--json", str(data))
    done = mpirun(2, *start, timeout=200, env={"XLA_FLAGS": unoptimised.flags()})
    assert done.returncode == 0, done.stderr
    rows = json.loads(data.read_text())["rows"]
    assert {row["wrong"] for row in rows} == {0}
    for row in rows:
        assert 0 < row["min_us"] <= row["median_us"] <= row["p99_us"]
        assert row["algbw"] == pytest.approx(row["size"] / row["median_us"] / 1e3)
    return done, rows


def test_every_operation(tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    options = ["-b", "4K", "-e", "4K", "-n", "2", "-w", "1", "--model", "many-small", "--against", "numpy,copies"]
    done, rows = bench(tmp_path, *EVERY, *options, "--plot", str(page))
    assert {row["op"] for row in rows} == {*EVERY[:-1], "tree:many-small"}
    for row in rows:
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
        assert [r["size"] for r in rows if (r["op"], r["implementation"]) == (op, "pycollective")] == [4096]
    assert "wrong results: 0" in done.stdout
    assert "<svg" in page.read_text()


def test_modes_and_donation(tmp_path: Path) -> None:
    options = ["-b", "1K", "-e", "1M", "-f", "1024", "-n", "3", "--modes", "jit,eager,loop", "--loop", "3"]
    _, rows = bench(tmp_path, "psum", "ppermute", *options, "--donate", "both", "--against", "jax-mpi")
    own = [(row["op"], row["mode"], row["size"]) for row in rows if row["implementation"] == "pycollective"]
    modes = ("jit", "jit, donated", "eager", "loop", "loop, donated")
    sizes = (1 << 10, 1 << 20)
    assert own == [(op, mode, size) for op in ("psum", "ppermute") for mode in modes for size in sizes]
    others = [(row["op"], row["mode"], row["size"]) for row in rows if row["implementation"] == "jax MPI"]
    assert others == [call for call in own if call[1] != "eager"]


def test_several_devices_and_a_peer(tmp_path: Path) -> None:
    operations = ["psum", "all_gather", "broadcast"]
    options = ["-b", "4K", "-e", "4K", "-n", "3", "--devices", "2", "--donate", "both", "--against", "floor,jax-gloo"]
    done, rows = bench(tmp_path, *operations, *options, program=(PEERS,))
    assert "connected to" not in done.stdout  # gloo prints this, but it must not get into the table
    assert "Warning" not in done.stderr  # it shares the cores with our ranks, which have their devices already
    measured: dict[str, set[tuple[str, str]]] = {}
    for row in rows:
        measured.setdefault(row["implementation"], set()).add((row["op"], row["mode"]))
    donated = {(op, "jit, donated") for op in ("psum", "broadcast")}  # all_gather's result has another shape
    assert measured["pycollective"] == donated | {(op, "jit") for op in operations}
    # XLA has no broadcast.
    assert measured["jax gloo"] == {(op, mode) for op, mode in measured["pycollective"] if op != "broadcast"}
    assert ("psum", "jit") in measured["raw MPI"] & measured["dispatch, raw MPI"]
    for row in rows:
        if row["op"] == "psum" and row["implementation"] in ("pycollective", "jax gloo"):
            assert row["busbw"] == pytest.approx(row["algbw"] * 2 * 3 / 4)  # n = 4


def test_it_starts_its_own_ranks_and_narrow_numbers(tmp_path: Path) -> None:
    data = tmp_path / "bench.json"
    options = ["-b", "4K", "-e", "4K", "-n", "3", "-d", "bfloat16,float16,int8", "--wire-dtype", "bfloat16"]
    command = [sys.executable, "-m", "pycollective", "bench", *options, "--ranks", "2", "--json", str(data)]
    env = {**os.environ, "XLA_FLAGS": unoptimised.flags()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "2 rank(s) x 1 device(s)" in done.stdout
    rows = json.loads(data.read_text())["rows"]
    assert {row["op"] for row in rows} == {"psum"}
    assert {(row["type"], row["implementation"]) for row in rows if row["type"] == "bfloat16"} == {
        ("bfloat16", "pycollective"),
        ("bfloat16", "pycollective, bfloat16"),
    }
    assert {row["wrong"] for row in rows} == {0}


def test_one_rank() -> None:
    options = ["-e", "8", "-n", "3", "--ranks", "1"]
    done = mpirun(1, "-m", "pycollective", "bench", "psum", "all_to_all", *options, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "1 rank(s)" in done.stdout
