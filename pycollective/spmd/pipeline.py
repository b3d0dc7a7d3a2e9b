"""The compiler pipeline: the passes from a function to a compiled program, in their order.

1. *Trace* (``Region``). JAX differentiates and batches while it traces. A function over named axes is one
   equation, a device program, whose parameter is the function of one device's arrays (``device_program.py``).
2. *Compare*. The ranks compare the collectives over named axes at the function's first call (``ranks/agreement.py``).
3. *Discharge*. jax.lax's collectives over named axes become primitives of this package, and each device program becomes
   the program of this rank's devices (``named_axes/discharge.py``).
4. *Avoid copies*. A collective overwrites an operand if XLA need not copy the operand first
   (``jax_support/donation.py``).
5. *Arrange sums*. Sums that do not depend on each other are joined (``named_axes/fusion.py``). A sum begins as early as
   possible, to overlap with the computation (``named_axes/overlap.py``).
6. *Number reductions*. Reductions that are alike get numbers, by which the ranks see that they make them in one order
   (``ordering/operand_order.py``).
7. *Mark sections*. The collectives that each run makes in the same order become sections. Ranks on several hosts
   compare a section once in each run (``ordering/sections.py``).
8. *Lower*. The program becomes a region, one primitive without effects (``ordering/region.py``), which :func:`jax.jit`
   compiles.

Each pass between the trace and the lowering is a function from a program to a program. The command
``python -m pycollective.spmd.show`` prints a program after each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycollective.named_axes import overlap
from pycollective.ordering.region import Pass, Program, avoid_copies, mark_sections, number_reductions
from pycollective.ranks import agreement
from pycollective.spmd import device_program


def passes_of(where: str, fun: Callable[..., Any], arrange: overlap.Overlap) -> dict[str, Pass]:
    """Returns the passes of a function's programs by their names, in their order.

    Args:
        where: the name of the public function, for messages.
        fun: the function; messages show its name.
        arrange: the pass that joins and moves sums; it keeps the orders that the ranks have agreed on.
    """

    def compare(program: Program) -> Program:
        jaxpr = program.closed.jaxpr
        agreement.report_program(where, fun, lambda: device_program.collective_lines(jaxpr))
        return program

    def discharge(program: Program) -> Program:
        return program._replace(closed=device_program.replace_device_programs(program.closed))

    def arrange_sums(program: Program) -> Program:
        return program.changed(arrange)

    return {
        "compare": compare,
        "discharge": discharge,
        "avoid copies": avoid_copies,
        "arrange sums": arrange_sums,
        "number reductions": number_reductions,
        "mark sections": mark_sections,
    }
