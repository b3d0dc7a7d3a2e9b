"""What XLA's library for products and convolutions takes while one of them runs. XLA's account of memory lacks it.

The rules were found with JAX 0.10.2, by the blocks for which programs ask malloc while they run. What XLA
of JAX 0.9 takes for products, which it computes itself, is not known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import jax

from pycollective.jax_support.program_text import Instruction, Shape, attribute

COPIES_OPERANDS = jax.__version_info__[:2] == (0, 10)
"""Whether the library copies the operands of a convolution. That of JAX 0.11 and 0.12 does not; JAX 0.9 has none."""


def scratch_of(fused: Sequence[Instruction]) -> int:
    """The bytes that a fusion takes which XLA leaves to its library, beside operands and result.

    A convolution may copy its operands. What is reduced must be there whole before the rest of the fusion can go on, so
    a product whose result is reduced inside it has that result in memory.

    Args:
        fused: the fusion's instructions.
    """
    shapes = {instruction.name: instruction.results for instruction in fused}
    is_reduced = any(instruction.opcode == "reduce" for instruction in fused)
    nbytes = 0.0
    for instruction in fused:
        if instruction.opcode == "convolution" and COPIES_OPERANDS:
            nbytes += _copies(instruction, shapes)
        if instruction.opcode in ("dot", "convolution") and is_reduced and not instruction.is_root:
            nbytes += instruction.nbytes
    return int(nbytes)


def _copies(conv: Instruction, shapes: dict[str, tuple[Shape, ...]]) -> float:
    """The bytes of the copies of both operands.

    The first one is copied with its padding. Without padding, or with holes in the window, the window of each place is
    written down instead.

    Example:
        >>> from pycollective.jax_support.program_text import Program
        >>> program = Program.read('''ENTRY %main (x: f32[4,10,6], w: f32[3,6,8]) -> f32[4,10,8] {
        ...   %x = f32[4,10,6]{2,1,0} parameter(0)
        ...   %w = f32[3,6,8]{2,1,0} parameter(1)
        ...   ROOT %y = f32[4,10,8]{2,1,0} convolution(%x, %w), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f
        ... }''')
        >>> x, w, y = program.computations["main"]
        >>> _copies(y, {"x": x.results, "w": w.results}) == 4 * (4 * 12 * 6 + 3 * 6 * 8)
        True
    """
    image, kernel = (shapes[name][0] for name in conv.operands)
    before, rest = attribute(conv, "dim_labels").split("_")
    window = attribute(conv, "window")
    padding = re.search(r"\bpad=([-\dx_]+)", window)
    if padding and "rhs_dilate" not in window:
        dims = list(image.dims)
        for number, pads in enumerate(padding[1].split("x")):
            dims[before.index(str(number))] += sum(map(int, pads.split("_")))
        copied = math.prod(dims)
    else:
        after = kernel.dims[rest.split("->")[0].index("o")]
        copied = conv.results[0].elements // after * (kernel.elements // after)
    return image.nbytes * copied / max(1, image.elements) + kernel.nbytes
