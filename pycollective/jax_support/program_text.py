"""XLA's text of a compiled program, read as computations of instructions with shapes and groups of devices."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_BITS = {"bool": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"(?<!\w)(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\](?:\{(?P<order>[\d,]*))?")
_NAME = re.compile(r"%([\w.\-]+)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s*(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r"^([\w\-]+)\(")
_METADATA = re.compile(r', metadata=\{(?:[^{}"]|\{[^{}]*\}|"(?:[^"\\]|\\.)*")*\}')  # in quotes stand the user's words
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OF_DEVICES = re.compile(r"^.*(?:replica_groups=|source_target_pairs=).*$", re.MULTILINE)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")

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

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""XLA's names of the collectives, without the "-start" and "-done" of those that begin and are ended later."""


@dataclass(frozen=True)
class Shape:
    """An array.

    Attributes:
        dtype: by JAX's name.
        dims: the dimensions.
        order: the numbers of the dimensions as they lie in memory, the one of neighbours first; empty if that is the
            last one, as in C.
    """

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """The bits of an element."""
        found = re.search(r"\d+", self.dtype)
        return int(found[0]) if found else _BITS.get(self.dtype, 8)

    @property
    def nbytes(self) -> float:
        """The bytes."""
        return self.elements * self.bits / 8

    @property
    def neighbours(self) -> int | None:
        """The number of the dimension along which neighbours in memory lie; None for a single element.

        Example:
            >>> Shape("float32", (8, 4)).neighbours, Shape("float32", (8, 4, 1), (2, 0, 1)).neighbours
            (1, 0)
        """
        order = self.order or tuple(reversed(range(len(self.dims))))
        return next((number for number in order if self.dims[number] > 1), None)


@dataclass(frozen=True)
class Instruction:
    """An instruction.

    Attributes:
        name: its name in its computation.
        opcode: what it does, by XLA's name.
        results: the arrays that it makes; several for a tuple.
        operands: the names of the instructions whose results it takes.
        attributes: the rest of its line.
        is_root: whether its result is that of the computation.
    """

    name: str
    opcode: str
    results: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def nbytes(self) -> float:
        """The bytes of the results."""
        return sum(shape.nbytes for shape in self.results)

    @property
    def collective(self) -> str:
        """Which of :data:`COLLECTIVES` it is or begins; "" if it is none."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else ""

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it calls, each as often as they stand in its line."""
        found = _CALLED.findall(self.attributes)
        branches = _BRANCHES.search(self.attributes)
        return (*found, *(_NAME.findall(branches[1]) if branches else ()))


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        entry: the name of the computation that runs.
        computations: from each name to the instructions, in their order.
    """

    entry: str
    computations: dict[str, tuple[Instruction, ...]]

    @classmethod
    def read(cls, text: str) -> Program:
        """Reads the text that JAX's ``compiled.as_text()`` returns.

        Raises:
            ValueError: an instruction is written in another form.

        Example:
            >>> program = Program.read('''HloModule f, num_partitions=2
            ...
            ... ENTRY %main (x: f32[8,4]) -> f32[4,8] {
            ...   %x = f32[8,4]{1,0} parameter(0)
            ...   ROOT %y = f32[4,8]{1,0} transpose(%x), dimensions={1,0}
            ... }
            ... ''')
            >>> last = program.computations[program.entry][-1]
            >>> last.opcode, last.operands, last.results, last.nbytes
            ('transpose', ('x',), (Shape(dtype='float32', dims=(4, 8), order=(1, 0)),), 128.0)
        """
        entry, name = "", ""
        computations: dict[str, list[Instruction]] = {}
        for line in without_metadata(text).splitlines():
            if head := _COMPUTATION.match(line):
                name = head["name"]
                computations[name] = []
                entry = name if line.startswith("ENTRY") else entry
            elif name and _INSTRUCTION.match(line):
                computations[name].append(_instruction(line))
        return cls(entry, {name: tuple(instructions) for name, instructions in computations.items()})


def without_metadata(text: str) -> str:
    """The text of a program without what it says of its source, where users choose the words.

    Example:
        >>> without_metadata('%y = f32[] sine(%x), metadata={op_name="jit(f)/replica_groups={}/sin"}')
        '%y = f32[] sine(%x)'
    """
    return _METADATA.sub("", text)


def that_name_devices(text: str) -> Iterator[tuple[str, Instruction | None]]:
    """The lines of a program's text that name groups or pairs of devices, each read alone: the rest may be long.

    Args:
        text: the text without metadata.

    Yields:
        A line, and its instruction; None if it is in another form than this file knows.
    """
    for line in _OF_DEVICES.findall(text):
        try:
            yield line, _instruction(line)
        except ValueError:
            yield line, None


def _instruction(line: str) -> Instruction:
    """Reads a line; raises ValueError for a line in another form."""
    found = _INSTRUCTION.match(line)
    if found is None:
        raise ValueError(f"no instruction: {line[:100]!r}")
    rest = found["rest"]
    end = _end_of_group(rest) if rest.startswith("(") else rest.index(" ")
    shapes, rest = rest[:end], rest[end:].lstrip()
    opcode = _OPCODE.match(rest)
    if opcode is None:
        raise ValueError(f"no name of an instruction in {line[:100]!r}")
    start = opcode.end() - 1
    close = start + _end_of_group(rest[start:])
    operands = tuple(_NAME.findall(rest[start:close]))
    results = tuple(_shapes(shapes))
    return Instruction(found["name"], opcode[1], results, operands, rest[close:], bool(found["root"]))


def _end_of_group(text: str) -> int:
    """The place after the bracket that closes the one with which a text begins."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if depth == 0:
            return place + 1
    raise ValueError(f"a bracket that closes is missing in {text[:100]!r}")


_DTYPES = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex", "pred": "bool"}


def _shapes(text: str) -> Iterator[Shape]:
    for found in _ARRAY.finditer(text):
        letters = re.match(r"[a-z]+", found["dtype"])
        assert letters is not None
        kind = _DTYPES.get(letters[0], letters[0])
        dims, order = numbers(found["dims"]), numbers(found["order"] or "")
        if order and sorted(order) != list(range(len(dims))):
            raise ValueError(f"no order of {len(dims)} dimensions: {order}")
        yield Shape(kind + found["dtype"][letters.end() :], dims, order)


def numbers(text: str) -> tuple[int, ...]:
    """The whole numbers in a text.

    Example:
        >>> numbers("{1,0}")
        (1, 0)
    """
    return tuple(map(int, re.findall(r"\d+", text)))


def attribute(instruction: Instruction, name: str) -> str:
    """The value of an attribute; empty if it is not there.

    Example:
        >>> dot = Instruction("y", "dot", (), (), ", lhs_contracting_dims={1}, rhs_contracting_dims={0}", False)
        >>> attribute(dot, "rhs_contracting_dims"), attribute(dot, "lhs_batch_dims")
        ('{0}', '')
    """
    found = re.search(rf"\b{name}=(\{{[^}}]*\}}|\S+?)(?:,|$|\s)", instruction.attributes)
    return found[1] if found else ""


def users(computation: Sequence[Instruction], name: str) -> list[Instruction]:
    """The instructions that take the result of one."""
    return [instruction for instruction in computation if name in instruction.operands]


def groups_in(attributes: str, size: int) -> Sequence[Sequence[int]] | None:
    """The groups of devices that an instruction names, by their places in the program's list; None if it names none.

    Args:
        attributes: the instruction's.
        size: the number of the program's devices.

    Raises:
        ValueError: the groups are not of these devices, or written in another form.

    Example:
        >>> groups_in("replica_groups=[2,2]<=[2,2]T(1,0), ...", 4), groups_in("replica_groups={}", 2)
        ([[0, 2], [1, 3]], [range(0, 2)])
    """
    match = _GROUPS.search(attributes)
    if match is None:
        return None
    groups = _listed(match, size) if match["listed"] else _computed(match, size)
    if not groups or not all(len(group) and max(group) < size for group in groups):
        raise ValueError(f"expected groups of {size} devices, got {match[0][:100]}")
    return groups


def pairs_in(attributes: str) -> list[tuple[int, ...]] | None:
    """The pairs of devices of which one sends to the other, by their places in that list; None if it names none.

    Example:
        >>> pairs_in("source_target_pairs={{0,1},{1,0}}, ..."), pairs_in("replica_groups={}")
        ([(0, 1), (1, 0)], None)
    """
    found = _PAIRS.search(attributes)
    return [numbers(pair) for pair in re.findall(r"\{(\d+,\d+)\}", found[1])] if found else None


def _listed(match: re.Match[str], size: int) -> Sequence[Sequence[int]]:
    groups = [numbers(group) for group in re.findall(r"\{([\d,]+)\}", match["listed"])]
    return groups or [range(size)]


def _computed(match: re.Match[str], size: int) -> Sequence[Sequence[int]]:
    if match["shape"]:
        rows: list[list[int]] = _range(match["range"], size).reshape(numbers(match["shape"])).tolist()
        return rows
    sizes = {name: int(length) for name, length in _AXIS.findall(match["mesh"])}
    ids = _range(match["ids"] or f"[{math.prod(sizes.values())}]", size)
    # An axis may be cut: 'a':(2)4 is the part of size 4 that comes after parts of size 2.
    parts = _PART.findall(match["axes"])
    chosen = [(name, int(before or 1), int(length or sizes.get(name, 0))) for name, before, length in parts]
    lengths = [*sizes.values(), *(length for _, *own in chosen for length in own)]
    if min(lengths, default=1) < 1 or not {name for name, *_ in chosen} <= sizes.keys():
        raise ValueError(f"expected axes of the mesh, got {match[0][:100]}")
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


def _range(text: str, most: int) -> np.ndarray:
    """The numbers that XLA writes as a list, or as the shape and transposition of a range of at most ``most``."""
    if not text.startswith("["):
        return np.array(numbers(text))
    shape, _, order = text.partition("T")
    if math.prod(numbers(shape)) > most:
        raise ValueError(f"expected a range of {most} devices, got {text[:100]}")
    array = np.arange(math.prod(numbers(shape))).reshape(numbers(shape))
    return array.transpose(numbers(order)) if order else array


def _cuts_of(name: str, chosen: Sequence[tuple[str, int, int]]) -> list[int]:
    return [cut for axis, before, size in chosen if axis == name for cut in (before, before * size)]
