"""Runs the targets in C++ under sanitizers: on their corpus, then for some seconds on inputs changed at random."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.fuzz.build import CORPUS, FOLDER, SANITIZED, SOURCES, build
from tests.standin import compile_cpp

SECONDS, SEED = 3, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_every_target_is_built() -> None:
    assert {path.stem for path in FOLDER.glob("*_fuzz.cc")} == set(SOURCES)


@pytest.mark.parametrize("target", SOURCES)
def test_target(target: str, folder: Path) -> None:
    command = [build(target, folder), CORPUS / target, str(SECONDS), str(SEED)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    kept = folder / f"crash-{SEED}"
    assert run.returncode == 0, f"{run.stderr}\ninput: {kept.read_bytes() if kept.exists() else None!r}"
    files, changed = (int(part.split()[0]) for part in run.stdout.split(","))
    assert files == len(list((CORPUS / target).iterdir())) > 0
    assert changed > 0


FAILS = """
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
volatile uint8_t last;
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 6 && std::memcmp(data, "abort!", 6) == 0) std::abort();
  if (size == 6 && std::memcmp(data, "beyond", 6) == 0) last = data[size];
  return 0;
}
"""


@pytest.mark.parametrize(("text", "said"), [("abort!", ""), ("beyond", "heap-buffer-overflow")])
def test_the_driver_keeps_an_input_that_fails(text: str, said: str, tmp_path: Path) -> None:
    source = tmp_path / "fails.cc"
    source.write_text(FAILS)
    program = compile_cpp([FOLDER / "driver.cc", source], tmp_path / "fails", *SANITIZED)
    for name, content in (("1", "fine"), ("2", text)):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        (tmp_path / "corpus" / name).write_text(content)
    run = subprocess.run([program, "corpus", "0", "5"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    assert said in run.stderr
    assert (tmp_path / "crash-5").read_text() == text
