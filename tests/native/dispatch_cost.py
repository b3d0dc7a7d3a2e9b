"""Measures how long a dispatch takes, ahead of the calls and not: ``python -m tests.native.dispatch_cost``."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tests.native.build import build

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([build("dispatch_cost", Path(folder))], check=True, timeout=60)
