"""``python -m tests.standin staged|direct PROGRAM [ARGUMENTS...]``: a program whose devices are stand-ins for GPUs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests import standin

mode, *sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as Python does for a program
standin.install(mode)
runpy.run_path(sys.argv[0], run_name="__main__")
