"""Variables of this process for what reads them while it starts: XLA's client, a process that comes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """``name`` is ``value`` herein, and afterwards what it was.

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
