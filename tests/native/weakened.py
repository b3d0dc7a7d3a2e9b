"""Weakens each memory order of the explored code in turn (``explore_test.cc``), and collects what is found then."""

from __future__ import annotations

import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

_NATIVE = Path(__file__).resolve().parents[2] / "native"

_LOAD, _STORE, _UPDATE, _FENCE = range(4)
_NAMES = {0: "relaxed", 2: "acquire", 3: "release", 4: "acq_rel", 5: "seq_cst"}
_WEAKER = {
    (_LOAD, 2): [0],
    (_LOAD, 5): [2],
    (_STORE, 3): [0],
    (_STORE, 5): [3],
    (_UPDATE, 2): [0],
    (_UPDATE, 3): [0],
    (_UPDATE, 4): [2, 3],
    (_UPDATE, 5): [4],
    (_FENCE, 2): [0],
    (_FENCE, 3): [0],
    (_FENCE, 4): [2, 3],
    (_FENCE, 5): [4],
}
"""The next weaker orders, by the kind of access and its order, with the compiler's numbers."""


class Place(NamedTuple):
    """A line of ``native/`` with an atomic access."""

    file: str
    number: int
    line: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.line}"


class Mutant(NamedTuple):
    place: Place
    order: str
    weaker: str
    addresses: tuple[str, ...]
    """The accesses in the program: the compiler has made several of a line in a template or an inline function."""


def _place(frames: list[str]) -> Place | None:
    """The line that names the order: of an access in an inline function it may be the call of that function."""
    places = []
    for frame in frames:
        path, _, number = frame.split(" ")[0].rpartition(":")
        file = Path(path).resolve()
        if _NATIVE in file.parents:
            line = file.read_text().splitlines()[int(number) - 1].strip()
            places.append(Place(str(file.relative_to(_NATIVE)), int(number), line))
    return next((place for place in places if _names_an_order(place.line)), None)


def _names_an_order(line: str) -> bool:
    return re.search(r"std::memory_order_(?!relaxed)", line.split("//")[0]) is not None


def _frames(program: Path, address: str) -> list[str]:
    call = hex(int(address, 16) - 1)  # the address is the one to which the call returns
    command = ["addr2line", "-i", "-e", str(program), call]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def mutants(program: Path) -> Iterator[Mutant]:
    """Yields each way to weaken the accesses of a line by one step."""
    sites = subprocess.run([program, "sites"], capture_output=True, text=True, check=True, timeout=300).stdout
    found: dict[tuple[Place, int, int], list[str]] = defaultdict(list)
    for site in sites.splitlines():
        address, kind, order = site.split()
        place = _place(_frames(program, address))
        if place is not None:
            found[place, int(kind), int(order)].append(address)
    for (place, kind, order), addresses in sorted(found.items()):
        for weaker in _WEAKER.get((kind, order), []):
            yield Mutant(place, _NAMES[order], _NAMES[weaker], tuple(addresses))


def verdict(program: Path, mutant: Mutant) -> str:
    """Returns the first scenario that goes wrong with a mutant, and how; "" if none does."""
    weaker = next(number for number, name in _NAMES.items() if name == mutant.weaker)
    command = [program, "weakened", str(weaker), *mutant.addresses]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.strip()


def verdicts(program: Path, of: Sequence[Mutant]) -> dict[Mutant, str]:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(of, pool.map(lambda mutant: verdict(program, mutant), of), strict=True))


def lines_with_orders(sources: Iterable[Path]) -> set[tuple[str, int]]:
    """Returns the lines of files in ``native/`` that name a memory order other than relaxed, and of their headers."""
    files = {file for source in sources for file in (source, source.with_suffix(".h")) if _NATIVE in file.parents}
    files = {file for file in {*files, _NATIVE / "mpi" / "wait.h"} if file.exists()}
    return {
        (str(file.relative_to(_NATIVE)), number)
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if _names_an_order(line)
    }
