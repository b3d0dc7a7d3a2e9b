"""Settings for tests that start jobs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that fail leave no files where the tests run, unless a test names a folder."""
    monkeypatch.setenv("PYCOLLECTIVE_RECORDS", "off")


@pytest.fixture
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The file of the program ``ENDS`` of the test's module."""
    path = tmp_path / "ends.py"
    path.write_text(request.module.ENDS)
    return str(path)
