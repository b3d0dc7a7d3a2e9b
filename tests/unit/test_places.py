"""A collective stands in few places, which docs/contributing.md lists. This test fails if one more comes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What makes up exscan, and no other operation.
PLACES = {
    "native/base/operations.h",  # the row of the table
    "native/mpi/library_of.h",  # the function that calls MPI
    "native/mpi/mpi.h",  # MPI's function
    "native/shared_memory/combine.cc",  # what a rank makes of the others' operands, where they share memory
    "pycollective/__init__.pyi",  # the public name
    "pycollective/collectives/mpi_collectives.py",  # the public function
    "pycollective/primitives/reductions.py",  # the registration
    "pycollective/transport/mpi4jax_operations.py",  # the operation made of mpi4jax's
}


def test_a_collective_stands_in_few_files() -> None:
    files = [*ROOT.glob("native/**/*.*"), *ROOT.glob("pycollective/**/*.py*")]
    files.remove(ROOT / "native" / "xla" / "xla_mpi_names.h")  # all names that XLA looks up, of whatever we have
    texts = {file: file.read_text() for file in files if file.suffix in (".cc", ".h", ".py", ".pyi")}
    found = {str(file.relative_to(ROOT)) for file, text in texts.items() if re.search("exscan", text, re.IGNORECASE)}
    assert found == PLACES


def test_the_page_names_them() -> None:
    page = (ROOT / "docs" / "contributing.md").read_text()
    assert {place for place in PLACES if place not in page} == set()
