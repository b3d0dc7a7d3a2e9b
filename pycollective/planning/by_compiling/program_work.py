"""What a device does in a compiled program: products, passes over memory and collectives, each as often as it runs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pycollective.jax_support.program_text import (
    Instruction,
    Program,
    Shape,
    attribute,
    groups_in,
    numbers,
    pairs_in,
    users,
)
from pycollective.planning.by_compiling.reading_order import bytes_read_across
from pycollective.planning.by_compiling.scratch import scratch_of

T = TypeVar("T")


class Product(NamedTuple):
    """Products of matrices (m, k) and (k, n), of which some are made in one instruction.

    Attributes:
        dtype: the dtype of the first matrix.
        batch: the number of products.
        m: the rows of the first matrix.
        k: what is summed over.
        n: the columns of the second one.
        form: BLAS's letters for how the matrices lie in memory: "N" for one that lies as it is written, "T" for one
            that lies transposed.
    """

    dtype: str
    batch: int
    m: int
    k: int
    n: int
    form: str = "NN"


class Convolution(NamedTuple):
    """A convolution, seen as products of matrices (places of the window, channels before) and (channels before, after).

    Attributes:
        dtype: the dtype of its kernel.
        smallest: the number of places in all examples, or of channels if there are fewer. Channels before and after it
            count as one number: the larger one where XLA has its library convolve, which needs one of them to be large,
            else their geometric mean.
        operations: the number of its operations.
    """

    dtype: str
    smallest: int
    operations: int


class Stream(NamedTuple):
    """A pass over memory, with what it computes on the way.

    Attributes:
        nbytes: the bytes that it reads and writes.
        functions: the number of calls of functions such as tanh and exp.
        transposed: the bytes of each array of which it reads neighbours at times that are far apart.
    """

    nbytes: int
    functions: int
    transposed: tuple[int, ...] = ()


class Communication(NamedTuple):
    """A collective.

    Attributes:
        operation: its name in JAX.
        nbytes: the bytes of operand or result, the larger of both.
        group: the devices that make it with the first one.
        largest: the bytes of the largest array if it adds up several, else 0.
    """

    operation: str
    nbytes: int
    group: tuple[int, ...]
    largest: int = 0


class Beside(NamedTuple):
    """A collective, and what a device may compute during it.

    Attributes:
        communication: the collective.
        times: how often it is made.
        computing: what is computed in that many turns.
    """

    communication: Communication
    times: int
    computing: Counter[Product | Convolution | Stream]


@dataclass(frozen=True)
class Work:
    """What one device does in a program.

    Attributes:
        computing: how often it makes each product, convolution and pass over memory.
        communication: how often it makes each collective.
        scratch: the bytes that a product or convolution takes while it runs, which XLA's account of memory lacks: the
            most of all.
        doubtful: what of ``computing`` no measured program is like, by the reason.
        beside: of the largest collectives what neither brings their operands nor waits for their results, so that it
            may take place at the same time.
    """

    computing: Counter[Product | Convolution | Stream]
    communication: Counter[Communication]
    scratch: int = 0
    doubtful: Mapping[str, Counter[Product | Convolution | Stream]] = field(default_factory=dict)
    beside: tuple[Beside, ...] = ()


IRREGULAR = "gathers, scatters and sorts"
"""A reason of doubt: what these take depends on the indices."""

LOOPS = "loops of short turns"
"""A reason of doubt: arrays stay in the caches from turn to turn, and what a turn takes by itself counts."""

UNKNOWN_TURNS = "loops whose number of turns XLA does not know"
"""A reason of doubt: they count once."""

_MOST_BESIDE = 32  # collectives of which it is kept what may take place during them
_MANY_TURNS = 8  # of a loop whose turns are alike in what the caches hold
_IRREGULAR = ("gather", "scatter", "sort")


_FREE = (
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "all-reduce-done",
    "all-gather-done",
    "collective-permute-done",
    "add-dependency",
    "opt-barrier",
)
_FUNCTIONS = (
    "tanh",
    "exponential",
    "log",
    "logistic",
    "exponential-minus-one",
    "log-plus-one",
    "sine",
    "cosine",
    "tan",
    "power",
    "sqrt",
    "rsqrt",
    "cbrt",
    "erf",
    "atan2",
)
_COLLECTIVES = {
    "all-reduce": "psum",
    "all-gather": "all_gather",
    "reduce-scatter": "psum_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "ppermute",
}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""What writes a part of an array, and the place of that part among the operands."""
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def work_of(text: str, devices: int) -> Work:
    """Reads what the first device does.

    A loop whose number of turns XLA does not know counts once, and of a conditional the branch with the most bytes.

    Args:
        text: the program, as ``compiled.as_text()`` gives it.
        devices: the number of devices it was compiled for.
    """
    reader = _Reader(Program.read(text), devices)
    computing = reader.add(reader.program.entry, 1)
    beside = _largest(reader.beside, lambda one: one.times * one.communication.nbytes)
    return Work(computing, reader.communication, reader.scratch, reader.doubtful, tuple(beside))


class _Reader:
    def __init__(self, program: Program, devices: int) -> None:
        self.program = program
        self.devices = devices
        self.communication: Counter[Communication] = Counter()
        self.scratch = 0
        self.beside: list[Beside] = []
        self.doubtful: dict[str, Counter[Product | Convolution | Stream]] = {}

    def add(self, name: str, times: int, doubt: str = "") -> Counter[Product | Convolution | Stream]:
        """Adds what a computation does, so many times, and returns what it computes.

        Args:
            name: the name of the computation.
            times: how often it runs.
            doubt: why no measured program is like it; "" for one that is like some.
        """
        computation = self.program.computations[name]
        shapes = {instruction.name: instruction.results for instruction in computation}
        computed: dict[str, Counter[Product | Convolution | Stream]] = {}
        collectives: dict[str, Communication] = {}
        for instruction in computation:
            if instruction.opcode in _FREE:
                continue
            own = computed[instruction.name] = Counter()
            if instruction.opcode == "while":
                turns = _TURNS.search(instruction.attributes)
                count = int(turns[1]) if turns else 1
                inside = UNKNOWN_TURNS if turns is None else doubt or (LOOPS if count >= _MANY_TURNS else "")
                for called in instruction.called:
                    own += self.add(called, times * count, inside)
            elif instruction.opcode in ("call", "async-start"):
                for called in instruction.called:
                    own += self.add(called, times, doubt)
            elif instruction.opcode == "conditional":
                own += self.add(max(instruction.called, key=self._bytes_of), times, doubt)
            elif instruction.collective:
                found = collectives[instruction.name] = self._collective(instruction.collective, instruction, shapes)
                self.communication[found] += times
            else:
                why = IRREGULAR if self._is_irregular(instruction) else doubt
                for each in self._computed(instruction, shapes):
                    own[each] += times
                    if why:
                        self.doubtful.setdefault(why, Counter())[each] += times
            computed[instruction.name] = own
        for of, found in _largest(collectives.items(), lambda item: item[1].nbytes):
            tied = _before(of, computation) | _after(of, computation)
            free = _total(own for other, own in computed.items() if other not in tied)
            self.beside.append(Beside(found, times, free))
        return _total(computed.values())

    def _is_irregular(self, instruction: Instruction) -> bool:
        inner = self.program.computations[instruction.called[0]] if instruction.opcode == "fusion" else (instruction,)
        return any(one.opcode in _IRREGULAR for one in inner)

    def _bytes_of(self, name: str) -> float:
        return sum(instruction.nbytes for instruction in self.program.computations[name])

    def _collective(self, kind: str, instruction: Instruction, shapes: dict[str, tuple[Shape, ...]]) -> Communication:
        each = [shape.nbytes for name in instruction.operands for shape in shapes[name]]
        nbytes = sum(each)
        group = _group(instruction.attributes, self.devices)
        # What begins and is ended later has its operands among its results.
        if kind == "all-gather":
            nbytes *= len(group)
        largest = max(each) if kind == "all-reduce" and len(each) > 1 else 0
        return Communication(_COLLECTIVES[kind], int(nbytes), group, int(largest))

    def _computed(
        self, instruction: Instruction, shapes: dict[str, tuple[Shape, ...]]
    ) -> Iterator[Product | Convolution | Stream]:
        """What an instruction computes. A product or a convolution reads and writes its arrays in its own time."""
        inner = self.program.computations[instruction.called[0]] if instruction.opcode == "fusion" else (instruction,)
        inside = {one.name: one.results for one in inner} if instruction.opcode == "fusion" else shapes
        by_library = "kind=kCustom" in instruction.attributes
        functions = 0
        found = False
        for one in inner:
            if one.opcode == "dot":
                found = True
                yield _product(one, inside)
            elif one.opcode == "convolution":
                found = True
                yield _convolution(one, inside, by_library=by_library)
            elif one.opcode in _FUNCTIONS:
                functions += one.results[0].elements
        if found:
            if by_library:
                self.scratch = max(self.scratch, scratch_of(inner))
            return
        transposed: tuple[int, ...] = ()
        if instruction.opcode == "fusion":
            nbytes = _read_and_written(inner)
            transposed = bytes_read_across(inner, inside)
        elif instruction.opcode in ("dynamic-update-slice", "scatter"):
            nbytes = 2 * sum(s.nbytes for name in instruction.operands[1:] for s in shapes[name])
        elif instruction.opcode in ("dynamic-slice", "gather", "slice", "iota", "broadcast"):
            nbytes = 2 * instruction.nbytes
        else:
            nbytes = instruction.nbytes + sum(s.nbytes for name in instruction.operands for s in shapes[name])
            if instruction.opcode in ("copy", "transpose"):
                transposed = bytes_read_across((instruction,), shapes)
        yield Stream(int(nbytes), functions, transposed)


def _largest(items: Iterable[T], size: Callable[[T], float]) -> list[T]:
    """The largest collectives, so many as are kept. Of equal ones the first."""
    return sorted(items, key=lambda item: -size(item))[:_MOST_BESIDE]


def _total(counters: Iterable[Counter[T]]) -> Counter[T]:
    """The sum of counters. It is added up in place: a program has thousands of them."""
    total: Counter[T] = Counter()
    for each in counters:
        total.update(each)
    return total


def _before(name: str, computation: Sequence[Instruction]) -> set[str]:
    """An instruction and those from which its operands come."""
    found = {name}
    for instruction in reversed(computation):  # operands stand before what reads them
        if instruction.name in found:
            found |= set(instruction.operands)
    return found


def _after(name: str, computation: Sequence[Instruction]) -> set[str]:
    """An instruction and those to which its result goes."""
    found = {name}
    for instruction in computation:
        if found.intersection(instruction.operands):
            found.add(instruction.name)
    return found


def _group(attributes: str, devices: int) -> tuple[int, ...]:
    """The devices with which the first one speaks in a collective. In a permutation, the longest way: it ends last."""
    if (pairs := pairs_in(attributes)) is not None:
        ways = [_way_through(start, pairs) for start, _ in pairs]
        return max(ways, key=lambda way: (len(way), [-device for device in way]), default=(0,))
    groups = groups_in(attributes, devices) or [range(devices)]
    return tuple(next((group for group in groups if 0 in group), (0,)))


def _way_through(start: int, pairs: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The devices that a permutation connects with one of them."""
    way = {start}
    while more := {device for pair in pairs if way & {*pair} for device in pair} - way:
        way |= more
    return tuple(sorted(way))


def _read_and_written(fused: tuple[Instruction, ...]) -> float:
    """The bytes that a fusion reads and writes: of an array that it slices or updates only these parts."""
    total = 0.0
    updated: set[str] = set()
    for instruction in fused:
        if instruction.opcode in _UPDATES:
            updated.add(instruction.operands[0])
    shapes = {instruction.name: instruction.results for instruction in fused}
    for instruction in fused:
        if instruction.opcode == "parameter" and instruction.name not in updated:
            takers = users(fused, instruction.name)
            sliced = takers and all(_slices(taker, instruction.name) for taker in takers)
            total += sum(taker.nbytes for taker in takers) if sliced else instruction.nbytes
        if instruction.is_root:
            update = _update_under(instruction, fused)
            total += sum(s.nbytes for s in shapes[update]) if update else instruction.nbytes
    return total


def _slices(taker: Instruction, name: str) -> bool:
    """Whether an instruction takes a part of an array. To the places of that part it is no slice."""
    return taker.opcode in ("dynamic-slice", "slice", "gather") and name not in taker.operands[1:]


def _update_under(root: Instruction, fused: tuple[Instruction, ...]) -> str | None:
    """The name of what is written into an array by a fusion that ends in an update; None for other fusions."""
    by_name = {instruction.name: instruction for instruction in fused}
    while root.opcode in ("bitcast", "copy", "convert") and root.operands:
        root = by_name[root.operands[0]]
    return root.operands[_UPDATES[root.opcode]] if root.opcode in _UPDATES else None


def _product(dot: Instruction, shapes: dict[str, tuple[Shape, ...]]) -> Product:
    left = shapes[dot.operands[0]][0]
    right = shapes[dot.operands[1]][0]
    batch = math.prod(left.dims[i] for i in numbers(attribute(dot, "lhs_batch_dims")))
    summed = [numbers(attribute(dot, f"{side}_contracting_dims")) for side in ("lhs", "rhs")]
    k = math.prod(left.dims[i] for i in summed[0])
    m, n = left.elements // (batch * k), right.elements // (batch * k)
    transposed = (k > 1 and left.neighbours not in summed[0], n > 1 and right.neighbours in summed[1])
    return Product(left.dtype, batch, m, k, n, "".join("T" if turned else "N" for turned in transposed))


def _convolution(conv: Instruction, shapes: dict[str, tuple[Shape, ...]], *, by_library: bool) -> Convolution:
    kernel, out = shapes[conv.operands[1]][0], conv.results[0]
    labels = attribute(conv, "dim_labels").split("_")[1].split("->")[0]
    before, after = (kernel.dims[labels.index(letter)] for letter in "io")
    groups = int(attribute(conv, "feature_group_count") or 1) * int(attribute(conv, "batch_group_count") or 1)
    channels = max(before, after // groups) if by_library else round(math.sqrt(before * after / groups))
    smallest = max(1, min(out.elements // after, channels))
    # XLA leaves out the zeros between the elements of a first operand that is spread.
    spread = math.prod(numbers(attribute(conv, "lhs_dilate")))
    return Convolution(kernel.dtype, smallest, 2 * out.elements * (kernel.elements // after) // spread)
