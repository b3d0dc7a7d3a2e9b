"""Settings for tests that start jobs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that fail leave no files where the tests run, unless a test names a folder."""
    monkeypatch.setenv("PYCOLLECTIVE_RECORDS", "off")
