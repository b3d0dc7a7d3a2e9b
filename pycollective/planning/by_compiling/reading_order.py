"""How a pass over arrays walks through them. A CPU waits for memory where neighbours are read at times far apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pycollective.jax_support.program_text import Instruction, Shape, attribute, numbers

_NO_WALK = ("gather", "scatter", "dot", "convolution", "reduce", "reduce-window", "sort", "custom-call", "iota", "rng")
"""What reads its operands in an order of its own."""


def bytes_read_across(instructions: Sequence[Instruction], shapes: Mapping[str, tuple[Shape, ...]]) -> tuple[int, ...]:
    """Returns the bytes of each array that a loop over its result reads along another dimension than neighbours lie.

    The loop runs over the result as that lies in memory. From there this follows which dimension of each operand runs
    fastest. A transposition that another one takes back costs nothing: XLA writes both into one loop.

    Args:
        instructions: those of a fusion, or a single one.
        shapes: the arrays by their names, also those that are not made here.

    Example:
        >>> from pycollective.jax_support.program_text import Program
        >>> text = '''HloModule f
        ...
        ... ENTRY %main (x: f32[8,4]) -> f32[4,8] {
        ...   %x = f32[8,4]{1,0} parameter(0)
        ...   ROOT %y = f32[4,8]{1,0} transpose(%x), dimensions={1,0}
        ... }
        ... '''
        >>> main = Program.read(text).computations["main"]
        >>> bytes_read_across(main, {one.name: one.results for one in main})
        (128,)
    """
    made = {one.name: one for one in instructions if one.opcode != "parameter"}
    root = instructions[-1]
    ends = root.operands if root.opcode == "tuple" else (root.name,)
    ways = [(name, shapes[name][0].neighbours, shapes[name][0].nbytes) for name in ends]
    seen: set[tuple[str, int | None]] = set()
    found: dict[str, float] = {}
    while ways:
        name, fastest, nbytes = ways.pop()
        if (name, fastest) in seen:
            continue
        seen.add((name, fastest))
        if name in made:
            for operand, dimension in _operands(made[name], fastest, shapes):
                ways.append((operand, dimension, min(nbytes, shapes[operand][0].nbytes)))
        elif fastest != shapes[name][0].neighbours:
            found[name] = max(nbytes, found.get(name, 0.0))
    return tuple(sorted(map(int, found.values())))


def _operands(
    one: Instruction, fastest: int | None, shapes: Mapping[str, tuple[Shape, ...]]
) -> Iterator[tuple[str, int | None]]:
    """The operands of an instruction with the dimension of each that runs fastest; None for one that is not known."""
    result = one.results[0]
    dimensions = numbers(attribute(one, "dimensions"))
    if one.opcode in _NO_WALK:
        return
    for name in one.operands:
        shape = shapes[name][0]
        if one.opcode == "transpose":
            yield name, None if fastest is None else dimensions[fastest]
        elif one.opcode in ("bitcast", "reshape"):
            yield name, shape.neighbours if fastest == result.neighbours else None
        elif one.opcode == "broadcast":
            if fastest in dimensions:  # else it reads the same element again and again
                yield name, dimensions.index(fastest)
        elif len(shape.dims) == len(result.dims):
            yield name, fastest
