"""Environment variables of this process, set for a short time, in which a library or a child process starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


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
