"""Dropout of the weights of attention, where each weight has random bits of its own.

The bits of the weight of query i, key j and head h of batch element b are the first word of

    threefry2x32(threefry2x32(key, (b, h)), (i, j))

So they do not depend on the number of devices, on the order in which these have the positions, or on the order of the
computation, and the backward pass computes them again.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); Srivastava et al., "Dropout" (2014).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any


def keys_of_heads(key: Array, batch: tuple[int, ...], heads: int, first_head: Any) -> tuple[Array, Array]:
    """Returns a key of two words for each batch element and head.

    Args:
        key: a key of :func:`jax.random.key`.
        batch: the shape of the batch.
        heads: the number of heads.
        first_head: the number of the first head, an integer or an array of one.

    Returns:
        The two words, uint32 arrays of shape (*batch, heads).
    """
    ones = (1,) * len(batch)
    words = jax.random.bits(key, (2,), jnp.uint32).reshape(2, *ones, 1)
    elements = jnp.arange(math.prod(batch), dtype=jnp.uint32).reshape(*batch, 1)
    numbers = jnp.asarray(first_head).astype(jnp.uint32) + jnp.arange(heads, dtype=jnp.uint32)
    return _hashed(words[0], words[1], elements, numbers.reshape(*ones, heads))


def kept(words: tuple[Array, Array], queries: Array, keys: Array, rate: float) -> Array:
    """Returns which weights are kept: True with the probability ``1 - rate``.

    Args:
        words: the two words of the keys of heads.
        queries: the positions of queries. Its shape can be broadcast with that of ``keys`` and those of the words, and
            has as many axes.
        keys: the positions of keys.
        rate: the share of weights that are dropped, from 0 to less than 1.
    """
    bits, _ = _hashed(*words, queries.astype(jnp.uint32), keys.astype(jnp.uint32))
    return bits >= np.uint32(min(round(rate * 2**32), 2**32 - 1))


def _hashed(*words: Array) -> tuple[Array, Array]:
    """Applies threefry2x32 to a key of two words and a counter of two words, which are broadcast together.

    It is written out, since JAX's primitive is a loop of five steps on CPUs: that takes 20 times as long.
    """
    first_key, second_key, first, second = words
    keys = first_key, second_key, first_key ^ second_key ^ np.uint32(0x1BD11BDA)
    first, second = first + keys[0], second + keys[1]
    for step in range(5):
        for rotation in _ROTATIONS[step % 2]:
            first = first + second
            second = first ^ ((second << np.uint32(rotation)) | (second >> np.uint32(32 - rotation)))
        first, second = first + keys[(step + 1) % 3], second + keys[(step + 2) % 3] + np.uint32(step + 1)
    return first, second


_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
