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


def blocks() -> Iterator[object]:
    """Each block of Python in a page, but the README's program, which test_readme.py runs.

    A page says why a block is not run, in a comment above it: ``<!-- not run: why -->``.
    """
    elsewhere = (ROOT / "examples" / "norm.py").read_text()
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        for found in _BLOCK.finditer(text):
            line = text[: found.start()].count("\n") + 1
            name = f"{page.relative_to(ROOT)}:{line}"
            if found[1] is None and found[2] != elsewhere:
                yield pytest.param(found[2], id=name)


@pytest.mark.parametrize("code", list(blocks()))
def test_it_runs(code: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(code if "import pycollective" in code else _BEFORE + code)
    done = mpirun(2, str(program), timeout=100, cwd=tmp_path)  # a page may write files
    assert done.returncode == 0, done.stderr


def test_some_are_found() -> None:
    assert len(list(blocks())) >= 4
