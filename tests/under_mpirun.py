"""For tests that every rank runs under mpirun: one report for all ranks; a hang becomes a failure with all stacks."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator

import pytest
from mpi4py import MPI

from tests import standin

if mode := os.environ.get("PYCOLLECTIVE_TEST_STANDIN"):
    standin.install(mode)

from tests.collective.programs import meet

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

_EXIT_AFTER_S = 5.0
"""The time from the dump of a stuck rank's stacks (pytest's faulthandler_timeout) to its exit, so that all can dump."""


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Only rank 0 writes a report. Another rank writes one at the end, if a test failed there."""
    if RANK != 0:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reporter._tw._file = io.StringIO()


def pytest_unconfigure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if RANK != 0 and reporter is not None and reporter.stats.get("failed", []) + reporter.stats.get("error", []):
        sys.__stderr__.write(f"\n===== rank {RANK} of {SIZE} =====\n{reporter._tw._file.getvalue()}\n")
        sys.__stderr__.flush()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test to run on all ranks; mpi-pytest ends a test with this mark with a barrier."""
    for item in items:
        item.add_marker(pytest.mark.parallel(SIZE))


@pytest.fixture(autouse=True)
def no_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends this rank, and so the job, if a test takes too long. All ranks end each test together."""
    limit = float(request.config.getini("faulthandler_timeout")) + _EXIT_AFTER_S
    timer = threading.Timer(limit, os._exit, args=(70,))
    timer.daemon = True
    timer.start()
    yield
    meet()
    timer.cancel()
