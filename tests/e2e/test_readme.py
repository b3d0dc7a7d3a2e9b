"""The README's example does what the README says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.launch import mpirun

ROOT = Path(__file__).parents[2]


def test_example(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    assert code == (ROOT / "examples/norm.py").read_text()
    found = re.search(r"mpirun -n (\d) \.venv/bin/python examples/norm\.py\n    (.*)\n", text)
    assert found is not None
    ranks, printed = found.groups()
    program = tmp_path / "norm.py"
    program.write_text(code)
    done = mpirun(int(ranks), str(program), timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def headings(page: str) -> set[str]:
    """Returns the names by which links call the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        path, _, heading = target.partition("#")
        assert (ROOT / path).exists(), target
        assert not heading or heading in headings((ROOT / path).read_text()), target
