"""The exchange of rows between all ranks, in slices whose sizes are known only when the program runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from pycollective.errors import message
from pycollective.jax_support import jax_internals
from pycollective.ordering import transforms
from pycollective.ordering.effect import effect
from pycollective.primitives import define, dtypes, exchanges
from pycollective.primitives.passed import Passed
from pycollective.ranks.participants import Participants

Array = jax.Array

MOST_ROWS = 2**31 - 1
"""Numbers and places of rows are int32."""

# Its operands are `output`, `x`, and `slices`, int32[4, size * each]: for each rank, `each` slices. The four rows are
# where a slice begins in `x`, the number of its rows, where it begins in the receiver's result, and the number of rows
# that arrive. What arrives takes the place of rows of `output`; if `adds`, it is added to them.
ragged_alltoall_p = define.primitive("ragged_alltoall")


@ragged_alltoall_p.def_effectful_abstract_eval
def _abstract_eval(output: Any, x: Any, slices: Any, **_: Any) -> Any:
    return jax_internals.result(output.shape, output.dtype, output, x, slices), {effect}


def _attributes(comm: Participants, adds: bool) -> dict[str, Any]:
    return {"comm": comm._key, "adds": int(adds)}


define.lower(ragged_alltoall_p, _attributes)
transforms.repeat_by_policy(ragged_alltoall_p)


def _bind(output: Array, x: Array, slices: Array, **params: Any) -> Array:
    return ragged_alltoall_p.bind(output, x, slices, in_place=(True, False, False), **params)


def _jvp_rule(primals: Sequence[Array], tangents: Sequence[Any], *, passed: Passed, **params: Any) -> Any:
    y = ragged_alltoall_p.bind(*primals, passed=passed, **params)
    if all(type(t) is ad.Zero for t in tangents[:2]) or not jnp.issubdtype(y.dtype, jnp.inexact):
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    output, x = (ad.instantiate_zeros(t) for t in tangents[:2])
    return y, ragged_alltoall_p.bind(output, x, primals[2], passed=passed.tangent(), **params)


def _transpose_rule(
    ct: Any, output: Any, x: Any, slices: Array, *, passed: Passed, comm: Participants, adds: bool, **_: Any
) -> list[Any]:
    # A slice goes back to where it came from. A row of `x` may be in several slices, so their cotangents are added.
    if type(ct) is ad.Zero:
        return [
            ad.Zero(each.aval.to_tangent_aval()) if ad.is_undefined_primal(each) else None
            for each in (output, x, slices)
        ]
    sources, sent, targets, received = slices
    places = jnp.stack([sources, targets]).reshape(2, comm.size, -1)
    of_others = exchanges.alltoall(jnp.moveaxis(places, 1, 0), comm=comm, passed=Passed.of([places]).transpose())
    sources_there, targets_here = jnp.moveaxis(of_others, 1, 0).reshape(2, -1)
    cts: list[Any] = [None, None, None]
    if ad.is_undefined_primal(x):
        back = jnp.stack([targets_here, received, sources_there, sent])
        wide = dtypes.wide(ct, "sum")
        zeros = jnp.zeros(x.aval.shape, wide.dtype)
        cts[1] = dtypes.narrow(_bind(zeros, wide, back, comm=comm, adds=True, passed=passed.transpose()), ct)
    if ad.is_undefined_primal(output):
        cts[0] = ct if adds else _without_rows(ct, targets_here, received)
    return cts


def _without_rows(x: Array, starts: Array, counts: Array) -> Array:
    """``x`` with zeros in some slices of rows."""
    steps = jnp.zeros(x.shape[0] + 1, jnp.int32).at[starts].add(1, mode="drop").at[starts + counts].add(-1, mode="drop")
    is_in_slice = jnp.cumsum(steps[:-1]) > 0
    return jnp.where(is_in_slice.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros_like(x), x)


def _batching_rule(args: Sequence[Array], dims: Sequence[Any], **params: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    output, x, slices = args
    output, x = (
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(args[:2], dims[:2], strict=True)
    )
    if dims[2] is None:  # the elements of a row get the axis of the batch
        return ragged_alltoall_p.bind(jnp.moveaxis(output, 0, 1), jnp.moveaxis(x, 0, 1), slices, **params), 1
    # The arrays of the batch lie behind one another, and each rank has the slices of all of them.
    comm, (rows_there, rows) = params["comm"], (output.shape[1], x.shape[1])
    check_rows(size * max(rows_there, rows))
    slices = jnp.moveaxis(slices, dims[2], 0)
    slices = slices.reshape(size, 4, comm.size, slices.shape[2] // comm.size)
    sources, sent, targets, received = jnp.moveaxis(slices, 1, 0)
    first = jnp.arange(size, dtype=jnp.int32)[:, None, None]

    def shifted(places: Array, length: int) -> Array:
        # A slice beyond its own array must not become one of the next array.
        is_wrong = (sent > 0) & ((places < 0) | (places > length - sent))
        return jnp.where(is_wrong, -1, places + first * length)

    parts = [shifted(sources, rows), sent, shifted(targets, rows_there), received]
    slices = jnp.moveaxis(jnp.stack(parts), 1, 2)
    slices = slices.reshape(4, slices[0].size)
    y = ragged_alltoall_p.bind(
        output.reshape(size * rows_there, *output.shape[2:]), x.reshape(size * rows, *x.shape[2:]), slices, **params
    )
    return y.reshape(output.shape), 0


ad.primitive_jvps[ragged_alltoall_p] = _jvp_rule
ad.primitive_transposes[ragged_alltoall_p] = _transpose_rule
batching.primitive_batchers[ragged_alltoall_p] = _batching_rule


def check_rows(count: int) -> None:
    """Raises ValueError if an array has more rows than the slices can count."""
    if count > MOST_ROWS:
        raise ValueError(
            message(
                "ragged_all_to_all", f"arrays of at most {MOST_ROWS} rows", f"one of {count}", "Make each row longer."
            )
        )


def slices_of(*parts: Array) -> Array:
    """The operand ``slices``, from ``input_offsets``, ``send_sizes``, ``output_offsets`` and ``recv_sizes``."""
    return jnp.stack([_as_int32(part) for part in parts])


def _as_int32(x: Array) -> Array:
    """``x`` as int32. Numbers beyond its range become ones that are wrong for all arrays."""
    info = jnp.iinfo(x.dtype)
    if info.min < -(2**31):
        x = jnp.maximum(x, -1)
    if info.max > MOST_ROWS:
        x = jnp.minimum(x, MOST_ROWS)
    return x.astype(jnp.int32)


def ragged_alltoall(output: Array, x: Array, slices: Array, *, comm: Participants) -> Array:
    """Sends slices of ``x``, and returns ``output`` with the slices that arrive.

    Args:
        output: an array of rows.
        x: an array of rows of the same shape and dtype.
        slices: the slices, as :func:`slices_of` makes them.
        comm: the ranks.
    """
    check_rows(max(output.shape[0], x.shape[0]))
    passed = Passed.of([output])  # the dtypes of the others follow
    y = _bind(dtypes.to_wire(output), dtypes.to_wire(x), slices, comm=comm, adds=False, passed=passed)
    return dtypes.from_wire(y, output)
