"""Files that the package writes in folders in which others may write.

See pycollective/files.py and native/monitor/own_file.h.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import pycollective as pc
from pycollective import files

LIMIT_S = 60
OF_ANOTHER_USER = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what belongs to another user")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of this user's that nobody may overwrite."""
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def planted(path: Path, target: Path) -> Path:
    """A link that another user has put in a file's place."""
    path.symlink_to(target)
    os.lchown(path, OF_ANOTHER_USER, OF_ANOTHER_USER)
    return path


@needs_root
def test_a_link_of_another_user_is_replaced(tmp_path: Path, victim: Path) -> None:
    path = planted(tmp_path / "out.json", victim)
    files.write(path, "text")
    assert (victim.read_text(), path.read_text(), path.is_symlink()) == ("precious", "text", False)


def test_a_link_of_this_user_is_followed(tmp_path: Path, victim: Path) -> None:
    path = tmp_path / "out.json"
    path.symlink_to(victim)
    files.write(path, "text")
    assert (victim.read_text(), path.is_symlink()) == ("text", True)
    dangling = tmp_path / "other.json"
    dangling.symlink_to(tmp_path / "new")
    files.write(dangling, "text")
    assert (tmp_path / "new").read_text() == "text"


def test_another_name_of_a_file_is_left_alone(tmp_path: Path, victim: Path) -> None:
    path = tmp_path / "out.json"
    path.hardlink_to(victim)
    files.write(path, "text")
    assert (victim.read_text(), path.read_text()) == ("precious", "text")


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    path.chmod(0o600)
    files.write(path, "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)


def test_an_error_leaves_what_was_there(tmp_path: Path, victim: Path) -> None:
    with pytest.raises(ZeroDivisionError), files.replaced(victim) as file:
        file.write(str(1 / 0))
    assert (victim.read_text(), list(tmp_path.iterdir())) == ("precious", [victim])


def test_standard_output_is_written_to() -> None:
    program = "from pycollective import files; files.write('/dev/stdout', 'text')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout == "text", done.stderr


def test_a_trace_does_not_follow_a_name_that_can_be_guessed(tmp_path: Path, victim: Path) -> None:
    (tmp_path / f".out.json.{os.getpid()}.part").symlink_to(victim)
    pc.init()
    with pc.trace(tmp_path / "out.json"):
        pass
    assert victim.read_text() == "precious"
    assert "traceEvents" in json.loads((tmp_path / "out.json").read_text())


def test_an_own_folder(tmp_path: Path) -> None:
    assert files.own_folder(tmp_path / "a" / "b")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert not files.own_folder(tmp_path / "link")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert not files.own_folder(tmp_path / "open")
    if os.geteuid() == 0:
        (tmp_path / "theirs").mkdir()
        os.chown(tmp_path / "theirs", OF_ANOTHER_USER, OF_ANOTHER_USER)
        assert not files.own_folder(tmp_path / "theirs")


WRITES = re.compile(r"\.write_(?:text|bytes)\(|savefig\(file|savefig\(path|\bopen\([^)]*[\"'][wax]b?\+?[\"']")


def test_all_files_are_written_this_way() -> None:
    package = Path(files.__file__).parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if WRITES.search(path.read_text())}
    assert found - {"planning/by_compiling/worker.py"} <= {"files.py"}  # the worker's is a pipe


# Records, which are written without Python ----------------------------------------------------------------------------

FAILED = """
import os, sys
from pathlib import Path
from pycollective.environment import NATIVE_LIBRARY
from pycollective.transport import native_library, watch

native_library.set_library(native_library.load(Path(NATIVE_LIBRARY)))
here = watch.Process([], os.getpid(), 1, 0, "here")
watch.start_monitor(watch.Monitoring(0, [here], [], bytes(64), 0.0, 0.0, sys.argv[1], True, False))
watch.announce_end(1, "cause")
"""


def fail(folder: Path) -> None:
    """A rank of a job that has failed writes its records."""
    subprocess.run([sys.executable, "-c", FAILED, str(folder)], timeout=LIMIT_S, check=True)


def test_records_are_in_a_folder_that_nobody_else_reads(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "records"
    fail(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert json.loads((folder / "rank-0.json").read_text())["rank"] == 0
    fail(folder)  # those of an earlier run are replaced
    assert os.listdir(folder) == ["rank-0.json"]


def test_records_do_not_follow_links(tmp_path: Path, victim: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    for name in ("rank-0.json", "rank-0.json.part"):
        (folder / name).symlink_to(victim)
    fail(folder)
    assert victim.read_text() == "precious"
    assert json.loads((folder / "rank-0.json").read_text())["rank"] == 0


def test_records_are_not_written_through_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "records").symlink_to(elsewhere)
    fail(tmp_path / "records")
    assert os.listdir(elsewhere) == []


@needs_root
def test_records_are_not_written_in_a_folder_of_another_user(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    os.chown(folder, OF_ANOTHER_USER, OF_ANOTHER_USER)
    fail(folder)
    assert os.listdir(folder) == []
