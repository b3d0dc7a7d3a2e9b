"""The C++ library is a house of rooms, as the package is: folders of native/, and the file beside them."""

from __future__ import annotations

import graphlib
import re
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"

# From the top down. A file may include files of its own room, and of rooms that stand after it.
ROOMS = ("binding", "xla", "calls", "monitor", "devices", "shared_memory", "records", "mpi", "base")

FILES = {str(path.relative_to(NATIVE)): path for path in sorted(NATIVE.rglob("*")) if path.suffix in (".cc", ".h")}


def room_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".cc")


def included(path: Path) -> list[str]:
    """The library's files that a file includes. Other headers come from XLA and from C++."""
    names = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
    return [name for name in names if not name.startswith("xla/ffi/")]


ARROWS = {name: included(path) for name, path in FILES.items()}


def test_every_file_is_in_a_room() -> None:
    assert {room_of(name) for name in FILES} == set(ROOMS)


@pytest.mark.parametrize("name", FILES)
def test_arrows_between_rooms_point_down(name: str) -> None:
    own = ROOMS.index(room_of(name))
    for other in ARROWS[name]:
        assert other in FILES, f"{name} includes {other}: expected a file by its room"
        assert ROOMS.index(room_of(other)) >= own, f"{name} includes {other} from above"


def test_no_circle_of_files() -> None:
    graphlib.TopologicalSorter(ARROWS).prepare()


def test_file_names_are_unique() -> None:
    """A comment names a file without its room, and objects of the compiler lie in one folder."""
    assert len({path.name for path in FILES.values()}) == len(FILES)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".h")])
def test_guards_name_the_file(name: str) -> None:
    guard = "PYCOLLECTIVE_NATIVE_" + re.sub(r"\W", "_", name).upper() + "_"
    assert FILES[name].read_text().count(guard) == 3
