"""The account of allocated memory, by which measured plans say what they took."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from pycollective.planning import allocation

MIB = 1 << 20


@pytest.fixture
def fresh() -> Iterator[None]:
    """The account is looked for anew, and once more after the test."""
    allocation._reader.cache_clear()
    yield
    allocation._reader.cache_clear()


def test_what_another_thread_has_for_a_moment_counts() -> None:
    def work() -> None:
        block = np.ones(32 * MIB, np.uint8)
        time.sleep(0.02)
        del block

    before = allocation.settled()
    with allocation.peak() as most:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        time.sleep(0.02)
    assert 31 * MIB < most.nbytes - before < 33 * MIB  # other threads may free a little meanwhile
    assert allocation.settled() - before < MIB


@pytest.mark.parametrize("nbytes", [4096, 20 * MIB, 200 * MIB])  # in malloc's pools, and blocks of their own
def test_what_is_freed_does_not_count(nbytes: int) -> None:
    before = allocation.settled()
    block = np.ones(nbytes, np.uint8)
    held = allocation.allocated() - before
    del block
    with allocation.peak() as most:
        time.sleep(0.02)
    assert held > nbytes - 2048
    assert most.nbytes - before < nbytes / 2 + MIB


@pytest.mark.usefixtures("fresh")
def test_another_malloc_has_no_account_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library loaded before the GNU C library has its own malloc, so the C library's account stands still."""

    class Libc:
        def __init__(self, *_: object) -> None:
            self.mallinfo2 = lambda: account
            self.malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(lambda nbytes: 16)
            self.free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda block: None)

    account = allocation._Account(uordblks=123)
    monkeypatch.setattr(ctypes, "CDLL", Libc)
    assert allocation.allocated() == math.inf
    with allocation.peak() as most:
        time.sleep(0.01)
    assert most.nbytes == math.inf


@pytest.mark.usefixtures("fresh")
def test_a_c_library_without_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert allocation.allocated() == math.inf
