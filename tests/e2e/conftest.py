"""Settings for tests that start jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

# Open MPI's launcher names its directory of temporary files by its process number alone. It cannot start where a killed
# one has left a directory of that name. So the launchers of each test have a folder of their own.


@pytest.fixture(scope="session", autouse=True)
def temporary_files_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For launchers that fixtures of modules start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("launchers")))
        yield


@pytest.fixture(autouse=True)
def temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("launchers")))


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
