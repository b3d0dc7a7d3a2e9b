"""What of the documentation is made from the code is what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("script", ["operations.py", "pictures/draw.py"])
def test_made_anew_it_is_the_same(script: str) -> None:
    done = subprocess.run([sys.executable, str(DOCS / script), "--check"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
