"""Environment variables of this process that libraries read when they start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NATIVE_LIBRARY = Path(__file__).parent / "_native.so"
"""The compiled library."""

XLA_MPI = "MPITRAMPOLINE_LIB"
"""The variable that names the library which XLA opens, once, when Python imports jaxlib, for its own collectives."""


def offer_mpi_to_xla() -> None:
    """Lets XLA open our library, for :func:`pycollective.distributed.initialize`. It is too late if it was imported.

    The library calls no MPI until pycollective has started, so this changes nothing for other programs.
    """
    if "jaxlib" not in sys.modules and NATIVE_LIBRARY.exists():
        os.environ.setdefault(XLA_MPI, str(NATIVE_LIBRARY))


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Sets the variable ``name`` to ``value`` inside, and restores it afterwards.

    Example:
        >>> with variable("PYCOLLECTIVE_EXAMPLE", "1"):
        ...     os.environ["PYCOLLECTIVE_EXAMPLE"]
        '1'
        >>> "PYCOLLECTIVE_EXAMPLE" in os.environ
        False
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def without_proxies() -> Iterator[None]:
    """Inside, this process has no variable of a proxy, such as ``http_proxy``; they are restored afterwards.

    gRPC sends even what goes to a host of the same job through a proxy, which cannot reach it.

    Example:
        >>> with variable("EXAMPLE_PROXY", "http://proxy:8080"), without_proxies():
        ...     "EXAMPLE_PROXY" in os.environ
        False
    """
    before = {name: os.environ.pop(name) for name in list(os.environ) if "_proxy" in name.lower()}
    try:
        yield
    finally:
        os.environ.update(before)
