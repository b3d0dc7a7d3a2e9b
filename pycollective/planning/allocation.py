"""How much memory this process has from malloc, and the most that it has at one time."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

_PROBE = 1 << 20


class _Account(ctypes.Structure):
    """What mallinfo2(3) returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Peak:
    """The most that was allocated at one time.

    Attributes:
        nbytes: the number of bytes. Infinite where malloc does not say.
    """

    nbytes = 0.0


@contextmanager
def peak() -> Iterator[Peak]:
    """Looks at what is allocated as often as it can until the block ends.

    What is there for a few microseconds only may be missed. Memory that malloc keeps after it was freed does not count,
    other than in the system's account of the process.

    Example:
        >>> before = settled()
        >>> with peak() as most:
        ...     block = bytes(1 << 26)
        ...     time.sleep(0.05)
        ...     del block
        >>> 0.9 < (most.nbytes - before) / (1 << 26) < 1.1
        True
    """
    most = Peak()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            most.nbytes = max(most.nbytes, allocated())
            time.sleep(5e-5)  # who wakes up comes before those that compute, also where they share a core

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield most
    finally:
        ended.set()
        looking.join()


def settled() -> float:
    """Returns what is allocated once it gets no less. XLA frees arrays a little after the results are ready."""
    gc.collect()
    least = allocated()
    quiet = 0
    while quiet < 3:  # the thread that frees them may have to wait for a core
        time.sleep(0.02)
        now = allocated()
        quiet = quiet + 1 if now >= least else 0
        least = min(least, now)
    return now


def allocated() -> float:
    """Returns the bytes that malloc has given to this process. Infinite where it does not say."""
    read = _reader()
    return math.inf if read is None else _sum(read())


def has_arrays() -> bool:
    """Returns whether :func:`allocated` counts the arrays of this process: they are on CPU devices, and it is known."""
    return jax.local_devices()[0].platform == "cpu" and math.isfinite(allocated())


def _sum(account: _Account) -> int:
    return int(account.uordblks) + int(account.hblkhd)  # parts of its pools, and blocks of their own


@functools.cache
def _reader() -> Callable[[], _Account] | None:
    """mallinfo2 where it speaks of the malloc that this process uses: that of the GNU C library from version 2.33."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    read = libc.mallinfo2
    read.restype = _Account
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    before = _sum(read())
    block = libc.malloc(_PROBE)
    grown = _sum(read()) - before
    libc.free(block)
    return read if grown >= _PROBE // 2 else None  # another malloc was loaded before: LD_PRELOAD
