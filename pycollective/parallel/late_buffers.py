"""Allocates the buffers of loops when the loops begin, so that a schedule bounds the memory of a pipeline.

XLA fills the buffer of a loop's stacked results with zeros before the loop begins. These zeros depend on nothing, so
XLA may fill the buffers of all microbatches at the start of the program, and keep them until their loops have run. Here
the zeros depend on a number that the previous action of the pipeline gives:

    ys = scan(f, xs)    is    buffer = broadcast(zero); for i: buffer[i] = f(xs[i])

The values are the same. The program must not be differentiated afterwards.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from pycollective.jax_support import jax_internals
from pycollective.jax_support.jaxprs import all_equations, evaluate, inner_jaxprs, rebind
from pycollective.parallel.axes import vary

Array = Any

_LOOPS = ("scan", "while")


def run(closed: ClosedJaxpr, zero: Array, *args: Array) -> list[Array]:
    """Evaluates a program whose loops allocate their buffers after ``zero``.

    Args:
        closed: the program.
        zero: an int32 scalar that is 0 at run time, which XLA does not know.
        args: the arguments of the program.
    """
    read_by_loops = {
        var
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name in _LOOPS
        for var in eqn.invars
        if not isinstance(var, Literal)
    }

    def equation(eqn: JaxprEqn, operands: list[Array]) -> Any:
        name = eqn.primitive.name
        if name in ("jit", "pjit") and _has_loops(eqn):
            return run(eqn.params["jaxpr"], zero, *operands)
        if name in ("checkpoint", "remat", "remat2") and _has_loops(eqn):
            inner = ClosedJaxpr(eqn.params["jaxpr"], ())
            return jax.checkpoint(partial(run, inner), prevent_cse=eqn.params["prevent_cse"])(zero, *operands)
        if name == "scan":
            return _scan(eqn, zero, operands)
        if name == "broadcast_in_dim" and eqn.outvars[0] in read_by_loops and _is_zero(eqn.invars[0]):
            return [_zeros(eqn.outvars[0].aval, zero)]
        return rebind(eqn, operands)

    return evaluate(closed, equation, *args)


def _has_loops(eqn: JaxprEqn) -> bool:
    return any(inner.primitive.name in _LOOPS for jaxpr in inner_jaxprs(eqn) for inner in all_equations(jaxpr))


def _is_zero(operand: Any) -> bool:
    return isinstance(operand, Literal) and not any(np.asarray(operand.val).tobytes())  # but for -0.0


def _zeros(aval: Any, zero: Array) -> Array:
    zeros = lax.broadcast(zero.astype(aval.dtype), aval.shape)
    return vary(zeros, jax_internals.varying_axes_of(aval))


def _scan(eqn: JaxprEqn, zero: Array, operands: list[Array]) -> list[Array]:
    """Evaluates a scan with its stacked results in the carry."""
    consts, carries = jax_internals.counts_of_scan(eqn)
    closed, length = eqn.params["jaxpr"], eqn.params["length"]
    fixed, start, stacks = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]
    stacked = eqn.outvars[carries:]
    late = [not jnp.issubdtype(var.aval.dtype, jax.dtypes.extended) for var in stacked]
    if not any(late) or length == 0:  # without rows nothing is allocated, and JAX refuses to index them
        return list(rebind(eqn, operands))
    buffers = [_zeros(var.aval, zero) for var, is_late in zip(stacked, late, strict=True) if is_late]

    def body(state: Any, rows: list[Array]) -> Any:
        i, carry, buffers = state
        outs = evaluate(closed, rebind, *fixed, *carry, *rows)
        ys = outs[carries:]
        place = length - 1 - i if eqn.params["reverse"] else i
        kept = [y for y, is_late in zip(ys, late, strict=True) if is_late]
        written = [
            lax.dynamic_update_index_in_dim(buffer, y, place, 0) for buffer, y in zip(buffers, kept, strict=True)
        ]
        others = [y for y, is_late in zip(ys, late, strict=True) if not is_late]
        return (i + 1, outs[:carries], written), others

    options = {"length": length, "reverse": eqn.params["reverse"], "unroll": eqn.params["unroll"]}
    (_, carry, written), others = lax.scan(body, (jnp.int32(0), start, buffers), stacks, **options)
    of_late, of_others = iter(written), iter(others)
    return [*carry, *(next(of_late if is_late else of_others) for is_late in late)]
