"""Slices of rows, taken from the arrays of all ranks: for a ragged exchange where no handler makes it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

Array = jax.Array


def with_slices(
    output: Array, operands: Sequence[Array], starts: Array, sizes: Array, targets: Array, *, adds: bool = False
) -> Array:
    """Returns ``output`` with slices of rows of all ranks' operands.

    Args:
        output: an array of rows.
        operands: the operand of each rank.
        starts: where slices begin in the operands, of shape ``(ranks, slices of a rank)``.
        sizes: their numbers of rows.
        targets: where they begin in the result.
        adds: whether they are added to the rows of ``output``. Default False: they take their place.
    """
    rows = jnp.arange(output.shape[0], dtype=starts.dtype)
    for sender, operand in enumerate(operands):
        if operand.shape[0] == 0:  # it has no slices
            continue
        for start, size, target in zip(starts[sender], sizes[sender], targets[sender], strict=True):
            sent = jnp.take(operand, rows - target + start, axis=0, mode="clip")
            arrive = ((rows >= target) & (rows < target + size)).reshape(-1, *[1] * (output.ndim - 1))
            output = jnp.where(arrive, output + sent if adds else sent, output)
    return output
