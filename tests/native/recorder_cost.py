"""Measures what the recorder costs a call: ``python -m tests.native.recorder_cost``."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tests.native.build import build

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([build("recorder_cost", Path(folder), flags=["-O3"])], check=True, timeout=300)
