"""Two ranks that each compile for two GPUs, of which the machine needs none."""

from __future__ import annotations

from tests.compiled_for_gpu import compiler
from tests.under_mpirun import *  # noqa: F403

DEVICES = 2
"""The GPUs of each rank."""

compiler.start(DEVICES)
