"""For tests that every rank runs under mpirun: one report for all ranks; a hang becomes a failure with all stacks.

``PYCOLLECTIVE_TEST_PLATFORM=cuda`` makes it an error if other devices than GPUs take part, and
``PYCOLLECTIVE_TEST_SECONDS`` skips the tests that would begin so much later than the first. Runs of tests/collective
with the same folder ``PYCOLLECTIVE_TEST_PROGRAMS`` compile a program once. They must come one after another.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import jax
import pytest
from mpi4py import MPI

from tests import standin

if mode := os.environ.get("PYCOLLECTIVE_TEST_STANDIN"):
    standin.install(mode)

from pycollective.ordering import dispatch
from tests.collective.programs import any_rank, meet

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

PLATFORM = os.environ.get("PYCOLLECTIVE_TEST_PLATFORM")
"""JAX's name of the platform whose devices must take part; None: its default is right."""

_SECONDS = os.environ.get("PYCOLLECTIVE_TEST_SECONDS")

_EXIT_AFTER_S = 5.0
"""The time from the dump of a stuck rank's stacks (pytest's faulthandler_timeout) to its exit, so that all can dump."""


def keep_programs() -> None:
    """Lets JAX take programs that an earlier run has compiled. They must run on one device of this rank.

    Each rank has a folder of its own, since JAX's cache may read a file while another process writes that file. A
    program with a token on several devices must not be written: that ends the process (jaxlib 0.10, the token has no
    layout).
    """
    if folder := os.environ.get("PYCOLLECTIVE_TEST_PROGRAMS"):
        jax.config.update("jax_compilation_cache_dir", f"{folder}/{RANK}")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def check_platform(name: str) -> None:
    """Ends the session where JAX's own devices, which take part, are of another platform."""
    found = jax.local_devices()
    with suppress(RuntimeError):  # there is no such platform
        if set(found) <= set(jax.devices(name)):
            return
    raise pytest.UsageError(f"PYCOLLECTIVE_TEST_PLATFORM: expected devices of {name}, got {found}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Only rank 0 writes a report. Another rank writes one at the end, if a test failed there."""
    if PLATFORM is not None:
        check_platform(PLATFORM)
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


@functools.cache
def first_test() -> float:
    """When this was called first."""
    return time.monotonic()


@pytest.fixture(autouse=True)
def no_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends this rank, and so the job, if a test takes too long. All ranks end each test together."""
    if _SECONDS is not None and any_rank(time.monotonic() - first_test() > float(_SECONDS)):
        pytest.skip(f"LOUD: out of time after {_SECONDS} s")
    limit = float(request.config.getini("faulthandler_timeout")) + _EXIT_AFTER_S
    timer = threading.Timer(limit, os._exit, args=(70,))
    timer.daemon = True
    timer.start()
    yield
    if PLATFORM is not None:  # a GPU tells the error that a test has caught in the next program as well
        dispatch.forget_failed_programs()
    meet()
    timer.cancel()
