"""The Python in the pages runs, on 2 ranks. Cells of docs/first_steps.md run in scripts/docs, which builds the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.launch import mpirun

pytestmark = pytest.mark.whole
ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"(<!-- not run: .+ -->\n+)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What a block may use that does not import the package itself.
_BEFORE = """\
import jax
import jax.numpy as jnp
from jax import lax

import pycollective as pc

comm = pc.init()
"""


# A start of the ranks takes longer than most blocks.
_RUN = """\
import runpy
import sys

for file in sys.argv[1:]:
    runpy.run_path(file, run_name="__main__")
"""


def pages() -> Iterator[object]:
    """The blocks of Python in each page, by their lines; but the README's program, which test_readme.py runs.

    A page says why a block is not run, in a comment above it: ``<!-- not run: why -->``. A block whose workers import
    the main module runs by itself, as that module.
    """
    elsewhere = (ROOT / "examples" / "norm.py").read_text()
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text, together, name = page.read_text(), {}, str(page.relative_to(ROOT))
        for found in _BLOCK.finditer(text):
            line = text[: found.start()].count("\n") + 1
            if found[1] is None and found[2] != elsewhere:
                if "__name__" in found[2]:
                    yield pytest.param({line: found[2]}, id=f"{name}:{line}")
                else:
                    together[line] = found[2]
        if together:
            yield pytest.param(together, id=name)


@pytest.mark.parametrize("blocks", list(pages()))
def test_they_run(blocks: dict[int, str], tmp_path: Path) -> None:
    files = [tmp_path / f"line_{line}.py" for line in blocks]
    for file, code in zip(files, blocks.values(), strict=True):
        file.write_text(code if "import pycollective" in code else _BEFORE + code)
    start = () if len(files) == 1 else ("-c", _RUN)
    done = mpirun(2, *start, *map(str, files), timeout=100, cwd=tmp_path)  # a page may write files
    assert done.returncode == 0, done.stderr


def test_some_are_found() -> None:
    assert len(list(pages())) >= 4
