"""``python -m tests.standin staged|direct PROGRAM [ARGUMENTS...]`` runs a program whose devices are stand-ins for GPUs.

``-m MODULE`` may replace ``PROGRAM``, as for Python.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests import standin

mode, *sys.argv = sys.argv[1:]
standin.install(mode)
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # Python does the same for a program
    runpy.run_path(sys.argv[0], run_name="__main__")
