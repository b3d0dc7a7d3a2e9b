"""What a compiled program says of its collectives: which devices speak with each other, and how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pycollective.errors import fail
from pycollective.jax_support.program_text import Shape, groups_in, that_name_devices


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


_SUMS = ("all-reduce", "reduce-scatter")


def collectives_in(text: str, size: int) -> Iterator[Collective]:
    """The collectives of a program.

    Args:
        text: the program in XLA's text form, without metadata.
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
    for line, instruction in that_name_devices(text):
        groups = _groups(line, size)
        if instruction is None or not instruction.collective or groups is None:
            remedy = 'Use pycollective.distributed.initialize(collectives="gloo"), and please report this.'
            expected = "collectives in a known form in XLA's program"
            fail(RuntimeError, "distributed", None, expected, line.strip()[:300], remedy)
        largest = max(
            (_count(instruction.collective, shape, len(groups[0])) for shape in instruction.results), default=0
        )
        yield Collective(instruction.collective, groups, largest)


def _groups(line: str, size: int) -> Sequence[Sequence[int]] | None:
    """The groups in a line; None if they are written in another form."""
    try:
        return [range(size)] if "source_target_pairs=" in line else groups_in(line, size)
    except ValueError:
        return None


def _count(kind: str, result: Shape, ranks: int) -> int:
    if kind in _SUMS:
        return result.elements
    nbytes = result.elements * max(1, result.bits // 8)  # XLA's CPU client keeps an element of 4 bits in a byte
    return nbytes // ranks if kind == "all-gather" else nbytes
