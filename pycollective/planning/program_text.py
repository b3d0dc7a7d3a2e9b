"""XLA's text of a compiled program, read as computations of instructions with shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<dims>[\d,]*)\](?:\{(?P<order>[\d,]*))?")
_NAME = re.compile(r"%([\w.\-]+)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r"^([\w\-]+)\(")
_METADATA = re.compile(r', metadata=\{(?:[^{}"]|\{[^{}]*\}|"(?:[^"\\]|\\.)*")*\}')  # in quotes stand the user's words
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


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
    def nbytes(self) -> float:
        """The bytes."""
        bits = re.search(r"\d+", self.dtype)
        return self.elements * (int(bits[0]) if bits else _BITS.get(self.dtype, 8)) / 8

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
        computations: dict[str, tuple[Instruction, ...]] = {}
        for line in _METADATA.sub("", text).splitlines():
            if head := _COMPUTATION.match(line):
                name = head["name"]
                computations[name] = ()
                entry = name if line.startswith("ENTRY") else entry
            elif name and (found := _INSTRUCTION.match(line)):
                computations[name] += (_instruction(found["name"], found["rest"], is_root=bool(found["root"])),)
        return cls(entry, computations)


def _instruction(name: str, rest: str, *, is_root: bool) -> Instruction:
    end = _end_of_group(rest) if rest.startswith("(") else rest.index(" ")
    shapes, rest = rest[:end], rest[end:].lstrip()
    opcode = _OPCODE.match(rest)
    assert opcode is not None, rest
    start = opcode.end() - 1
    close = start + _end_of_group(rest[start:])
    operands = tuple(_NAME.findall(rest[start:close]))
    return Instruction(name, opcode[1], tuple(_shapes(shapes)), operands, rest[close:], is_root)


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
        order = numbers(found["order"] or "")
        yield Shape(kind + found["dtype"][letters.end() :], numbers(found["dims"]), order)


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
