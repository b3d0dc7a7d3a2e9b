"""What XLA's text of a compiled program says of its collectives: which devices speak with each other, and how much."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pycollective.errors import fail


class Collective(NamedTuple):
    """A collective of a compiled program.

    Attributes:
        kind: XLA's name of it.
        groups: the groups of devices that make it together, as places in the list of the program's devices.
        largest: the largest count of its calls of MPI: the number of elements of a sum, of bytes of what moves.
    """

    kind: str
    groups: Sequence[Sequence[int]]
    largest: int


_LINE = re.compile(r"^.*(?:replica_groups=|source_target_pairs=).*$", re.MULTILINE)

_CALL = re.compile(
    r"= (?P<results>\S+|\(.*?\)) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")

_GROUPS = re.compile(
    r"replica_groups=(?:"
    r"(?P<listed>\{[{},\d]*\})"
    r"|\[(?P<shape>[\d,]+)\]<=(?P<range>\[[\d,]+\](?:T\([\d,]+\))?)"
    r"|mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<ids>[\d,]+|\[[\d,]+\](?:T\([\d,]+\))?)\))? \{(?P<axes>[^}]*)\}"
    r")"
)
"""The three forms in which XLA writes groups: listed, as a reshaped and transposed range, and as axes of a mesh."""

_AXIS = re.compile(r"'([^']+)'=(\d+)")
_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")

_SUMS = ("all-reduce", "reduce-scatter")


_METADATA = re.compile(r", metadata=\{.*$", re.MULTILINE)


def without_metadata(text: str) -> str:
    """The text of a program without what it says of its source, where users choose the words.

    Example:
        >>> without_metadata('%y = f32[] sine(%x), metadata={op_name="jit(f)/replica_groups={}/sin"}')
        '%y = f32[] sine(%x)'
    """
    return _METADATA.sub("", text)


def collectives_in(text: str, size: int) -> Iterator[Collective]:
    """The collectives of a program.

    Args:
        text: the program in XLA's text form.
        size: the number of its devices.

    Raises:
        RuntimeError: XLA has written a collective in another form.

    Example:
        >>> [found] = collectives_in("%sum = f32[8]{0} all-reduce(%x), replica_groups=[2,2]<=[2,2]T(1,0), ...", 4)
        >>> found.kind, found.groups, found.largest
        ('all-reduce', [[0, 2], [1, 3]], 8)
        >>> [found] = collectives_in("%p = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1}}, ...", 2)
        >>> found.groups, found.largest
        ([range(0, 2)], 32)
    """
    for line in _LINE.findall(text):
        call = _CALL.search(line)
        groups = [range(size)] if "source_target_pairs=" in line else groups_in(line, size)
        if call is None or groups is None:
            remedy = 'Use pycollective.distributed.initialize(collectives="gloo"), and please report this.'
            expected = "collectives in a known form in XLA's program"
            fail(RuntimeError, "distributed", None, expected, line.strip()[:300], remedy)
        yield Collective(call["kind"], groups, _largest_count(call["kind"], call["results"], len(groups[0])))


def _largest_count(kind: str, results: str, ranks: int) -> int:
    counts = []
    for dtype, bits, dims in _ARRAY.findall(results):
        elements = math.prod(_numbers(dims))
        nbytes = elements * (1 if dtype == "pred" else max(1, int(bits) // 8))
        counts.append(elements if kind in _SUMS else nbytes // ranks if kind == "all-gather" else nbytes)
    return max(counts, default=0)


def groups_in(line: str, size: int) -> Sequence[Sequence[int]] | None:
    """The groups of devices that a line names, as places in the list of the program's devices; None if it names none.

    Example:
        >>> groups_in("replica_groups=[2,2]<=[2,2]T(1,0), ...", 4), groups_in("replica_groups={}", 2)
        ([[0, 2], [1, 3]], [range(0, 2)])
    """
    match = _GROUPS.search(line)
    if match is None:
        return None
    return _listed(match, size) if match["listed"] else _computed(match)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _listed(match: re.Match[str], size: int) -> Sequence[Sequence[int]]:
    groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", match["listed"])]
    return groups or [range(size)]


def _computed(match: re.Match[str]) -> Sequence[Sequence[int]]:
    if match["shape"]:
        rows: list[list[int]] = _range(match["range"]).reshape(_numbers(match["shape"])).tolist()
        return rows
    sizes = {name: int(size) for name, size in _AXIS.findall(match["mesh"])}
    ids = _range(match["ids"] or f"[{math.prod(sizes.values())}]")
    # An axis may be cut: 'a':(2)4 is the part of size 4 that comes after parts of size 2.
    chosen = [(name, int(before or 1), int(size or sizes[name])) for name, before, size in _PART.findall(match["axes"])]
    cuts = {name: sorted({1, full, *_cuts_of(name, chosen)}) for name, full in sizes.items()}
    pieces = [(name, low, high // low) for name in sizes for low, high in zip(cuts[name], cuts[name][1:], strict=False)]
    array = ids.reshape([size for _, _, size in pieces])
    inner = [
        number
        for name, before, size in chosen
        for number, (other, low, _) in enumerate(pieces)
        if other == name and before <= low < before * size
    ]
    outer = [number for number in range(len(pieces)) if number not in inner]
    grouped = array.transpose([*outer, *inner]).reshape(-1, math.prod(pieces[number][2] for number in inner))
    found: list[list[int]] = grouped.tolist()
    return found


def _range(text: str) -> np.ndarray:
    """The numbers that XLA writes as a list, or as the shape and the transposition of a range."""
    if not text.startswith("["):
        return np.array(_numbers(text))
    shape, _, order = text.partition("T")
    numbers = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return numbers.transpose(_numbers(order)) if order else numbers


def _cuts_of(name: str, chosen: Sequence[tuple[str, int, int]]) -> list[int]:
    return [cut for axis, before, size in chosen if axis == name for cut in (before, before * size)]
