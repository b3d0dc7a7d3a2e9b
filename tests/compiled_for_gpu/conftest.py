"""Two ranks that each compile for two GPUs, of which the machine needs none."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.compiled_for_gpu.checks")

from tests.compiled_for_gpu import compiler  # noqa: E402
from tests.under_mpirun import *  # noqa: E402, F403

DEVICES = 2
"""The GPUs of each rank."""

compiler.start(DEVICES)
