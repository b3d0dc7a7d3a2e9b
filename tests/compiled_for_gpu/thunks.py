"""What XLA's runtime for GPUs enqueues for a program, from the files that XLA writes beside its text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_THUNK = re.compile(r"^(?P<indent> *)(?P<number>\d+): (?P<kind>k\w+) ", re.MULTILINE)
_METADATA = re.compile(r'profile_annotation: "(?P<name>[^"]*)"\s+thunk_id: (?P<number>\d+)')


@dataclass(frozen=True)
class Thunk:
    """A step of XLA's runtime.

    Attributes:
        kind: what it does, by XLA's name: "kCustomCall", say.
        name: the instruction that it comes from.
        is_recorded: whether it stands in a command buffer, a graph of CUDA's: then it runs when the graph is recorded,
            and not when the graph runs.
    """

    kind: str
    name: str
    is_recorded: bool


def read_thunks(folder: Path) -> list[Thunk]:
    """The steps of the program that XLA has dumped into a folder, in their order."""
    first = _only(folder, "thunk_sequence.txt")
    after = first.with_name(first.name.replace("sequence.txt", "sequence_after_thunk_passes.txt"))
    metadata = _only(folder, "thunk_metadata.txt").read_text()
    names = {found["number"]: found["name"] for found in _METADATA.finditer(metadata)}
    thunks: list[Thunk] = []
    buffer: int | None = None  # the indent of the command buffer around
    for found in _THUNK.finditer((after if after.exists() else first).read_text()):
        indent = len(found["indent"])
        if buffer is not None and indent <= buffer:
            buffer = None
        if found["kind"] == "kCommandBuffer" and buffer is None:
            buffer = indent
        else:
            thunks.append(Thunk(found["kind"], names.get(str(int(found["number"])), ""), buffer is not None))
    return thunks


def _only(folder: Path, name: str) -> Path:
    (file,) = folder.glob(f"*.{name}")
    return file
