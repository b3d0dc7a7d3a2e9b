"""Cuts an array into blocks along an axis, one for each participant of a collective, and joins blocks again."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cut(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Cuts ``axis`` into ``size`` blocks: shape ``(size, ...)`` with the axis ``size`` times shorter."""
    shape = (*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def join(blocks: jax.Array, axis: int) -> jax.Array:
    """Joins the blocks ``(size, ...)`` along ``axis`` of a block; the inverse of :func:`cut`."""
    shape = (*blocks.shape[1 : axis + 1], blocks.shape[0] * blocks.shape[axis + 1], *blocks.shape[axis + 2 :])
    return jnp.moveaxis(blocks, 0, axis).reshape(shape)
